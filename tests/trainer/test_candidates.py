"""Candidates: which micro-batches are offered, what was measured, what was scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import make_machine
from torch import Tensor, nn
from torch.nn import functional

from packhorse.errors import InputError
from packhorse.graph.trace import Traced
from packhorse.machine.contention import CoreClocks
from packhorse.machine.spec import Machine
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.measure import Measurement, measure_profile
from packhorse.profile.scaling import scale_profile, scale_time, total_ns
from packhorse.trainer import candidates
from packhorse.trainer.candidates import (
    BLOCK_RUN_BYTES,
    EVALUATION_BYTES,
    LATER_BYTES,
    Candidates,
    TracingRequest,
    choose_rows,
    trace_candidates,
)

REQUEST = TracingRequest(name="tiny", groups={}, compute_dtype=torch.float32)


class Speaker(nn.Module):
    """An embedding and a head with a summed loss, whose logits can be chunked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.mix = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.drop(functional.silu(self.mix(self.embed(ids))))
        logits = self.head(hidden).view(-1, 64)
        loss = functional.cross_entropy(logits, labels.view(-1), reduction="sum")
        return loss, (labels != -100).sum()


def example(rows: int) -> Mapping[str, Tensor]:
    return {name: torch.zeros(rows, 8, dtype=torch.int64) for name in ("ids", "labels")}


def offer(tmp_path: Path, rows: int, **options: object) -> Candidates:
    machine = replace(make_machine(tmp_path), source="probe")
    return trace_candidates(Speaker(), example(rows), REQUEST, machine, global_rows=rows, **options)


def test_rows_are_a_few_divisors_of_the_step_and_the_whole_of_it():
    assert choose_rows(12) == (1, 2, 4, 6, 12)
    assert choose_rows(8) == (1, 2, 4, 8)
    assert choose_rows(7) == (1, 7)
    assert choose_rows(6) == (1, 2, 3, 6)
    assert choose_rows(60) == (1, 2, 4, 6, 15, 30, 60)
    assert choose_rows(12, 6) == (6,)
    with pytest.raises(InputError, match="cannot be cut into micro-batches of 5"):
        choose_rows(12, 5)


def test_all_are_measured_where_there_is_time(tmp_path: Path):
    found = offer(tmp_path, 4, limit_s=30.0)
    assert [entry.traced.model.rows for entry in found.entries] == [1, 2, 4]
    assert found.notes == ()
    assert found.attention == "native"
    for entry in found.entries:
        assert entry.profile.source == "measured"
        times = [entry.profile.bodies[block.body] for block in entry.traced.model.blocks]
        assert all(time.forward_ns > 0 and time.backward_ns > 0 for time in times)


def test_what_there_was_no_time_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def measure_one(traced: Traced, machine: Machine, **options: object) -> Measurement:
        done = traced.model.rows == 1
        profile = replace(estimate_profile(traced.model, machine), source="measured")
        return Measurement(profile=profile, num_measured=3 if done else 1, num_bodies=3)

    monkeypatch.setattr(candidates, "measure_profile", measure_one)
    found = offer(tmp_path, 4, limit_s=5.0)
    (note,) = found.notes
    assert note.startswith("of 3 ways to cut the step 1 was measured in 5.00 s")
    assert {entry.profile.source for entry in found.entries} == {"measured"}
    assert [entry.profile.rows for entry in found.entries] == [1, 2, 4]


def test_the_largest_is_measured_next_and_tells_of_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slowness = {1: 2.0, 8: 5.0}
    asked: list[int] = []

    def measure(traced: Traced, machine: Machine, **options: object) -> Measurement:
        rows = traced.model.rows
        asked.append(rows)
        estimated = estimate_profile(traced.model, machine)
        bodies = {
            body: scale_time(t, slowness.get(rows, 1.0)) for body, t in estimated.bodies.items()
        }
        profile = replace(estimated, source="measured", bodies=bodies)
        return Measurement(profile=profile, num_measured=2 + (rows in slowness), num_bodies=3)

    monkeypatch.setattr(candidates, "measure_profile", measure)
    found = offer(tmp_path, 8, limit_s=5.0)
    assert asked == [1, 8, 4, 2]
    assert "2 were measured" in found.notes[0]
    assert "nearest in size" in found.notes[0]
    machine = make_machine(tmp_path)
    for entry, factor in zip(found.entries, (2.0, 2.0, 5.0, 5.0), strict=True):
        estimated = estimate_profile(entry.traced.model, machine)
        taken = sum(map(total_ns, entry.profile.bodies.values()))
        expected = sum(map(total_ns, estimated.bodies.values()))
        assert taken == pytest.approx(factor * expected, rel=1e-3)


def test_what_could_not_run_once_in_the_rest_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []

    def measure(traced: Traced, machine: Machine, **options: object) -> Measurement:
        asked.append(traced.model.rows)
        estimated = estimate_profile(traced.model, machine)
        bodies = {body: scale_time(time, 1e9) for body, time in estimated.bodies.items()}
        profile = replace(estimated, source="measured", bodies=bodies)
        return Measurement(profile=profile, num_measured=3, num_bodies=3)

    monkeypatch.setattr(candidates, "measure_profile", measure)
    offer(tmp_path, 4, limit_s=5.0)
    assert asked == [1]


