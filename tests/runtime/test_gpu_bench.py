"""The GPU bench on a machine that is acted on the CPU: everything but the GPU itself."""

from __future__ import annotations

import argparse
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import gpu
from bench.gpu_subjects import MemoryWatch, Shape
from bench.report import Bench, Figure
from packhorse.errors import ModelError
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.emulation import slow_down
from packhorse.machine.spec import Machine
from packhorse.plan.spec import Plan
from packhorse.timeline.spec import Span, Timeline
from packhorse.units import GIB, MIB

TINY = Shape(
    width=32, inner=64, num_layers=3, num_heads=2, vocabulary=64,
    length=16, rows=4, num_microbatches=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> Machine:
    """A GPU's rates over two shares of this memory."""
    return slow_down(load_known_machine("h200"), 400, {"device": GIB, "host": GIB})


@pytest.fixture
def bench() -> Bench:
    return Bench("gpu", argparse.Namespace(quick=False), Console(quiet=True))


def figures_of(bench: Bench) -> dict[str, Figure]:
    return {figure.name: figure for table in bench.tables for figure in table.figures}


def test_plans_of_all_kinds_have_the_same_bits(
    bench: Bench, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("all in the device", "updates in turns")
    monkeypatch.setattr(gpu, "WAYS", {kind: gpu.WAYS[kind] for kind in kinds})
    gpu.add_numbers(bench, machine, TINY, fused=True)
    figures = figures_of(bench)
    assert [name for name in figures if name.startswith("fp32")] == [
        "fp32: updates in turns",
        "fp32: losses from plain PyTorch's",
    ]
    assert bench.missed == ()
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_that_is_written_out_gives_the_same_losses(machine: Machine) -> None:
    losses = [
        gpu.run_plan(
            gpu.make_decoder(TINY, fused=fused, seed=1, draw_on="cpu", keep_on="cpu"),
            gpu.plan_for(TINY, machine, {}, fused=fused),
            gpu.make_batches(TINY, 2),
            keeps=False,
        ).losses
        for fused in (True, False)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_every_stride_and_the_chosen_one_are_timed(
    bench: Bench, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "STRIDES", (0, 2))
    gpu.add_strides(bench, machine, TINY, fused=True, num_steps=2)
    figures = figures_of(bench)
    assert {f"stride {stride}" for stride in gpu.STRIDES} <= set(figures)
    assert all(figures[f"stride {stride}"].value for stride in gpu.STRIDES)
    assert figures["chosen over best measured"].value >= 1.0


def test_a_decoder_is_held_against_its_prediction(
    bench: Bench, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_unmeasured(*args: Any, measured: bool, **options: Any) -> Plan:
        assert measured
        return plan_for(*args, **options)  # what this process holds would count for the device

    plan_for = gpu.plan_for
    monkeypatch.setattr(gpu, "plan_for", plan_unmeasured)
    # Of 18 bytes a parameter, 13 MiB, about a third fits.
    shape = replace(TINY, width=64, inner=256, vocabulary=4096)
    small = gpu.grant(machine, {"device": 7 * MIB, "host": GIB})
    gpu.add_large(bench, small, shape, fused=True, num_steps=3)
    figures = figures_of(bench)
    assert figures["device peak, predicted"].value <= 7 * MIB
    assert figures["losses from plain PyTorch's"].met
    assert 0 < figures["copies behind computing"].value <= 1
    assert figures["tokens/s, plain PyTorch"].value > 0


def test_copies_are_hidden_while_anything_computes() -> None:
    def span(lane, start_ns: int, end_ns: int) -> Span:
        return Span(index=0, name="", kind="", lane=lane, start_ns=start_ns, end_ns=end_ns)

    spans = (
        span("compute", 0, 10),
        span("update", 5, 20),
        span("compute", 30, 40),
        span("copy_in", 8, 28),
        span("copy_out", 35, 55),
        span("disk_read", 0, 99),
    )
    timeline = Timeline(source="measured", rank=0, spans=spans, memory={})
    assert gpu.hidden_share(timeline) == pytest.approx((12 + 5) / 40)
    assert gpu.hidden_share(replace(timeline, spans=spans[:3])) == 0.0
    assert gpu.updates_of(replace(timeline, spans=spans), {0}) == 0


def test_the_largest_answer_is_kept() -> None:
    answers, asked = [3, 9, 4], threading.Event()

    def read() -> int:
        if len(answers) == 1:
            asked.set()
            return answers[0]
        return answers.pop(0)

    with MemoryWatch(read) as watch:
        assert asked.wait(5)
    assert watch.peak_bytes == 9


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bench.gpu: torch finds no GPU here (")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [None, ModelError("it cannot be traced"), TypeError("None")])
def test_attention_that_does_not_run_is_written_out(
    bench: Bench, machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def run_plan(*_: object, **__: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(gpu, "plan_for", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "run_plan", run_plan)
    assert gpu.choose_attention(bench, machine) == (error is None)
    assert bench.missed == (() if error is None else ("attention: torch's own",))


def test_parts_that_there_is_no_time_for_are_missed(
    bench: Bench, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "probe_gpu", lambda: machine)
    monkeypatch.setattr(gpu, "choose_attention", lambda *_: True)
    monkeypatch.setattr(gpu, "LIMIT_S", 0.0)
    gpu.measure(bench)
    assert bench.missed == ("numbers: run", "strides: run", "3 B parameters: run")
