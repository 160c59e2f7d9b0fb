"""The elements of a JSON list in a file, without holding the list.

In: a file whose text is one JSON list. Out: the text of each element with its line. Only brackets,
quotes and commas are looked at here; whoever takes an element parses it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.data.utf8 import make_encoding_error
from packhorse.errors import DataError
from packhorse.units import format_bytes

_MARKS: Final = re.compile(r'[\\"\[\]{},\n]')
_BLOCK_BYTES: Final = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ListElement:
    """One element's text, the line it starts on, and how far the file has been read."""

    text: str
    line: int
    read_bytes: int


class _Scanner:
    """Where the scan stands between two blocks of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 1
        self.start_line = 1
        self.depth = 0
        self.in_string = False
        self.escape_next = False
        self.parts: list[str] = []
        self.num_elements = 0

    def scan(self, text: str) -> Iterator[tuple[str, int]]:
        """Yield the elements that end inside `text`."""
        start = 0
        ignore_at = 0 if self.escape_next else -1
        self.escape_next = False
        for match in _MARKS.finditer(text):
            position, mark = match.start(), match.group()
            if mark == "\n":
                self.line += 1
            if position == ignore_at:
                continue
            if self.in_string:
                if mark == "\\":
                    ignore_at = position + 1
                    self.escape_next = ignore_at == len(text)
                elif mark == '"':
                    self.in_string = False
                continue
            if self.depth == 0 and (mark != "[" or self.num_elements):
                if mark != "\n":
                    raise self.broken(f"unexpected {mark!r} after the list's end")
                continue
            match mark:
                case '"':
                    self.in_string = True
                case "[" | "{":
                    self.depth += 1
                    if self.depth == 1:
                        self.num_elements = 1
                        self.start_line = self.line
                        start = position + 1
                case "]" | "}":
                    self.depth -= 1
                    if self.depth == 0:
                        if mark == "}":
                            raise self.broken("the list is closed by '}'")
                        yield from self.finish(text[start:position], last=True)
                        start = position + 1
                case "," if self.depth == 1:
                    yield from self.finish(text[start:position], last=False)
                    start = position + 1
                case _:
                    pass
        if self.depth:
            self.parts.append(text[start:])
        elif self.num_elements and text[start:].strip():
            raise self.broken("text after the list's end")

    def finish(self, tail: str, *, last: bool) -> Iterator[tuple[str, int]]:
        text = "".join([*self.parts, tail])
        self.parts = []
        body = text.lstrip()
        line = self._find_line(text)
        self.start_line = self.line
        # Only the empty list may have an empty element; json refuses any other one by its line.
        if body or not last or self.num_elements > 1:
            self.num_elements += 1
            yield body, line

    def waiting_line(self) -> int:
        """The line on which the element that has not ended yet starts."""
        return self._find_line("".join(self.parts))

    def _find_line(self, text: str) -> int:
        return self.start_line + text[: len(text) - len(text.lstrip())].count("\n")

    def broken(self, what: str) -> DataError:
        return DataError(
            f"broken JSON: {what}",
            where=f"{self.path}:{self.line}",
            fix="a .json file is one list of objects; name one object a line .jsonl",
        )


def read_json_list(path: Path, *, max_bytes: int) -> Iterator[ListElement]:
    """Stream the elements of the list in `path`; memory is that of the longest element.

    Raises:
        DataError: the list does not end, something follows it, an element is over `max_bytes`, or
            the file is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    scanner = _Scanner(path)
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            try:
                decoded = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = scanner.line + error.object[: error.start].count(b"\n")
                raise make_encoding_error(path, line, error) from error
            if not block:
                break
            for text, line in scanner.scan(decoded):
                yield ListElement(text=text, line=line, read_bytes=file.tell())
            if sum(map(len, scanner.parts)) > max_bytes:
                raise DataError(
                    f"one element of the list is over {format_bytes(max_bytes)}",
                    where=f"{path}:{scanner.waiting_line()}",
                    fix="look for an unclosed quote or bracket from that line on",
                )
    if scanner.depth:
        raise DataError(
            "broken JSON: the file ends inside its list",
            where=f"{path}:{scanner.line}; the open element starts on {scanner.waiting_line()}",
            fix="look for a missing quote or bracket, or a file that was cut off",
        )
