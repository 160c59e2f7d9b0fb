"""How one range of bytes is dealt out to several files, each by its share.

    units (2, 1):    | a a b | a a b | a a b | a
                     unit: `UNIT_BYTES`; a round: three of them

In: shares in whole units, an offset and a size. Out: which part of which file holds which part of
the range. Every file is dense, so that its size is exactly its share of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from packhorse.storage.extents import align_up
from packhorse.units import MIB

UNIT_BYTES: Final = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a transfer: `size_bytes` from `start_bytes` on lie in one file at an offset."""

    file: int
    offset_bytes: int
    start_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripes:
    """Shares of files, in units of a round."""

    units: tuple[int, ...]

    @property
    def round_bytes(self) -> int:
        """Bytes after which the pattern repeats."""
        return sum(self.units) * UNIT_BYTES

    def sizes(self, size_bytes: int) -> tuple[int, ...]:
        """The size of each file of a whole of `size_bytes`, a multiple of the alignment."""
        rounds, rest = divmod(align_up(size_bytes), self.round_bytes)
        sizes: list[int] = []
        for units in self.units:
            last = min(units * UNIT_BYTES, rest)
            rest -= last
            sizes.append(rounds * units * UNIT_BYTES + last)
        return tuple(sizes)

    def pieces(self, offset_bytes: int, size_bytes: int) -> Iterator[Piece]:
        """Cut a range into pieces, in its order."""
        if len(self.units) == 1:
            yield Piece(file=0, offset_bytes=offset_bytes, start_bytes=0, size_bytes=size_bytes)
            return
        done = 0
        while done < size_bytes:
            number, place = divmod(offset_bytes + done, self.round_bytes)
            file, run_bytes = 0, self.units[0] * UNIT_BYTES
            while place >= run_bytes:
                place -= run_bytes
                file += 1
                run_bytes = self.units[file] * UNIT_BYTES
            length = min(run_bytes - place, size_bytes - done)
            yield Piece(
                file=file,
                offset_bytes=number * run_bytes + place,
                start_bytes=done,
                size_bytes=length,
            )
            done += length


def split_pieces(pieces: list[Piece], num_parts: int, least_bytes: int) -> list[list[Piece]]:
    """Share out the pieces of one file to several threads, about equally, at whole pages.

    Args:
        least_bytes: no part is smaller, unless it is the only one.
    """
    total = sum(piece.size_bytes for piece in pieces)
    num_parts = max(1, min(num_parts, total // least_bytes))
    part_bytes = align_up(-(-total // num_parts))
    parts: list[list[Piece]] = []
    room = 0
    for whole in pieces:
        done = 0
        while done < whole.size_bytes:
            if not room:
                parts.append([])
                room = part_bytes
            length = min(room, whole.size_bytes - done)
            parts[-1].append(
                Piece(
                    file=whole.file,
                    offset_bytes=whole.offset_bytes + done,
                    start_bytes=whole.start_bytes + done,
                    size_bytes=length,
                )
            )
            done += length
            room -= length
    return parts
