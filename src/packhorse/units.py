"""Units people read and write: GiB, ms, %. Inside the program quantities are int bytes and ns.

In: numbers or texts with a unit. Out: int bytes / ns, or short texts for screens.
`parse_bytes(format_exact_bytes(n)) == n` always holds.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3

_BYTE_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 1000,
    "m": MIB,
    "mib": MIB,
    "mb": 1000**2,
    "g": GIB,
    "gib": GIB,
    "gb": 1000**3,
    "t": 1024**4,
    "tib": 1024**4,
    "tb": 1000**4,
}
_LEAST_PART: Final = 0.01
_BYTES_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a size such as `22GiB`, `512 MiB`, `1e9` is not accepted, plain ints are bytes.

    Raises:
        ValueError: the text is no size, or its unit is unknown.
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _BYTES_PATTERN.fullmatch(text)
    if match is None or match.group(2).lower() not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is no size; write for example 22GiB, 512MiB or 1000000")
    return round(Fraction(match.group(1)) * _BYTE_UNITS[match.group(2).lower()])


def format_bytes(num_bytes: float) -> str:
    """Render bytes for a screen with three significant digits, such as `1.25 GiB`."""
    sign = "-" if num_bytes < 0 else ""
    size = abs(num_bytes)
    for unit, scale in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            return f"{sign}{_three_digits(size / scale)} {unit}"
    return f"{sign}{size:.0f} B"


def format_part(part_bytes: float, whole_bytes: float) -> str:
    """Render `x of y` bytes in one unit: `1016 of 1024 MiB`, `4.27 of 256 MiB`.

    The unit is that of the whole, or the next smaller one where the whole is below ten of it.
    """
    units = (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    unit, scale = next(
        ((unit, scale) for unit, scale in units if whole_bytes >= 10 * scale), ("B", 1)
    )
    part, whole = part_bytes / scale, whole_bytes / scale
    if scale == 1:
        return f"{part:.0f} of {whole:.0f} {unit}"
    if 0 < part < _LEAST_PART:
        return f"under {_LEAST_PART} of {_three_digits(whole)} {unit}"
    return f"{_three_digits(part)} of {_three_digits(whole)} {unit}"


def format_exact_bytes(num_bytes: int) -> str:
    """Render bytes so that `parse_bytes` reads the same number back."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return str(num_bytes)


def format_ns(duration_ns: float) -> str:
    """Render a duration for a screen: `850 ns`, `12.3 ms`, `4.56 s`, `3 min 20 s`, `2 h 05 min`."""
    seconds = duration_ns / 1e9
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if seconds >= 120:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    if seconds >= 1:
        return f"{_three_digits(seconds)} s"
    if duration_ns >= 1e6:
        return f"{_three_digits(duration_ns / 1e6)} ms"
    if duration_ns >= 1e3:
        return f"{_three_digits(duration_ns / 1e3)} us"
    return f"{duration_ns:.0f} ns"


def format_count(count: float) -> str:
    """Render a count for a screen: `135 M`, `1.24 B`, `512`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def format_percent(share: float) -> str:
    """Render a share (1.0 is all) as a percentage with one decimal."""
    return f"{share * 100:.1f} %"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
