"""Chooses how bytes reach a drive the fastest, by trying.

In: a trial that measures one way. Out: the way that is taken. One thing is varied at a time, from
the usual way on: past the page cache or not, the size of single transfers, two of them at once,
memory of small pages. What differs from the usual must pay for it by `GAIN`, or noise would decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from packhorse.storage.scratch_file import DEFAULT_BLOCK_BYTES
from packhorse.units import MIB

BLOCK_SIZES: Final = tuple(size * MIB for size in (1, 2, 4, 8, 16, 32))
GAIN: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class IoPath:
    """One way to move bytes; see `Drive`."""

    direct: bool = True
    block_bytes: int = DEFAULT_BLOCK_BYTES
    num_threads: int = 1
    huge_pages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRates:
    """What one way does, each direction alone."""

    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def both_ways_bytes_per_s(self) -> float:
        """The rate of reading and writing the same bytes: what ways are compared by."""
        return 2 / (1 / self.read_bytes_per_s + 1 / self.write_bytes_per_s)


Trial = Callable[[IoPath], PathRates | None]
"""Measures a way; None where the file system refuses it."""


def choose_io_path(trial: Trial) -> tuple[IoPath, PathRates]:
    """Find the fastest way, and its rates in its trial.

    Raises:
        ValueError: the trial refuses even buffered transfers.
    """
    best, rates = IoPath(), trial(IoPath())
    if rates is None:
        best = IoPath(direct=False)
        rates = trial(best)
        if rates is None:
            raise ValueError("a trial of buffered transfers gave nothing")
        groups = _vary(direct_too=False)
    else:
        groups = _vary(direct_too=True)
    for variants in groups:
        # All variants of one thing are compared with the same base.
        base, least = best, rates.both_ways_bytes_per_s * (1 + GAIN)
        for change in variants:
            path = change(base)
            if path == base:
                continue
            found = trial(path)
            if found is not None and found.both_ways_bytes_per_s > least:
                best, rates, least = path, found, found.both_ways_bytes_per_s
    return best, rates


def _vary(*, direct_too: bool) -> Iterator[list[Callable[[IoPath], IoPath]]]:
    if direct_too:
        yield [lambda path: replace(path, direct=False)]
    yield [_with_block(size) for size in BLOCK_SIZES]
    yield [lambda path: replace(path, num_threads=2)]
    yield [lambda path: replace(path, huge_pages=False)]


def _with_block(size: int) -> Callable[[IoPath], IoPath]:
    return lambda path: replace(path, block_bytes=size)
