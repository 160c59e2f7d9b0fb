"""profile.json: an exact round trip, and errors that name the key."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from models import make_model

from packhorse.errors import FileFormatError
from packhorse.machine.catalogue import load_known_machine
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.files import format_profile, parse_profile, read_profile


def make_text():
    return format_profile(estimate_profile(make_model(), load_known_machine("laptop-16gb")))


def test_a_profile_is_read_back_exactly():
    profile = estimate_profile(make_model(num_layers=3), load_known_machine("laptop-16gb"))
    profile = replace(profile, busy_share=0.25)
    text = format_profile(profile)
    assert parse_profile(text) == profile
    assert parse_profile(yaml.safe_dump(json.loads(text), sort_keys=False)) == profile
    # Files of before nobody looked say nothing of it.
    older = {key: value for key, value in json.loads(text).items() if key != "busy_share"}
    assert parse_profile(json.dumps(older)).busy_share == 0.0


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("kind", "packhorse/plan", "key 'kind'"),
        ("version", 2, "version 2; this Packhorse reads versions up to 1"),
        ("rows", "1", "key 'rows'"),
        ("colour", 1, "key 'colour'"),
        ("bodies", {"embed": [1, 2]}, "key 'bodies.embed.2'"),
    ],
)
def test_a_wrong_key_is_named(key, value, what):
    content = json.loads(make_text()) | {key: value}
    with pytest.raises(FileFormatError, match=what):
        parse_profile(json.dumps(content), where="here")


@pytest.mark.parametrize("text", ["{", "- a", "a: ["])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(FileFormatError, match="profile"):
        parse_profile(text)


def test_a_missing_file_says_who_writes_one(tmp_path):
    with pytest.raises(FileFormatError) as caught:
        read_profile(tmp_path / "profile.json")
    assert "packhorse plan" in (caught.value.fix or "")
