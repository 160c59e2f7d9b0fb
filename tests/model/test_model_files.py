"""model.json: an exact round trip, and errors that name the place."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from lowered_cases import models
from models import make_model

from packhorse.errors import FileFormatError
from packhorse.model.files import format_model, parse_model, read_model


@given(models())
def test_a_model_is_read_back_exactly(model):
    again = parse_model(format_model(model))
    assert again == model
    for ours, theirs in (
        (again.bodies, model.bodies),
        (again.values, model.values),
        (again.parameters, model.parameters),
    ):
        assert list(ours) == list(theirs)
    assert format_model(again) == format_model(model)


def test_a_file_is_read_back_in_json_and_yaml(tmp_path):
    model = make_model(tied_head=True, frozen=("embed",))
    (tmp_path / "model.json").write_text(format_model(model))
    assert read_model(tmp_path / "model.json") == model
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    assert read_model(tmp_path / "model.yaml") == model


def test_halves_are_read_back_and_their_keys_are_known():
    model = make_model(halved=True)
    assert parse_model(format_model(model)) == model
    content = json.loads(format_model(model))
    assert parse_model(json.dumps(content)).bodies == model.bodies
    for path in (("halves", "wait"), ("halves", "weight", "wait")):
        changed = json.loads(format_model(model))
        change(changed["bodies"][1], path, 1)
        with pytest.raises(FileFormatError, match="unknown key 'wait'"):
            parse_model(json.dumps(changed))
    assert "halves" not in format_model(make_model())


def change(content, path, value):
    *parents, last = path
    for part in parents:
        content = content[part]
    if value is None:
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "what", "where"),
    [
        (("kind",), "packhorse/plan", "no model file: its kind is 'packhorse/plan'", "here"),
        (("version",), 2, "version 2; this packhorse reads up to 1", "here"),
        (("version",), True, "version True is no version number", "here"),
        (("rows",), None, "key 'rows' is missing", "here"),
        (("rows",), "4", "key 'rows': input should be a valid integer", "here"),
        (("colour",), 1, "unknown key 'colour'", "here"),
        (("blocks", 1, "boddy"), "x", "unknown key 'boddy'", "blocks[1]"),
        (("blocks", 1, "body"), "nobody", "there is no body nobody", "blocks[1]"),
        (("blocks", 1, "id"), 2, "has the id 2, not 1", "blocks[1]"),
        (("blocks", 0, "inputs"), ["nothing"], "there is no value nothing", "blocks[0]"),
        (("blocks", 0, "parameters"), ["no.weight"], "no parameter no.weight", "blocks[0]"),
        (("loss",), "gain", "there is no value gain", "loss"),
        (("values", 0, "consumers"), [9], "there is no block 9", "value input_ids"),
        (("values", 0, "shape"), ["1"], "key 'values[0].shape[0]'", "here"),
        (("parameters", 0, "dtype"), "floaty32", "unknown dtype", "parameter embed.weight"),
        (("parameters", 1, "name"), "embed.weight", "embed.weight is there twice", "parameters"),
    ],
)
def test_a_wrong_part_is_named(path, value, what, where):
    content = json.loads(format_model(make_model()))
    change(content, path, value)
    with pytest.raises(FileFormatError) as caught:
        parse_model(json.dumps(content), where="here")
    assert what in caught.value.what
    assert where in (caught.value.where or "")
    assert caught.value.fix


@pytest.mark.parametrize("text", ["{", "- a\n- b", "a: [", '{"kind": "packhorse/model"'])
def test_what_is_no_model_is_refused(text):
    with pytest.raises(FileFormatError, match="model file"):
        parse_model(text)


def test_a_missing_file_says_who_writes_one(tmp_path):
    with pytest.raises(FileFormatError) as caught:
        read_model(tmp_path / "model.json")
    assert "No such file" in caught.value.what
    assert "packhorse plan" in (caught.value.fix or "")
