"""Data files: which ones a recipe means, and their rows one after another.

In: files, folders and globs. Out: `TextPart`s (a .txt file is one document, handed out in parts)
and `FieldRow`s (one object of a .jsonl, .json or .parquet file), each with the place it came from.
Always: files are read as a stream, a bad byte or broken JSON is a `DataError` with file and line,
text is UTF-8 (a byte order mark is dropped), and line ends of .txt files become a plain newline.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.data.json_lists import read_json_list
from packhorse.data.parquet_rows import read_parquet_rows
from packhorse.data.segments import SEGMENT_CHARS, find_cut
from packhorse.data.utf8 import make_encoding_error
from packhorse.data.values import is_object
from packhorse.errors import DataError
from packhorse.units import format_bytes

SUFFIXES: Final = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
MAX_ROW_BYTES: Final = 256 * 1024**2
_BLOCK_BYTES: Final = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One data file as it was when it was found."""

    path: Path
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a row came from: its file and its first line (of a .parquet file: its row), from 1."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A stretch of one .txt document; `ends` marks its last part."""

    origin: Origin
    text: str
    starts: bool
    ends: bool
    read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One object with named fields; `read_bytes` is how far its file has been read."""

    origin: Origin
    fields: Mapping[str, object]
    read_bytes: int


def find_sources(
    entries: Sequence[str | Path], *, folder: Path | None = None
) -> tuple[SourceFile, ...]:
    """List the data files that files, folders and globs name, each in sorted order.

    A folder is searched in full depth; hidden files and files of other kinds in it are passed over.
    Relative entries start at `folder`, or at the current one.

    Raises:
        DataError: nothing is found, an ending is unknown, or a file is named twice.
    """
    if not entries:
        raise DataError("no data files are given", fix="name files, folders or globs in train_data")
    found: dict[Path, str] = {}
    for entry in entries:
        for path in _expand_entry(str(entry), folder):
            resolved = path.resolve()
            if resolved in found:
                raise DataError(
                    f"{path} is named twice, so its rows would count double",
                    where=f"by {found[resolved]!r} and by {str(entry)!r}",
                    fix="name every file once",
                )
            found[resolved] = str(entry)
    return tuple(_describe_file(path) for path in found)


def read_rows(source: SourceFile) -> Iterator[TextPart | FieldRow]:
    """Stream the rows of one file.

    Raises:
        DataError: it is empty, unreadable, not UTF-8, or broken; names file and line.
        InputError: a .parquet file needs an extra that is not installed.
    """
    num_rows = 0
    try:
        for row in _read_by_suffix(source):
            num_rows += 1
            yield row
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror or error}") from error
    if num_rows == 0:
        raise DataError(
            f"{source.path} has no rows",
            where=f"{format_bytes(source.size_bytes)} on disk",
            fix="remove it from the data, or write it again",
        )


def _read_by_suffix(source: SourceFile) -> Iterator[TextPart | FieldRow]:
    match source.path.suffix.lower():
        case ".txt":
            return _read_text(source.path)
        case ".parquet":
            return _read_parquet(source)
        case ".json" if _first_character(source.path) == "[":
            return _read_json_list_rows(source.path)
        case _:
            return _read_json_lines(source.path)


def _expand_entry(entry: str, folder: Path | None) -> list[Path]:
    path = (folder or Path()) / Path(entry).expanduser()
    if path.is_dir():
        return _list_folder(path)
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"{path} has an ending that is not read: {path.suffix or 'none'}",
                fix="use one of " + ", ".join(SUFFIXES),
            )
        return [path]
    if not glob.has_magic(entry):
        raise DataError(f"there is no data file or folder {path}", fix=_suggest_neighbour(path))
    # Path.glob refuses absolute patterns, which people write. Brackets in folder are no pattern.
    names = glob.glob(str(Path(entry).expanduser()), root_dir=folder, recursive=True)  # noqa: PTH207
    matches = sorted((folder or Path()) / name for name in names)
    files = [match for match in matches if match.is_file() and match.suffix.lower() in SUFFIXES]
    if not files:
        kinds = f"{len(matches)} other names match it" if matches else "no name matches it"
        raise DataError(
            f"the glob {entry!r} finds no data file",
            where=f"{kinds}, from {(folder or Path()).resolve()}",
            fix="check the pattern; endings read are " + ", ".join(SUFFIXES),
        )
    return files


def _list_folder(folder: Path) -> list[Path]:
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [
        path
        for path in inside
        if path.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        endings = sorted({path.suffix or path.name for path in inside})[:8]
        raise DataError(
            f"the folder {folder} holds no data file",
            where="found there: " + (", ".join(endings) or "nothing"),
            fix="endings read are " + ", ".join(SUFFIXES),
        )
    return files


def _suggest_neighbour(path: Path) -> str:
    if not path.parent.is_dir():
        return (
            f"the folder {path.parent} does not exist either: make it first, as the comments of the"
            " recipe may say, or correct the path; relative ones count from\n"
            f"{Path.cwd()}"
        )
    names = [
        other.name
        for other in sorted(path.parent.iterdir())
        if other.is_dir() or other.suffix.lower() in SUFFIXES
    ]
    return f"in {path.parent} there is: " + (", ".join(names[:8]) or "no data file")


def _describe_file(path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if status.st_size == 0:
        raise DataError(f"{path} is empty", fix="remove it from the data, or write it again")
    return SourceFile(path=path, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _first_character(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    return chr(start[0]) if start else ""


def _read_text(path: Path) -> Iterator[TextPart]:
    """Hand out one document in parts of about SEGMENT_CHARS, always one part behind the reader."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("strict")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    waiting: TextPart | None = None
    buffer = ""
    line = 1
    num_lines_read = 1
    with path.open("rb") as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            try:
                buffer += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                num_lines_read += error.object[: error.start].count(b"\n")
                raise make_encoding_error(path, num_lines_read, error) from error
            num_lines_read += block.count(b"\n")
            while len(buffer) > SEGMENT_CHARS or (not block and buffer):
                cut = find_cut(buffer, SEGMENT_CHARS)
                text, buffer = buffer[:cut], buffer[cut:]
                if waiting is not None:
                    yield waiting
                waiting = TextPart(
                    origin=Origin(path=path, line=line),
                    text=text,
                    starts=waiting is None,
                    ends=not block and not buffer,
                    read_bytes=file.tell(),
                )
                line += text.count("\n")
            if not block:
                break
    if waiting is not None and not (waiting.starts and not waiting.text.strip()):
        yield waiting


