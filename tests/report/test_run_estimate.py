import json
from dataclasses import replace

import pytest
import yaml

from packhorse.errors import FileFormatError, InputError
from packhorse.report.run import estimate_run, run_as_dict
from packhorse.report.run_files import format_run, read_run
from tests.report.samples import MACHINE, MIB, make_predicted_plan

PLAN = make_predicted_plan()


def estimate(plan=PLAN, machine=MACHINE, **changes):
    counts = {
        "num_steps": 1000, "num_saves": 5, "num_kept": 2, "weights_bytes": 540 * MIB,
        "checkpoint_bytes": 1620 * MIB, "checkpoint_ns": 14 * 10**9, "weights_ns": 5 * 10**9,
    }  # fmt: skip
    return estimate_run(plan, machine, **{**counts, **changes})


def test_counts_tokens_and_hours():
    run = estimate(first_step_ns=10**10)
    assert run.tokens_per_step == 1 * 4 * 8
    assert run.num_tokens == 32_000
    assert run.tokens_per_s == pytest.approx(32e9 / 4_312_345_678)
    assert run.total_ns == 1000 * 4_312_345_678 + (5 * 14 + 5 + 10) * 10**9
    assert run.hours == pytest.approx(run.total_ns / 3.6e12)
    assert estimate(tokens_per_step=7).num_tokens == 7000


def test_evaluations_take_their_time():
    plain, run = estimate(), estimate(num_evaluations=4, evaluation_ns=10**9)
    assert run.total_ns == plain.total_ns + 4 * 10**9
    assert run_as_dict(run)["evaluations"] == 4


@pytest.mark.parametrize(("num_saves", "num_kept", "held"), [(5, 2, 3), (1, 2, 1), (0, 2, 0)])
def test_a_save_lands_before_an_old_one_goes(num_saves, num_kept, held):
    run = estimate(num_saves=num_saves, num_kept=num_kept)
    assert run.worst_disk_bytes == (1640 + held * 1620 + 540) * MIB


def test_counts_what_is_written():
    run = estimate()
    assert run.written_bytes == (1000 * 1620 + 5 * 1620 + 540) * MIB
    assert run.endurance_share == pytest.approx(run.written_bytes / 600e12)
    assert estimate(machine=replace(MACHINE, tiers=())).endurance_share is None
    assert json.loads(json.dumps(run_as_dict(run)))["written_bytes"] == run.written_bytes


def test_a_save_of_unknown_time_counts_nothing():
    run = estimate(checkpoint_ns=None, weights_ns=None)
    assert run.total_ns == 1000 * 4_312_345_678


def test_a_plan_without_prediction_is_refused():
    with pytest.raises(InputError, match="the plan has no prediction"):
        estimate(replace(PLAN, prediction=None))


def test_an_estimate_is_a_file_beside_the_plan(tmp_path):
    run, path = estimate(num_evaluations=4, evaluation_ns=10**9), tmp_path / "run.json"
    path.write_text(format_run(run))
    assert read_run(path) == run
    path.write_text(yaml.safe_dump(json.loads(format_run(run))))
    assert read_run(path) == run


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"version": 1', '"version": 2', "has version 2"),
        ("packhorse/run", "packhorse/plan", "kind 'packhorse/plan'"),
        ('"num_steps": 1000', '"num_steps": "many"', "num_steps"),
        ('"num_steps"', '"num_step"', "num_step"),
        ("{", "[", "damaged"),
    ],
)
def test_a_damaged_estimate_is_refused_by_place(tmp_path, old, new, words):
    path = tmp_path / "run.json"
    path.write_text(format_run(estimate()).replace(old, new))
    with pytest.raises(FileFormatError, match=words):
        read_run(path)
