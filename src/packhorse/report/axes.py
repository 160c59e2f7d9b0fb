"""Axes that people read: round ticks, in the unit that suits the span.

In: a largest value. Out: ticks as (value, label), from 0 upwards.
"""

from __future__ import annotations

from math import ceil, floor, log2, log10
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
    name, scale = _unit_for(longest_ns, _TIME_UNITS, start_at=2)
    # Nanoseconds are whole.
    least = longest_ns / scale / max(num_ticks - 1, 1)
    step = max(_decimal_step(least), 1 / scale)
    return _ticks(longest_ns, step, name, scale)


def byte_ticks(most_bytes: int, *, num_ticks: int = 4) -> tuple[tuple[int, str], ...]:
    """Give up to `num_ticks` sizes, multiples of a power of two, from 0 to at most `most_bytes`."""
    name, scale = _unit_for(most_bytes, _BYTE_UNITS, start_at=1)
    least = most_bytes / scale / max(num_ticks - 1, 1)
    step = max(2.0 ** ceil(log2(least)) if least > 0 else 1.0, 1 / scale)
    return _ticks(most_bytes, step, name, scale)


def _unit_for(
    largest: int, units: tuple[tuple[str, int], ...], *, start_at: int
) -> tuple[str, int]:
    return next((unit for unit in reversed(units) if largest >= start_at * unit[1]), units[0])


def _ticks(largest: int, step: float, name: str, scale: int) -> tuple[tuple[int, str], ...]:
    ticks: list[tuple[int, str]] = []
    while (value := round(len(ticks) * step * scale)) <= largest:
        ticks.append((value, f"{len(ticks) * step:g} {name}"))
    return tuple(ticks)


def _decimal_step(least: float) -> float:
    """Give the smallest of 1, 2, 5 times a power of ten that is at least `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
