"""The small file that says what a scratch file holds: which step, and which slot of each buffer.

    header    how the scratch file is laid out, and whose it is; written once
    entry 0   written and flushed, with a checksum and a rising number
    entry 1   then the same again; flushed before entry 0 is written the next time

A torn entry 0 leaves the step before in entry 1, and no later write has touched its slots. Once
entry 0 is there, entry 1 no longer speaks of that step: whatever is damaged afterwards, what is
still whole is never older than the slots that lie under it.

In: a header and entries, as JSON. Out: after a crash, the newest entry that is whole. An entry says
nothing of the scratch file's own durability: whoever adds it has flushed that file before.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeGuard, cast

from packhorse.errors import FileFormatError, OtherVersionError, StorageError
from packhorse.storage.durable import write_durably
from packhorse.storage.extents import ALIGNMENT_BYTES, align_up
from packhorse.storage.space import explain_failure

KIND: Final = "packhorse/record"
VERSION: Final = 2
_HEAD: Final = struct.Struct("<8sII")  # magic, length, crc32 of what follows
_MAGIC: Final = b"PHRECORD"
_STATE_ROOM_BYTES: Final = 16384
_MARK_CHARACTERS: Final = 8
_NO_MARK: Final = "-" * _MARK_CHARACTERS
_MARK: Final = re.compile(rf"[0-9a-f]{{{_MARK_CHARACTERS}}}|{_NO_MARK}")
_SLOTS: Final = re.compile("[01]*")
_MOST_BYTES: Final = 1 << 30
NUM_ENTRIES: Final = 2

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A finished step: its number, the slot of each buffer, and what the run says of itself.

    `marks` tell what each buffer with slots, then each fixed one, held: see `page_marks`. None is
    a buffer of which nobody knows.
    """

    step: int
    slots: tuple[int, ...]
    state: Json
    marks: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a record file holds; `damaged` says what is wrong with entries that do not count."""

    header: Json
    entry: Entry | None
    damaged: tuple[str, ...]


class RecordFile:
    """An open record file; made by `create_record` or `open_record`."""

    def __init__(self, path: Path, *, header: Json, entry_bytes: int, next_number: int) -> None:
        self._path = path
        self._header = header
        self._start_bytes = len(_pack_header(header, entry_bytes))
        self._entry_bytes = entry_bytes
        self._next_number = next_number
        try:
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise explain_failure(error, path, "open the record of the scratch file") from error

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self._path

    @property
    def header(self) -> Json:
        """What was written at the beginning."""
        return self._header

    def add(self, entry: Entry) -> None:
        """Write an entry over the one before; blocks until it is on the disk.

        Raises:
            StorageError: the disk fails, or the file is no longer the one at its path; the entry
                before still stands.
        """
        assert self._descriptor is not None
        if not self._is_there():
            raise StorageError(
                "the record of the scratch file changed under the run: it was removed or replaced",
                where=str(self._path),
                fix="keep other programs away from the scratch folder, then resume",
            )
        body = json.dumps(
            {
                "number": self._next_number,
                "step": entry.step,
                "slots": "".join(map(str, entry.slots)),
                "marks": "".join(map(_write_mark, entry.marks)),
                "state": entry.state,
            },
            separators=(",", ":"),
        ).encode()
        block = _pack(body)
        if len(block) > self._entry_bytes:
            raise ValueError(f"an entry of {len(block)} bytes has room for {self._entry_bytes}")
        try:
            # Where power fails, entry 1 may be as old as its last flush: two steps, whose slots
            # have been written again. While entry 0 is in pieces it alone has to count.
            os.fdatasync(self._descriptor)
            self._write(self._descriptor, block, self._start_bytes)
            os.fdatasync(self._descriptor)
            self._write(self._descriptor, block, self._start_bytes + self._entry_bytes)
        except OSError as error:
            raise explain_failure(error, self._path, "record a finished step") from error
        self._next_number += 1

    def _write(self, descriptor: int, block: bytes, place: int) -> None:
        done = 0
        while done < len(block):
            done += os.pwrite(descriptor, block[done:], place + done)

    def close(self) -> None:
        """Close the file and keep it. Closing twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Close the file and delete it, unless another file took its path.

        Raises:
            StorageError: it may not be deleted.
        """
        is_there = self._is_there()
        self.close()
        try:
            if is_there:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            doing = "remove the record of the scratch file"
            raise explain_failure(error, self._path, doing) from error

    def _is_there(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            there = self._path.stat()
        except OSError:
            return False
        mine = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def create_record(path: Path, header: Json, *, num_buffers: int) -> RecordFile:
    """Make a record file without entries; replaces an old one. Blocks until it is on the disk.

    Args:
        num_buffers: most slots or marks of an entry.

    Raises:
        StorageError: the disk is full or unwritable. No file is left behind.
    """
    entry_bytes = align_up(_STATE_ROOM_BYTES + (1 + _MARK_CHARACTERS) * num_buffers)
    begin = _pack_header(header, entry_bytes)
    try:
        write_durably(path, begin + bytes(NUM_ENTRIES * entry_bytes))
    except StorageError:
        path.unlink(missing_ok=True)
        raise
    return RecordFile(path, header=header, entry_bytes=entry_bytes, next_number=0)


def open_record(path: Path) -> RecordFile:
    """Open a record file to go on after its newest entry.

    Raises:
        FileFormatError: as for `read_record`.
    """
    header, entry_bytes, entries, _ = _read(path)
    newest = max((number for number, _ in entries), default=-1)
    return RecordFile(path, header=header, entry_bytes=entry_bytes, next_number=newest + 1)


def read_record(path: Path) -> Found:
    """Read the header and the newest whole entry. Changes nothing.

    Raises:
        FileFormatError: it cannot be read, or its header is damaged.
        OtherVersionError: another version of Packhorse wrote it, which may use it.
    """
    header, _, entries, damaged = _read(path)
    newest = max(entries, key=lambda pair: pair[0], default=None)
    return Found(header=header, entry=None if newest is None else newest[1], damaged=damaged)


def _read(path: Path) -> tuple[Json, int, list[tuple[int, Entry]], tuple[str, ...]]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _damaged(path, f"it has more than {_MOST_BYTES} bytes")
        content = path.read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"cannot read the record of the scratch file: {error.strerror}", where=str(path)
        ) from error
    parsed = _parse(content)
    if parsed is None:
        raise _damaged(path, "its header does not match its checksum")
    if parsed.get("kind") != KIND:
        raise _damaged(path, f"it is of kind {parsed.get('kind')!r}, not {KIND!r}")
    version, entry_bytes, header = (parsed.get(k) for k in ("version", "entry_bytes", "header"))
    if version != VERSION:
        raise OtherVersionError(
            f"the record of the scratch file has version {version!r:.20}, this Packhorse reads"
            f" version {VERSION}",
            where=str(path),
            fix="finish the run with the version of Packhorse that began it",
        )
    if not _is_number(entry_bytes, _MOST_BYTES) or not isinstance(header, dict):
        raise _damaged(path, "a key is missing or has another type")
    header = cast("Json", header)  # JSON has no other keys than texts
    start = len(_pack_header(header, entry_bytes))
    entries: list[tuple[int, Entry]] = []
    damaged: list[str] = []
    for index in range(NUM_ENTRIES):
        block = content[start + index * entry_bytes : start + (index + 1) * entry_bytes]
        if len(block) < entry_bytes:
            damaged.append(f"entry {index} of {path.name} is cut off")
            continue
        if not any(block[: _HEAD.size]):
            continue  # never written
        body = _parse(block)
        entry = None if body is None else _read_entry(body)
        if entry is None:
            damaged.append(f"entry {index} of {path.name} does not match its checksum")
        else:
            entries.append(entry)
    return header, entry_bytes, entries, tuple(damaged)


def _read_entry(body: Json) -> tuple[int, Entry] | None:
    number, step, slots, marks, state = (
        body.get(key) for key in ("number", "step", "slots", "marks", "state")
    )
    if not _is_number(number) or not _is_number(step) or not isinstance(state, dict):
        return None
    if not isinstance(slots, str) or not _SLOTS.fullmatch(slots):
        return None
    if not isinstance(marks, str) or len(marks) % _MARK_CHARACTERS:
        return None
    parts = [marks[at : at + _MARK_CHARACTERS] for at in range(0, len(marks), _MARK_CHARACTERS)]
    if not all(_MARK.fullmatch(part) for part in parts):
        return None
    entry = Entry(
        step=step,
        slots=tuple(map(int, slots)),
        state=cast("Json", state),  # JSON has no other keys than texts
        marks=tuple(None if part == _NO_MARK else int(part, 16) for part in parts),
    )
    return number, entry


def _is_number(value: object, most: int | None = None) -> TypeGuard[int]:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value >= 0 and (most is None or value <= most)


def _write_mark(mark: int | None) -> str:
    return _NO_MARK if mark is None else f"{mark:0{_MARK_CHARACTERS}x}"


def _pack_header(header: Json, entry_bytes: int) -> bytes:
    content = {"kind": KIND, "version": VERSION, "entry_bytes": entry_bytes, "header": header}
    block = _pack(json.dumps(content, separators=(",", ":")).encode())
    return block.ljust(align_up(len(block), ALIGNMENT_BYTES), b"\0")


def _pack(body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def _parse(block: bytes) -> Json | None:
    if len(block) < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(block)
    body = block[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or len(body) != length or zlib.crc32(body) != checksum:
        return None
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return cast("Json", parsed) if isinstance(parsed, dict) else None  # keys of JSON are texts


def _damaged(path: Path, how: str) -> FileFormatError:
    return FileFormatError(
        f"the record of the scratch file is damaged: {how}",
        where=str(path),
        fix="resume from a checkpoint; packhorse clean removes the scratch file",
    )


def same_header(first: Json, second: Json) -> bool:
    """Whether two headers describe the same scratch file of the same run."""
    return _canonical(first) == _canonical(second)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)
