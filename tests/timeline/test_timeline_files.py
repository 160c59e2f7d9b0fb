import json
from dataclasses import replace

import pytest
import yaml

from packhorse.errors import FileFormatError
from packhorse.timeline.files import (
    format_timeline,
    parse_timeline,
    read_timeline,
)
from packhorse.timeline.spec import Timeline
from tests.timeline.timelines import make_timeline

TEXT = """\
{
  "kind": "packhorse/timeline",
  "version": 2,
  "source": "simulated",
  "rank": 0,
  "since_ns": 0,
  "span_columns": ["index", "name", "kind", "lane", "start_ns", "end_ns"],
  "spans": [
    [0, "copy param/0 disk -> device", "disk_read", "disk_read", 0, 1500],
    [1, "forward 0@0", "forward", "compute", 1500, 4001],
    [2, "backward 0@0", "backward", "compute", 4001, 9000],
    [3, "free param/0 device", "free", "compute", 9000, 9000]
  ],
  "memory_columns": ["at_ns", "used_bytes"],
  "memory": {
    "device": [
      [0, 0],
      [0, 4096],
      [9000, 0]
    ],
    "disk": [
      [0, 8192]
    ]
  }
}
"""
EMPTY = Timeline(source="measured", rank=3, spans=(), memory={})


def test_the_text_is_settled():
    assert format_timeline(make_timeline()) == TEXT


@pytest.mark.parametrize(
    "timeline",
    [
        make_timeline(source="measured", rank=2),
        replace(make_timeline(), since_ns=1200),
        EMPTY,
    ],
)
def test_reads_back_what_was_written(timeline, tmp_path):
    (tmp_path / "timeline.json").write_text(format_timeline(timeline))
    assert read_timeline(tmp_path / "timeline.json") == timeline
    as_yaml = yaml.safe_dump(json.loads(format_timeline(timeline)))
    assert parse_timeline(as_yaml) == timeline


def test_the_first_version_knew_no_step_before():
    first = TEXT.replace('"version": 2', '"version": 1').replace('  "since_ns": 0,\n', "")
    assert parse_timeline(first) == make_timeline()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 2', '"version": 3', "the timeline has version 3; this packhorse reads up to"),
        ('"version": 2', '"version": "1"', "version '1' is no version number"),
        ("packhorse/timeline", "packhorse/plan", "its kind is 'packhorse/plan'"),
        ('"rank": 0', '"rank": -1', "rank is -1, not a count"),
        ('"since_ns": 0', '"since_ns": -1', "since_ns is -1, not a time in ns"),
        ('"rank": 0', '"rank": 0, "rnk": 1', "unknown key 'rnk'"),
        ('"simulated"', '"guessed"', "source is 'guessed'"),
        ('"compute", 1500', '"computer", 1500', "unknown lane 'computer'"),
        ("1500, 4001]", "1500]", "a span is [index, name, kind, lane, start_ns, end_ns], not"),
        ("[0, 8192]", "[0, 1.5]", "a point of memory is [at_ns, used_bytes], not [0, 1.5]"),
        ('"spans"', '"span"', "unknown key 'span'"),
        ('"memory": {', '"memory": 3, "x": {', "unknown key 'x'"),
        ("[9000, 0]\n", "[9000, 0\n", "the timeline is damaged: "),
        (TEXT, "[]", "this is no timeline: it has no keys"),
        (TEXT, "a: b: c", "the timeline is damaged: mapping values are not allowed here"),
    ],
)
def test_says_what_is_wrong_with_a_file(old, new, message):
    with pytest.raises(FileFormatError) as caught:
        parse_timeline(TEXT.replace(old, new, 1), where="t.json")
    assert message in caught.value.what
    assert "t.json" in (caught.value.where or "")
    assert caught.value.fix


def test_places_are_named():
    with pytest.raises(FileFormatError) as caught:
        parse_timeline(TEXT.replace("1500, 4001]", "1500]"), where="t.json")
    assert caught.value.where == "t.json: spans[1]"


def test_a_missing_or_binary_file_is_an_input_error(tmp_path):
    with pytest.raises(FileFormatError, match="there is no such timeline file"):
        read_timeline(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="the timeline is no text"):
        read_timeline(tmp_path / "binary")
