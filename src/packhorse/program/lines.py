"""The words of a line of a program's text.

In: names and numbers, or a line. Out: words, or the values they stand for. A line has plain words
(`param/3`) and fields (`start=0`); whoever reads it takes them one by one and ends with `finish`,
so that nothing on a line goes unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, TypeVar
from urllib.parse import quote, unquote

from packhorse.errors import FileFormatError
from packhorse.program.buffers import BufferId
from packhorse.units import parse_bytes

T = TypeVar("T")
# Names without a character that quoting would change; nearly all are.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.~/@:+-]+")


def escape_name(name: str) -> str:
    """Write a name as one word."""
    if _PLAIN.fullmatch(name):
        return name
    return quote(name, safe="/@:+") if name else "''"


def unescape_name(word: str) -> str:
    """Read a name from its word."""
    return "" if word == "''" else unquote(word)


def find_nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Find the candidate that a misspelt word most likely means."""
    matches = get_close_matches(word, list(candidates), n=1, cutoff=0.4)
    return matches[0] if matches else None


class Names:
    """Escapes names, each once."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def escape(self, name: str) -> str:
        """Write a name as one word."""
        word = self._words.get(name)
        if word is None:
            word = self._words[name] = escape_name(name)
        return word

    def field(self, key: str, names: tuple[BufferId, ...]) -> str:
        """Write a list of names as a field with two leading blanks; nothing when it is empty."""
        return f"  {key}={','.join(map(self.escape, names))}" if names else ""


class NamesRead:
    """Reads names back, each once, so that equal names are one string."""

    def __init__(self) -> None:
        self._names: dict[str, BufferId] = {}

    def unescape(self, word: str) -> BufferId:
        """Read a name from its word."""
        name = self._names.get(word)
        if name is None:
            name = self._names[word] = BufferId(unescape_name(word))
        return name


@dataclass(slots=True, kw_only=True)
class Line:
    """A line of the text; taking a word or a field removes it.

    All methods raise FileFormatError with the line's number and text.
    """

    number: int
    text: str
    words: list[str]
    fields: dict[str, str]
    known: list[str]

    @classmethod
    def from_text(cls, number: int, text: str) -> Line:
        """Split a line at blanks, and each `key=value` at its first `=`."""
        line = cls(number=number, text=text, words=[], fields={}, known=[])
        for part in text.split():
            key, equals, value = part.partition("=")
            if not equals:
                line.words.append(part)
            elif key in line.fields:
                raise line.error(f"{key!r} is given twice")
            else:
                line.fields[key] = value
        line.words.reverse()
        return line

    def error(self, what: str, fix: str | None = None) -> FileFormatError:
        """Make the error for this line."""
        shown = self.text if len(self.text) <= 100 else self.text[:97] + "..."
        return FileFormatError(what, where=f"line {self.number}: {shown}", fix=fix)

    def word(self, meaning: str) -> str:
        """Take the next plain word."""
        if not self.words:
            raise self.error(f"{meaning} is missing", fix=f"add {meaning}")
        return self.words.pop()

    def field(self, key: str) -> str:
        """Take a field that must be there."""
        value = self.optional(key)
        if value is None:
            nearest = find_nearest(key, self.fields)
            hint = f"; the nearest word there is {nearest!r}" if nearest else ""
            raise self.error(f"the field {key!r} is missing", fix=f"add {key}=...{hint}")
        return value

    def optional(self, key: str) -> str | None:
        """Take a field that may be absent."""
        self.known.append(key)
        return self.fields.pop(key, None)

    def integer(self, key: str) -> int:
        """Take a field that is a whole number."""
        return self.as_integer(self.field(key), key)

    def as_integer(self, word: str, meaning: str) -> int:
        """Read a word as a whole number."""
        if not (word.isascii() and word.isdecimal()):
            raise self.error(
                f"{meaning} is {word!r}, not a whole number", fix="write digits, such as 12"
            )
        return int(word)

    def as_bytes(self, word: str, meaning: str) -> int:
        """Read a word as a size."""
        try:
            return parse_bytes(word)
        except ValueError as error:
            raise self.error(f"{meaning}: {error}", fix="write a size, such as 2MiB") from error

    def choice(self, key: str, choices: Mapping[str, T]) -> T:
        """Take a field that is one of some words."""
        return self.as_choice(self.field(key), key, choices)

    def as_choice(self, word: str, meaning: str, choices: Mapping[str, T]) -> T:
        """Read a word that is one of some words."""
        if word not in choices:
            raise self.unknown(word, meaning, choices)
        return choices[word]

    def unknown(self, word: str, meaning: str, choices: Iterable[str]) -> FileFormatError:
        """Make the error for a word that is none of those that may stand here."""
        names = list(choices)
        nearest = find_nearest(word, names)
        hint = f"nearest: {nearest!r}; " if nearest else ""
        return self.error(f"{meaning} is {word!r}", fix=f"{hint}it is one of {', '.join(names)}")

    def finish(self) -> None:
        """Check that every word and field was taken."""
        if self.words:
            raise self.error(f"{self.words[-1]!r} is one word too many", fix="take it out")
        for key in self.fields:
            if self.known:
                raise self.unknown(key, "a field", self.known)
            raise self.error(f"{key!r} does not belong here", fix="take it out")
