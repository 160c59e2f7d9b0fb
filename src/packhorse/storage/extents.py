"""Where each named thing lies inside one scratch file.

In: sizes by name. Out: an `ExtentMap` whose extents begin at multiples of the alignment, do not
overlap, and lie in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ALIGNMENT_BYTES: Final = 4096


def align_up(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Round up to a multiple of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A range of a file: `size_bytes` of content, room up to `padded_bytes`."""

    offset_bytes: int
    size_bytes: int

    @property
    def padded_bytes(self) -> int:
        """The room that belongs to this extent: its size, rounded up to the alignment."""
        return align_up(self.size_bytes)

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte after the room."""
        return self.offset_bytes + self.padded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentMap:
    """Extents by name, and the size of the file that holds them."""

    extents: Mapping[str, Extent]

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return max((extent.end_bytes for extent in self.extents.values()), default=0)

    def __getitem__(self, name: str) -> Extent:
        return self.extents[name]

    def __contains__(self, name: str) -> bool:
        return name in self.extents


def lay_out_extents(
    sizes_bytes: Mapping[str, int], *, alignment_bytes: int = ALIGNMENT_BYTES
) -> ExtentMap:
    """Give each name an aligned extent, one after the other.

    Args:
        alignment_bytes: a multiple of 4096, for example 2 MiB to match huge pages.

    Raises:
        ValueError: a size is negative, or the alignment is no multiple of 4096.
    """
    if alignment_bytes <= 0 or alignment_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"alignment {alignment_bytes} is no multiple of {ALIGNMENT_BYTES}")
    extents: dict[str, Extent] = {}
    cursor = 0
    for name, size_bytes in sizes_bytes.items():
        if size_bytes < 0:
            raise ValueError(f"extent {name!r} has a negative size: {size_bytes}")
        extents[name] = Extent(offset_bytes=cursor, size_bytes=size_bytes)
        cursor = align_up(cursor + size_bytes, alignment_bytes)
    return ExtentMap(extents=extents)
