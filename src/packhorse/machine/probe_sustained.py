"""Writes until a drive's rate is steady: what it does once its cache is full.

In: a way to write one more window, limits in bytes and time. Out: the rate at first and the rate at
last. A drive with a cache is steady twice, and the first time is not the one that counts: nothing
counts as steady before half of the limit in bytes is written. The first windows may go to space
that was never written, which is slower for reasons of its own: they fill the cache, and no more.

    windows   f f f f | w w w w | w w w w | w w w w | w w w w
              first     early     ...       ^ steady when these two quarters differ by at most 5 %
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.machine.probe_passes import Moved
from packhorse.units import GIB

DEFAULT_LIMIT_BYTES: Final = 64 * GIB
DEFAULT_LIMIT_NS: Final = 300 * 10**9
_STEADY_SHARE: Final = 0.05
_LEAST_WINDOWS: Final = 8
_QUARTERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """When to stop writing although the rate is not steady yet."""

    size_bytes: int = DEFAULT_LIMIT_BYTES
    duration_ns: int = DEFAULT_LIMIT_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedRate:
    """What a drive did early and at last; `steady` says whether the last is where it stays."""

    early_bytes_per_s: float
    bytes_per_s: float
    written_bytes: int
    steady: bool


Tell = Callable[[int], None]
"""Told after each window how much is written."""


def write_until_steady(
    write_window: Callable[[], Moved],
    limits: WriteLimits,
    *,
    first_bytes: int = 0,
    tell: Tell | None = None,
) -> SustainedRate:
    """Write window after window until their rate is steady or a limit is reached.

    Args:
        first_bytes: windows before so much is written do not count, unless there are no others.
    """
    first: list[Moved] = []
    windows: list[Moved] = []
    written_bytes = duration_ns = 0
    steady = False
    while not steady and written_bytes < limits.size_bytes and duration_ns < limits.duration_ns:
        window = write_window()
        (first if written_bytes < first_bytes else windows).append(window)
        written_bytes += window.size_bytes
        duration_ns += window.duration_ns
        if tell is not None:
            tell(written_bytes)
        steady = 2 * written_bytes >= limits.size_bytes and is_steady(windows)
    windows = windows or first
    quarter = max(1, len(windows) // _QUARTERS)
    return SustainedRate(
        early_bytes_per_s=_rate(windows[:quarter]),
        bytes_per_s=_rate(windows[-quarter:]),
        written_bytes=written_bytes,
        steady=steady,
    )


def is_steady(windows: Sequence[Moved]) -> bool:
    """Whether the last quarter of the windows was as fast as the quarter before it."""
    if len(windows) < _LEAST_WINDOWS:
        return False
    quarter = len(windows) // _QUARTERS
    last, before = _rate(windows[-quarter:]), _rate(windows[-2 * quarter : -quarter])
    return abs(last - before) <= _STEADY_SHARE * last


def _rate(windows: Sequence[Moved]) -> float:
    total_ns = sum(window.duration_ns for window in windows)
    return sum(window.size_bytes for window in windows) * 1e9 / max(1, total_ns)
