"""Machines that stand for faster ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from packhorse.errors import FileFormatError, InputError
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.emulation import slow_down
from packhorse.machine.files import check_machine, format_machine, parse_machine, read_machine
from packhorse.machine.spec import Emulation, TierName
from packhorse.units import GIB

SAMPLE = Path(__file__).parents[2] / "machines" / "emulated-a100.yaml"
BUDGETS = {"device": GIB, "host": 2 * GIB}


def test_all_rates_are_divided_alike() -> None:
    real = load_known_machine("a100-80gb")
    slow = slow_down(real, 400, BUDGETS)
    check_machine(slow, "test")
    for source, target in (("host", "device"), ("device", "host")):
        before, after = real.link(source, target), slow.link(source, target)
        assert before is not None
        assert after is not None
        assert after.bytes_per_s == before.bytes_per_s / 400
        assert after.latency_ns == before.latency_ns * 400
    mixed = tuple(replace(link, mixed_bytes_per_s=4e9) for link in real.links)
    slow_mixed = slow_down(replace(real, links=mixed), 400, BUDGETS)
    assert {link.mixed_bytes_per_s for link in slow_mixed.links} == {1e7}
    ratios = {
        a.parameters_per_s / b.parameters_per_s
        for a, b in zip(real.updates, slow.updates, strict=True)
    }
    ratios |= {a.flops_per_s / b.flops_per_s for a, b in zip(real.matmul, slow.matmul, strict=True)}
    ratios.add(real.memory_bytes_per_s / slow.memory_bytes_per_s)
    assert all(ratio == pytest.approx(400) for ratio in ratios)
    assert slow.emulation == Emulation(of="a100-80gb", slowdown=400)
    assert [tier.name for tier in slow.tiers] == ["device", "host"]
    assert (slow.device, slow.bf16_native) == ("cpu", False)
    assert parse_machine(format_machine(slow)) == slow


def test_the_sample_file_is_the_slowed_down_machine_of_the_catalogue() -> None:
    sample = read_machine(SAMPLE)
    slow = slow_down(load_known_machine("a100-80gb"), 400, BUDGETS)
    assert sample.emulation == slow.emulation
    assert sample.tiers == slow.tiers
    assert sample.links == slow.links
    for mine, other in zip(sample.updates, slow.updates, strict=True):
        assert mine.tier == other.tier
        assert mine.parameters_per_s == pytest.approx(other.parameters_per_s, rel=1e-3)
    curve = [point for point in slow.matmul if point.dtype == "float32"]
    for mine, other in zip(sample.matmul, curve, strict=True):
        assert mine.flops_per_s == pytest.approx(other.flops_per_s, rel=1e-3)


def test_a_machine_without_a_host_tier_cannot_be_emulated() -> None:
    with pytest.raises(InputError, match="no host tier beside its device"):
        slow_down(load_known_machine("laptop-16gb"), 10, BUDGETS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, "its device is cpu, not cuda"),
        ({"links": ()}, "needs a link from host to device"),
        ({"updates": ()}, "needs an update rate of tier device"),
        ({"emulation": Emulation(of="x", slowdown=0.0)}, "slowdown must be a positive number"),
    ],
)
def test_what_an_emulated_machine_needs(changes, words: str) -> None:
    machine = slow_down(load_known_machine("h100-80gb"), 100, BUDGETS)
    with pytest.raises(FileFormatError, match=words):
        check_machine(replace(machine, **changes), "test")


def test_an_unknown_key_of_the_emulation_is_named_with_the_nearest() -> None:
    text = SAMPLE.read_text().replace("slowdown:", "slow_down:")
    with pytest.raises(FileFormatError, match="did you mean 'slowdown'"):
        parse_machine(text)


@pytest.mark.parametrize("factor", [0, -3, float("nan"), float("inf")])
def test_only_a_positive_number_makes_a_machine_slower(factor: float) -> None:
    budgets: dict[TierName, int] = {"device": GIB, "host": GIB}
    with pytest.raises(InputError, match=r"cannot be .* times slower"):
        slow_down(load_known_machine("a100-80gb"), factor, budgets)


@pytest.mark.parametrize(
    ("budgets", "tier"),
    [({}, "device"), ({"device": GIB}, "host"), ({"device": 0, "host": GIB}, "device")],
)
def test_both_tiers_need_memory(budgets: dict[TierName, int], tier: str) -> None:
    with pytest.raises(InputError, match=f"no memory for its {tier} tier"):
        slow_down(load_known_machine("a100-80gb"), 400, budgets)
