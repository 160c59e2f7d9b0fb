"""JSON and YAML, read alike: every file of ours that a person may edit comes through here.

In: text. Out: what it says, in plain Python values; or a `NotationError` in words, with its place.
A key that is given twice is an error in both: the one that wins is seldom the one that was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

# What begins so is JSON; `{key: value}` is YAML too.
_JSON: Final = re.compile(r'\s*\{\s*["}]')


class NotationError(ValueError):
    """A text is neither JSON nor YAML, or says one thing twice.

    Args:
        problem: what is wrong, in words.
        line: counted from 1, where it is known; `column` likewise.
    """

    def __init__(self, problem: str, *, line: int | None = None, column: int | None = None) -> None:
        self.problem = problem
        self.line = line
        self.column = column
        super().__init__(problem if line is None else f"{problem} (line {line}, column {column})")


def parse_notation(text: str) -> object:
    """Read a text that is JSON or YAML.

    Raises:
        NotationError: it is neither, or a key is given twice in a mapping.
    """
    try:
        return _parse_json(text) if _JSON.match(text) else _parse_yaml(text)
    except NotationError:
        raise
    except RecursionError as error:
        raise NotationError("it is nested too deeply") from error
    except (ValueError, OverflowError) as error:
        # Numbers of thousands of digits, and dates that no calendar has.
        raise NotationError(f"a value cannot be read: {str(error).partition(';')[0]}") from error


def _parse_json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_take_pairs)
    except json.JSONDecodeError as error:
        raise NotationError(error.msg, line=error.lineno, column=error.colno) from error


def _take_pairs(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    taken = dict(pairs)
    if len(taken) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NotationError(f"the key {twice!r} is given twice")
    return taken


def _parse_yaml(text: str) -> object:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        for key in _find_repeated(node):
            mark = key.start_mark
            raise NotationError(
                f"the key {key.value!r} is given twice", line=mark.line + 1, column=mark.column + 1
            )
        if node is None:
            return None
        return cast("object", loader.construct_document(node))  # the loader is untyped
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        words = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise NotationError(
            str(words or "it cannot be read"),
            line=None if mark is None else mark.line + 1,
            column=None if mark is None else mark.column + 1,
        ) from error


def _find_repeated(root: Any) -> Iterator[Any]:  # Any: nodes of yaml, which has no types
    import yaml

    pending, seen = [root], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            names = set[object]()
            for key, value in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
                if name in names:
                    yield key
                if name is not None:
                    names.add(name)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
