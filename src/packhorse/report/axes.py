"""Axes that people read: round ticks, in the unit that suits the span.

In: a largest value. Out: ticks as (value, label), from 0 upwards.
"""

from __future__ import annotations

from math import log10
from typing import Final

_TIME_UNITS: Final = (
    ("ns", 1),
    ("us", 10**3),
    ("ms", 10**6),
    ("s", 10**9),
    ("min", 60 * 10**9),
    ("h", 3600 * 10**9),
)
_BYTE_UNITS: Final = (
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
)


def time_ticks(longest_ns: int, *, num_ticks: int = 10) -> tuple[tuple[int, str], ...]:
    """Give up to `num_ticks` round times from 0 to at most `longest_ns`."""
    return _ticks(longest_ns, num_ticks, _TIME_UNITS, start_at=2)


def byte_ticks(most_bytes: int, *, num_ticks: int = 4) -> tuple[tuple[int, str], ...]:
    """Give up to `num_ticks` round sizes from 0 to at most `most_bytes`."""
    return _ticks(most_bytes, num_ticks, _BYTE_UNITS, start_at=1)


def _ticks(
    largest: int, num_ticks: int, units: tuple[tuple[str, int], ...], *, start_at: float
) -> tuple[tuple[int, str], ...]:
    unit, scale = next(
        ((name, size) for name, size in reversed(units) if largest >= start_at * size), units[0]
    )
    step = _round_step(largest / scale / max(num_ticks - 1, 1))
    ticks: list[tuple[int, str]] = []
    while (value := round(len(ticks) * step * scale)) <= largest:
        ticks.append((value, f"{len(ticks) * step:g} {unit}"))
        if step * scale < 1:
            break
    return tuple(ticks)


def _round_step(least: float) -> float:
    """Give the smallest of 1, 2, 5 times a power of ten that is at least `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** int(log10(least) // 1)
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
