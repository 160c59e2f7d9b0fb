import json
from dataclasses import replace

import pytest

from packhorse.errors import InputError
from packhorse.report.run import estimate_run, run_as_dict
from tests.report.samples import MACHINE, MIB, make_predicted_plan

PLAN = make_predicted_plan()
NUM_ELEMENTS = sum(p.stop - p.start for chunk in PLAN.chunks for p in chunk.pieces)


def estimate(plan=PLAN, machine=MACHINE, **changes):
    counts = {"num_steps": 1000, "num_saves": 5, "num_kept": 2}
    return estimate_run(plan, machine, **{**counts, **changes})


def test_counts_tokens_and_hours():
    run = estimate(first_step_ns=10**10)
    assert run.tokens_per_step == 1 * 4 * 8
    assert run.num_tokens == 32_000
    assert run.tokens_per_s == pytest.approx(32e9 / 4_312_345_678)
    assert run.total_ns == 1000 * 4_312_345_678 + 5 * run.checkpoint_ns + 10**10
    assert run.hours == pytest.approx(run.total_ns / 3.6e12)
    assert estimate(tokens_per_step=7).num_tokens == 7000


def test_a_checkpoint_holds_weights_and_two_moments():
    run = estimate()
    assert run.weights_bytes == 4 * NUM_ELEMENTS
    assert run.checkpoint_bytes == 12 * NUM_ELEMENTS
    # At 1 GB/s a byte takes a nanosecond.
    assert run.checkpoint_ns == run.checkpoint_bytes
    narrow = replace(
        PLAN,
        numerics=replace(PLAN.numerics, compute_dtype="bfloat16"),
        optimizer=replace(PLAN.optimizer, master=True),
    )
    assert estimate(narrow).weights_bytes == 2 * NUM_ELEMENTS
    assert estimate(narrow).checkpoint_bytes == 14 * NUM_ELEMENTS
    frozen = replace(PLAN, chunks=tuple(replace(c, trainable=False) for c in PLAN.chunks))
    assert estimate(frozen).checkpoint_bytes == 4 * NUM_ELEMENTS


@pytest.mark.parametrize(("num_saves", "num_kept", "held"), [(5, 2, 3), (1, 2, 1), (0, 2, 0)])
def test_a_save_lands_before_an_old_one_goes(num_saves, num_kept, held):
    run = estimate(num_saves=num_saves, num_kept=num_kept)
    assert run.worst_disk_bytes == 1640 * MIB + held * 12 * NUM_ELEMENTS + 4 * NUM_ELEMENTS


def test_counts_what_is_written():
    run = estimate(endurance_bytes=10**15)
    assert run.written_bytes == 1000 * 1620 * MIB + 5 * 12 * NUM_ELEMENTS + 4 * NUM_ELEMENTS
    assert run.endurance_share == pytest.approx(run.written_bytes / 1e15)
    assert estimate().endurance_share is None
    assert json.loads(json.dumps(run_as_dict(run)))["written_bytes"] == run.written_bytes


def test_without_a_disk_rate_a_save_has_no_time():
    run = estimate(machine=replace(MACHINE, links=()))
    assert run.checkpoint_ns is None
    assert run.total_ns == 1000 * 4_312_345_678


def test_a_plan_without_prediction_is_refused():
    with pytest.raises(InputError, match="the plan has no prediction"):
        estimate(replace(PLAN, prediction=None))