def _read_lines(path: Path) -> Iterator[tuple[Origin, str, int]]:
    read_bytes = 0
    with path.open("rb") as file:
        for line in range(1, 2**62):
            raw = file.readline(MAX_ROW_BYTES + 1)
            if not raw:
                return
            read_bytes += len(raw)
            origin = Origin(path=path, line=line)
            if len(raw) > MAX_ROW_BYTES:
                raise DataError(
                    f"a line is longer than {format_bytes(MAX_ROW_BYTES)}",
                    where=str(origin),
                    fix="write one object a line, or name a list of objects .json",
                )
            try:
                text = raw.removeprefix(codecs.BOM_UTF8 if line == 1 else b"").decode("utf-8")
            except UnicodeDecodeError as error:
                raise make_encoding_error(path, line, error) from error
            if text.strip():
                yield origin, text, read_bytes


def _read_json_lines(path: Path) -> Iterator[FieldRow]:
    for origin, text, read_bytes in _read_lines(path):
        fields = _parse_object(text, origin)
        yield FieldRow(origin=origin, fields=fields, read_bytes=read_bytes)


def _read_json_list_rows(path: Path) -> Iterator[FieldRow]:
    for element in read_json_list(path, max_bytes=MAX_ROW_BYTES):
        origin = Origin(path=path, line=element.line)
        fields = _parse_object(element.text, origin)
        yield FieldRow(origin=origin, fields=fields, read_bytes=element.read_bytes)


def _parse_object(text: str, origin: Origin) -> Mapping[str, object]:
    try:
        value: object = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        place = Origin(path=origin.path, line=origin.line + error.lineno - 1)
        raise DataError(
            f"broken JSON: {error.msg} at column {error.colno}",
            where=f"{place}: {_excerpt(text, error.pos)}",
            fix="repair it; a .jsonl file holds one object a line, a .json file a list of them",
        ) from error
    except RecursionError as error:
        raise DataError("JSON is nested too deeply", where=str(origin)) from error
    except ValueError as error:
        raise DataError(f"unreadable JSON: {error}", where=str(origin)) from error
    if not is_object(value):
        raise DataError(
            f"a row must be a JSON object, not {_name_json_type(value)}",
            where=f"{origin}: {_excerpt(text, 0)}",
            fix='write each row as an object, for example {"text": "..."}',
        )
    return value


def _excerpt(text: str, position: int) -> str:
    piece = text[max(0, position - 30) : position + 30].strip()
    return piece.encode("ascii", "backslashreplace").decode("ascii")


def _name_json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def _read_parquet(source: SourceFile) -> Iterator[FieldRow]:
    for fields, number, num_rows in read_parquet_rows(source.path):
        yield FieldRow(
            origin=Origin(path=source.path, line=number),
            fields=fields,
            read_bytes=source.size_bytes * number // num_rows,
        )