def test_kinds_of_blocks_are_counted_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran = 0

    def measure_few(traced: Traced, machine: Machine, **options: object) -> Measurement:
        profile = estimate_profile(traced.model, machine)
        return Measurement(profile=profile, num_measured=ran, num_bodies=3)

    monkeypatch.setattr(candidates, "measure_profile", measure_few)
    for ran, words in enumerate(("none was", "1 was", "2 were")):
        (note,) = offer(tmp_path, 1, limit_s=5.0).notes
        assert note.startswith(f"of 3 kinds of blocks {words} measured in 5.00 s")
        assert note.endswith("scaled by what those blocks took") == (ran > 0)


def test_what_others_took_while_blocks_were_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def look(at_s: float, busy_s: float) -> CoreClocks:
        return CoreClocks(at_s=at_s, busy_s=busy_s, own_s=0.0, num_cores=1)

    machine = make_machine(tmp_path)
    looks = iter([look(0.0, 0.0), look(2.0, machine.num_threads * 1.0)] * 2)
    monkeypatch.setattr(candidates, "read_core_clocks", lambda: next(looks))
    found = offer(tmp_path, 2, limit_s=30.0)
    assert [entry.profile.busy_share for entry in found.entries] == [pytest.approx(0.5)] * 2
    estimated = offer(tmp_path, 2, limit_s=0)
    assert {entry.profile.busy_share for entry in estimated.entries} == {0.0}


def test_without_time_or_on_another_machine_estimates_stand_in(tmp_path: Path):
    found = offer(tmp_path, 2, limit_s=0)
    assert {entry.profile.source for entry in found.entries} == {"analytic"}
    assert "not measured" in found.notes[0]


def test_the_loss_is_offered_in_chunks_where_logits_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(candidates, "LARGE_LOGITS_BYTES", 4 * 64 * 8)
    found = offer(tmp_path, 2, limit_s=0)
    assert [(e.traced.model.rows, e.loss_chunk_tokens) for e in found.entries] == [
        (1, None), (2, None), (2, 8),
    ]  # fmt: skip
    assert found.find(rows=2, loss_chunk_tokens=8).loss_chunk_tokens == 8
    with pytest.raises(InputError, match="4 rows with loss whole"):
        found.find(rows=4, loss_chunk_tokens=None)
    whole = offer(tmp_path, 2, limit_s=0, loss_chunk_tokens="whole")
    assert {entry.loss_chunk_tokens for entry in whole.entries} == {None}
    pinned = offer(tmp_path, 2, limit_s=0, loss_chunk_tokens=4, microbatch_rows=2)
    assert [entry.loss_chunk_tokens for entry in pinned.entries] == [4]


def test_what_was_not_run_is_scaled_by_what_was(tmp_path: Path):
    machine = make_machine(tmp_path)
    small, large = (
        trace_candidates(
            Speaker(), example(4), REQUEST, machine, global_rows=4, microbatch_rows=rows, limit_s=0
        )
        .entries[0]
        .traced
        for rows in (1, 4)
    )
    there, here = estimate_profile(small.model, machine), estimate_profile(large.model, machine)
    slower = replace(
        there,
        source="measured",
        bodies={
            body: replace(time, forward_ns=3 * time.forward_ns, discard_ns=3 * time.discard_ns,
                          backward_ns=3 * time.backward_ns)
            for body, time in there.bodies.items()
        },
    )  # fmt: skip
    scaled = scale_profile(slower, there, here)
    assert (scaled.rows, scaled.source) == (4, "measured")
    for body, time in here.bodies.items():
        assert scaled.bodies[body].forward_ns == 3 * time.forward_ns


def test_bodies_beyond_the_memory_are_not_run(tmp_path: Path):
    machine = make_machine(tmp_path)
    traced = offer(tmp_path, 1, limit_s=0).entries[0].traced
    none = measure_profile(traced, machine, limit_s=30.0, memory_bytes=1)
    assert (none.num_measured, none.profile.source) == (0, "analytic")
    heard: list[str] = []
    threads = torch.get_num_threads()
    some = measure_profile(
        traced, machine, limit_s=30.0, progress=lambda name, *_: heard.append(name)
    )
    assert some.num_measured == some.num_bodies == len(heard)
    assert torch.get_num_threads() == threads


def test_a_process_holds_more_the_more_micro_batches_a_step_is_cut_into(tmp_path: Path):
    entries = offer(tmp_path, 32, limit_s=0, baseline_bytes=0).entries
    bases = {entry.traced.model.rows: entry.profile.base_bytes for entry in entries}
    num_blocks = len(entries[0].traced.model.blocks)
    assert bases[1] - bases[32] == 31 * num_blocks * BLOCK_RUN_BYTES
    assert bases[16] - bases[32] == num_blocks * BLOCK_RUN_BYTES


def test_a_run_that_evaluates_holds_more(tmp_path: Path):
    # A process that had held that much before holds nothing more after tracing.
    options = {"limit_s": 0, "baseline_bytes": 1 << 50}
    bases = [
        offer(tmp_path, 1, evaluates=evaluates, **options).entries[0].profile.base_bytes
        for evaluates in (False, True)
    ]
    assert bases[0] >= LATER_BYTES
    assert bases[1] - bases[0] == EVALUATION_BYTES
