"""The order of rows, computed and never stored. In: seed, epoch, position. Out: a row's index.

Every order is a pure function, so step s of any run finds its rows at once, without a replay of
the steps before it. The shuffle is a Feistel network (Luby and Rackoff, 1988) over the smallest
even number of bits that holds all rows; a value beyond the last row is sent through again until it
lands inside (cycle walking), which keeps the map a bijection:

    left, right = halves of value
    repeat ROUNDS times: left, right = right, left ^ mix(right, key of this round)

Keys come from a hash of seed, epoch and purpose.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Protocol

from packhorse.errors import DataError
from packhorse.units import format_percent

ROUNDS: Final = 8
_MASK_64: Final = 2**64 - 1


class RowOrder(Protocol):
    """Which row stands at a position of an epoch."""

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        ...

    def row(self, *, epoch: int, position: int) -> int:
        """Find the cache's row for `position` in 0 .. num_rows - 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A shuffle of 0 .. size - 1 that is computed value by value."""

    size: int
    keys: tuple[int, ...]

    def apply(self, index: int) -> int:
        """Find where `index` goes."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is outside 0 .. {self.size - 1}")
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        half_mask = (1 << half_bits) - 1
        value = index
        while True:
            left, right = value >> half_bits, value & half_mask
            for key in self.keys:
                left, right = right, left ^ (_mix(right, key) & half_mask)
            value = left << half_bits | right
            if value < self.size:
                return value


def make_permutation(size: int, *, seed: int, epoch: int, purpose: str) -> Permutation:
    """Derive the shuffle of one epoch; other purposes of the same seed are unrelated to it."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))
    return Permutation(size=size, keys=keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOrder:
    """Rows as they lie in the cache, in every epoch."""

    num_rows: int

    def row(self, *, epoch: int, position: int) -> int:
        """See RowOrder."""
        if not 0 <= position < self.num_rows:
            raise IndexError(
                f"position {position} of epoch {epoch} is outside {self.num_rows} rows"
            )
        return position


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutOrder:
    """The rows held out for evaluation, in file order."""

    rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """See RowOrder."""
        return len(self.rows)

    def row(self, *, epoch: int, position: int) -> int:
        """See RowOrder."""
        if not 0 <= position < self.num_rows:
            raise IndexError(
                f"position {position} of epoch {epoch} is outside {self.num_rows} rows"
            )
        return self.rows[position]


class ShuffledOrder:
    """All rows but the held-out ones, shuffled anew in every epoch.

    The permutation of purpose `split` puts the held-out rows first; an epoch's permutation then
    shuffles what stands behind them.
    """

    def __init__(self, *, num_cache_rows: int, seed: int, num_held_out: int = 0) -> None:
        self._num_held_out = num_held_out
        self._seed = seed
        self._num_rows = num_cache_rows - num_held_out
        self._split = make_permutation(num_cache_rows, seed=seed, epoch=0, purpose="split")

    @property
    def num_rows(self) -> int:
        """See RowOrder."""
        return self._num_rows

    def row(self, *, epoch: int, position: int) -> int:
        """See RowOrder."""
        shuffle = make_permutation(self._num_rows, seed=self._seed, epoch=epoch, purpose="epoch")
        return self._split.apply(self._num_held_out + shuffle.apply(position))

    def held_out(self) -> HeldOutOrder:
        """List the rows that no epoch of this order contains."""
        rows = sorted(self._split.apply(index) for index in range(self._num_held_out))
        return HeldOutOrder(rows=tuple(rows))


def split_rows(num_rows: int, *, share: float, seed: int) -> tuple[ShuffledOrder, HeldOutOrder]:
    """Hold out a share of the rows, the same ones for the same seed.

    Raises:
        DataError: the share is not between 0 and 1, or one side would have no row.
    """
    if not 0 < share < 1:
        raise DataError(f"eval_split is {share}; it must lie between 0 and 1, such as 0.01")
    num_held_out = max(1, round(num_rows * share))
    if num_held_out >= num_rows:
        raise DataError(
            f"eval_split of {format_percent(share)} of {num_rows} rows leaves none to train on",
            fix="set eval_split: null to train without evaluation, give more data, or name a file"
            " of its own as eval_data",
        )
    order = ShuffledOrder(num_cache_rows=num_rows, seed=seed, num_held_out=num_held_out)
    return order, order.held_out()


def _mix(value: int, key: int) -> int:
    """Spread a value over 64 bits (the finaliser of SplitMix64)."""
    mixed = (value + key) & _MASK_64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ mixed >> 31
