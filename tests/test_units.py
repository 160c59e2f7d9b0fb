"""Sizes, durations, counts and shares, as people read and write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import units

SIZES = st.integers(min_value=0, max_value=2**60)


@given(SIZES)
def test_exact_bytes_round_trip(num_bytes: int) -> None:
    assert units.parse_bytes(units.format_exact_bytes(num_bytes)) == num_bytes


@given(SIZES)
def test_an_integer_is_bytes(num_bytes: int) -> None:
    assert units.parse_bytes(num_bytes) == num_bytes
    assert units.parse_bytes(str(num_bytes)) == num_bytes


@given(SIZES)
def test_short_bytes_are_within_one_percent(num_bytes: int) -> None:
    shown = units.parse_bytes(units.format_bytes(num_bytes))
    assert abs(shown - num_bytes) <= 0.01 * num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("22GiB", 22 * 2**30),
        (" 1.5 gib ", 3 * 2**29),
        ("512M", 2**29),
        ("512MB", 512_000_000),
        ("3k", 3072),
        ("2TB", 2 * 10**12),
        ("7b", 7),
    ],
)
def test_parse_bytes(text: str, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "1,5GiB", "3 parsecs", "1 2GiB"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no size; write for example 22GiB"):
        units.parse_bytes(text)


def test_parse_bytes_refuses_a_negative_number() -> None:
    with pytest.raises(ValueError, match="a size cannot be negative: -1"):
        units.parse_bytes(-1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-(3 * 2**20), "-3.00 MiB"),
        (5 * 2**28, "1.25 GiB"),
        (150 * 2**30, "150 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert units.format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (850, "850 ns"),
        (12_300, "12.3 us"),
        (12_300_000, "12.3 ms"),
        (4_560_000_000, "4.56 s"),
        (119_000_000_000, "119 s"),
        (200_000_000_000, "3 min 20 s"),
        (7_500_000_000_000, "2 h 05 min"),
    ],
)
def test_format_ns(duration_ns: int, text: str) -> None:
    assert units.format_ns(duration_ns) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512"), (1_500, "1.50 k"), (134_515_008, "135 M"), (1.24e9, "1.24 B"), (3e12, "3.00 T")],
)
def test_format_count(count: float, text: str) -> None:
    assert units.format_count(count) == text


def test_format_percent() -> None:
    assert units.format_percent(0.1234) == "12.3 %"


@pytest.mark.parametrize(
    ("part_bytes", "whole_bytes", "text"),
    [
        (1016 * 2**20, 2**30, "1016 of 1024 MiB"),
        (2**30, 2**30, "1024 of 1024 MiB"),
        (1434 * 2**20, 4 * 2**30, "1434 of 4096 MiB"),
        (4480 * 2**10, 256 * 2**20, "4.38 of 256 MiB"),
        (64 * 2**10, 24 * 2**30, "under 0.01 of 24.0 GiB"),
        (0, 24 * 2**30, "0.00 of 24.0 GiB"),
        (600 * 2**30, 2**40, "600 of 1024 GiB"),
        (30 * 2**40, 20 * 2**40, "30.0 of 20.0 TiB"),
        (100, 9000, "100 of 9000 B"),
    ],
)
def test_both_sides_of_a_part_have_one_unit(part_bytes: int, whole_bytes: int, text: str) -> None:
    assert units.format_part(part_bytes, whole_bytes) == text
