"""Typed reading of the keys of a plan file, with errors that name key, value and nearest key.

In: the mappings that JSON or YAML gave. Out: checked values. Every key must be asked for before
`finish`, which refuses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final, NoReturn, TypeVar, cast

from packhorse.errors import FileFormatError
from packhorse.plan.spec import Choice, Durable, Piece
from packhorse.units import parse_bytes

BY_HAND: Final = "written by hand"
Word = TypeVar("Word")
_PIECE: Final = re.compile(r"(.+)\[(\d+):(\d+)\]")


def as_mapping(value: object) -> Mapping[object, object] | None:
    """The value if it is a mapping."""
    if isinstance(value, Mapping):
        return cast(Mapping[object, object], value)  # isinstance leaves its types unknown
    return None


def as_list(value: object) -> Sequence[object] | None:
    """The value if it is a sequence and no text."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return cast(Sequence[object], value)  # isinstance leaves its types unknown
    return None


class Fields:
    """The keys of one mapping of a file, read one by one."""

    def __init__(self, content: Mapping[object, object], *, where: str, path: str) -> None:
        self._content = content
        self._where = where
        self._path = path
        self._asked: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def place(self, key: str) -> str:
        """The file and the dotted path of a key, for errors."""
        dotted = f"{self._path}.{key}" if self._path else key
        return f"{self._where}: {dotted}"

    def has_value(self, key: str) -> bool:
        """Whether a key is there and is not null; a null counts as asked for."""
        self._asked.append(key)
        return self._content.get(key) is not None

    def finish(self) -> None:
        """Refuse keys that nothing asked for."""
        for key in self._content:
            if key not in self._asked:
                near = get_close_matches(str(key), self._asked, n=1, cutoff=0.0)
                raise FileFormatError(
                    f"unknown key {str(key)!r}",
                    where=self.place(str(key)),
                    fix=f"remove it; the nearest known key is {near[0]!r}" if near else None,
                )

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str):
            self._refuse(key, value, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(
            item if isinstance(item, str) else self._refuse(key, item, "a list of texts")
            for item in self._list(key)
        )

    def flag(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def count(self, key: str, *, least: int = 0) -> int:
        return self._as_count(key, self._take(key), least)

    def number(self, key: str) -> float:
        value = self._take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self._refuse(key, value, "a number of at least 0")
        return float(value)

    def counts(self, key: str) -> tuple[int, ...]:
        return tuple(self._as_count(key, item, 0) for item in self._list(key))

    def size(self, key: str) -> int:
        return self._as_size(key, self._take(key))

    def sizes(self, key: str) -> dict[str, int]:
        """Read a mapping from any text to sizes."""
        section = self.section(key)
        return {str(name): section.size(str(name)) for name in section.names()}

    def names(self) -> tuple[object, ...]:
        """All keys that are there."""
        return tuple(self._content)

    def one_of(self, key: str, words: Sequence[Word]) -> Word:
        return self._as_word(key, self._take(key), words)

    def choice_of(self, key: str, words: Sequence[Word]) -> Choice[Word]:
        value, because = self._choice(key)
        return Choice(value=self._as_word(key, value, words), because=because)

    def choice_of_count(self, key: str, *, least: int = 1) -> Choice[int]:
        value, because = self._choice(key)
        return Choice(value=self._as_count(key, value, least), because=because)

    def choice_of_count_or_none(self, key: str) -> Choice[int | None]:
        value, because = self._choice(key)
        count = None if value is None else self._as_count(key, value, 1)
        return Choice(value=count, because=because)

    def choice_of_count_or_off(self, key: str) -> Choice[Durable]:
        value, because = self._choice(key)
        # YAML reads an unquoted `off` as false.
        if value is False or value == "off":
            return Choice(value="off", because=because)
        return Choice(value=self._as_count(key, value, 1), because=because)

    def choice_of_counts(self, key: str) -> Choice[tuple[int, ...]]:
        value, because = self._choice(key)
        items = as_list(value)
        if not items:
            self._refuse(key, value, "a list of whole numbers")
        return Choice(value=tuple(self._as_count(key, i, 0) for i in items), because=because)

    def choice_of_text(self, key: str) -> Choice[str]:
        value, because = self._choice(key)
        if not isinstance(value, str):
            self._refuse(key, value, "a text")
        return Choice(value=value, because=because)

    def choice_of_size(self, key: str) -> Choice[int]:
        value, because = self._choice(key)
        return Choice(value=self._as_size(key, value), because=because)

    def section(self, key: str) -> Fields:
        value = self._take(key)
        content = as_mapping(value)
        if content is None:
            self._refuse(key, value, "a mapping of keys")
        return Fields(content, where=self._where, path=self._dotted(key))

    def sections(self, key: str) -> tuple[Fields, ...]:
        found: list[Fields] = []
        for index, item in enumerate(self._list(key)):
            content = as_mapping(item)
            if content is None:
                self._refuse(key, item, "a list of mappings")
            path = f"{self._dotted(key)}[{index}]"
            found.append(Fields(content, where=self._where, path=path))
        return tuple(found)

    def _dotted(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _take(self, key: str) -> object:
        self._asked.append(key)
        if key not in self._content:
            # The usual cause is a misspelt key, so name the one that is there.
            near = get_close_matches(key, [str(k) for k in self._content], n=1)
            raise FileFormatError(
                f"the key {key!r} is missing",
                where=self.place(key),
                fix=f"add it; is {near[0]!r} meant to be it?" if near else "add it",
            )
        return self._content[key]

    def _list(self, key: str) -> Sequence[object]:
        value = self._take(key)
        items = as_list(value)
        return self._refuse(key, value, "a list") if items is None else items

    def _choice(self, key: str) -> tuple[object, str]:
        value = self._take(key)
        if as_mapping(value) is None:
            return value, BY_HAND
        inner = self.section(key)
        chosen = inner._take("value")
        because = inner.text("because") if "because" in inner else BY_HAND
        inner.finish()
        return chosen, because

    def _as_word(self, key: str, value: object, words: Sequence[Word]) -> Word:
        for word in words:
            if value == word:
                return word
        near = get_close_matches(str(value), [str(word) for word in words], n=1, cutoff=0.0)
        return self._refuse(
            key,
            value,
            "one of " + ", ".join(str(word) for word in words),
            f"nearest is {near[0]!r}",
        )

    def _as_count(self, key: str, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(key, value, f"a whole number of at least {least}")
        return value

    def _as_size(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            self._refuse(key, value, "a size such as 22GiB or 1048576")
        try:
            return parse_bytes(value)
        except ValueError:
            self._refuse(key, value, "a size such as 22GiB or 1048576")

    def _refuse(self, key: str, value: object, wanted: str, hint: str | None = None) -> NoReturn:
        raise FileFormatError(
            f"{key} is {value!r}, which is not {wanted}",
            where=self.place(key),
            fix=f"write {wanted}" + (f"; {hint}" if hint else ""),
        )


def parse_piece(text: str, where: str) -> Piece:
    """Read a piece such as `embed.weight[0:524288]`.

    Raises:
        FileFormatError: the text is no piece, or an empty one.
    """
    match = _PIECE.fullmatch(text)
    if match is None or int(match[2]) >= int(match[3]):
        raise FileFormatError(
            f"{text!r} is no piece of a parameter",
            where=where,
            fix="write the name, then first and last-plus-one element: embed.weight[0:524288]",
        )
    return Piece(parameter=match[1], start=int(match[2]), stop=int(match[3]))
