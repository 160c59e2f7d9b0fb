"""JSON and YAML are read alike, and what cannot be read says where."""

from __future__ import annotations

import pytest

from packhorse.errors import FileFormatError, RecipeError
from packhorse.machine.files import parse_machine
from packhorse.model.files import parse_model
from packhorse.notation import NotationError, parse_notation
from packhorse.profile.files import parse_profile
from packhorse.timeline.files import parse_timeline
from packhorse.trainer.recipe_files import parse_recipe


@pytest.mark.parametrize("text", ['{"a": [1, null], "b": 1e9}', "a: [1, null]\nb: 1.0e+9\n"])
def test_json_and_yaml_say_the_same(text: str) -> None:
    assert parse_notation(text) == {"a": [1, None], "b": 1e9}


@pytest.mark.parametrize(
    ("text", "value"), [("", None), ("{a: 1}", {"a": 1}), ("{}", {}), ("5", 5)]
)
def test_short_texts_are_read(text: str, value: object) -> None:
    assert parse_notation(text) == value


UNREADABLE = [
    ("seed: 1\nseed: 2\n", "the key 'seed' is given twice (line 2, column 1)"),
    ("plan:\n  heap: map\n  heap: keep\n", "the key 'heap' is given twice (line 3, column 3)"),
    ('{"seed": 1, "seed": 2}', "the key 'seed' is given twice"),
    ("seed: 2026-13-45\n", "a value cannot be read: month must be in 1..12"),
    ("seed: " + "9" * 5000 + "\n", "a value cannot be read: Exceeds the limit"),
    ('{"seed": ' + "9" * 5000 + "}", "a value cannot be read: Exceeds the limit"),
    ("a: " + "[" * 3000 + "\n", "it is nested too deeply"),
    ('{"a":' * 30000, "it is nested too deeply"),
    ("a: \0\n", "special characters are not allowed"),
    ('{"a": }', "Expecting value (line 1, column 7)"),
    ("a: b: c", "mapping values are not allowed here (line 1, column 5)"),
]


@pytest.mark.parametrize(("text", "words"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_cannot_be_read_says_why(text: str, words: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_notation(text)
    assert str(caught.value).startswith(words)
    with pytest.raises(RecipeError, match="the recipe cannot be read: "):
        parse_recipe(text)
    for parse in (parse_machine, parse_model, parse_profile, parse_timeline):
        with pytest.raises(FileFormatError):
            parse(text)


def test_a_setting_that_cannot_be_read_is_named() -> None:
    with pytest.raises(RecipeError, match=r"the value of seed cannot be read: .*month must be"):
        parse_recipe("", ["seed=2026-13-45"])
