"""How the file of kept state is laid out, as the header of its record says.

In: a header, as JSON that may be damaged, hostile, or of another program. Out: a `KeptLayout` with
every number inside its bounds and every path where it may be, or a `ValueError` that says what is
wrong. Nothing of the file itself is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeGuard, cast

from packhorse.storage.extents import ALIGNMENT_BYTES, ExtentMap, align_up
from packhorse.storage.record import Json
from packhorse.storage.scratch_space import ScratchSpace
from packhorse.storage.stripes import Stripes

_TAG: Final = re.compile(r"[0-9a-f]{8}")
_MOST_BYTES: Final = 1 << 60
_MOST_UNITS: Final = 1 << 20
_SECOND: Final = "+"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLayout:
    """Where everything lies.

    `folders` and `tag` are those of the parts in other folders. `buffers` gives the size of each
    buffer, its offset, and the second one where it has two slots. `fixed` names the buffers with
    one slot that are written once and stay.
    """

    file_bytes: int
    stripes: Stripes
    folders: tuple[str, ...]
    tag: str
    buffers: Mapping[str, tuple[int, ...]]
    fixed: tuple[str, ...]

    @property
    def in_slots(self) -> tuple[str, ...]:
        """The buffers with two slots, in the order of an entry's."""
        return tuple(name for name, (_, *offsets) in self.buffers.items() if len(offsets) > 1)

    @property
    def marked(self) -> tuple[str, ...]:
        """The buffers that an entry has marks of, in their order."""
        return (*self.in_slots, *self.fixed)


def second(name: str) -> str:
    """Name the second extent of a buffer with two slots."""
    return f"{name}{_SECOND}"


def describe_layout(space: ScratchSpace, extents: ExtentMap, fixed: Sequence[str]) -> Json:
    """What a header says; `read_layout` reads it back."""
    buffers: dict[str, list[int]] = {}
    for name, extent in extents.extents.items():
        if name.endswith(_SECOND):
            buffers[name.removesuffix(_SECOND)].append(extent.offset_bytes)
        else:
            buffers[name] = [extent.size_bytes, extent.offset_bytes]
    parts = {}
    if len(space.stripes.units) > 1:
        parts = {
            "units": list(space.stripes.units),
            "folders": [str(folder.absolute()) for folder in space.folders[1:]],
            "tag": space.tag,
        }
    return {
        "file_bytes": extents.total_bytes,
        **parts,
        "buffers": buffers,
        "fixed": list(fixed),
    }


def read_layout(header: Json) -> KeptLayout:
    """Read what a header says of the layout.

    Raises:
        ValueError: something is missing, has another type, or lies outside of its bounds.
    """
    file_bytes = header.get("file_bytes")
    if not is_count(file_bytes, _MOST_BYTES):
        raise ValueError(f"its file_bytes is {file_bytes!r}")
    stripes, folders, tag = _read_parts(header)
    buffers = _read_buffers(header.get("buffers"), align_up(file_bytes))
    fixed = header.get("fixed")
    if not isinstance(fixed, list):
        raise ValueError("its list of fixed buffers is missing")
    names = cast("list[object]", fixed)  # each is looked at below
    once = [name for name in names if isinstance(name, str) and len(buffers.get(name, ())) == 2]
    if len(once) != len(names):
        raise ValueError("its list of fixed buffers names others")
    return KeptLayout(
        file_bytes=file_bytes,
        stripes=stripes,
        folders=folders,
        tag=tag,
        buffers=buffers,
        fixed=tuple(once),
    )


def is_count(value: object, most: int) -> TypeGuard[int]:
    """Tell a whole number from 0 to `most`; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _read_parts(header: Json) -> tuple[Stripes, tuple[str, ...], str]:
    if not {"units", "folders", "tag"} & header.keys():
        return Stripes(units=(1,)), (), ""
    units, folders, tag = (header.get(key) for key in ("units", "folders", "tag"))
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise ValueError(f"its tag is {tag!r}")
    if not isinstance(units, list) or not isinstance(folders, list):
        raise ValueError("its shares or folders are missing")
    shares = cast("list[object]", units)  # each is looked at below
    places = cast("list[object]", folders)  # the same
    if not all(is_count(share, _MOST_UNITS) and share for share in shares):
        raise ValueError(f"its shares are {shares!r:.80}")
    if not all(isinstance(place, str) and _is_folder(place) for place in places):
        raise ValueError(f"its folders are {places!r:.80}")
    if len(shares) != len(places) + 1 or len(shares) < 2:
        raise ValueError(f"it has {len(shares)} shares for {len(places) + 1} folders")
    return (
        Stripes(units=tuple(cast("list[int]", shares))),  # looked at above
        tuple(cast("list[str]", places)),  # the same
        tag,
    )


def _is_folder(place: str) -> bool:
    return Path(place).is_absolute() and "\0" not in place and ".." not in Path(place).parts


def _read_buffers(written: object, end_bytes: int) -> Mapping[str, tuple[int, ...]]:
    if not isinstance(written, dict):
        raise ValueError("its table of buffers is missing")
    buffers: dict[str, tuple[int, ...]] = {}
    rows = cast("dict[str, object]", written)  # JSON has no other keys than texts
    for name, numbers in rows.items():
        row = cast("list[object]", numbers) if isinstance(numbers, list) else []  # as above
        found = tuple(number for number in row if is_count(number, end_bytes))
        if len(found) != len(row) or len(found) not in (2, 3):
            raise ValueError(f"its buffer {name!r:.80} is {numbers!r:.80}")
        size_bytes, *offsets = found
        for offset in offsets:
            if offset % ALIGNMENT_BYTES or offset + align_up(size_bytes) > end_bytes:
                raise ValueError(f"its buffer {name!r:.80} lies outside of the file")
        buffers[name] = found
    return buffers
