"""Ranks that are processes, over gloo: one spawn for some cases of everything at once."""

from __future__ import annotations

from pathlib import Path

from bench.rank_worker import DROPOUT, Case, make_subject, write_cases
from bench.ranks import read_curve, run_worker, train_alone
from bench.reference import find_differences

CASES = tuple(
    Case(
        name=f"{model}-{schedule}",
        model=model,
        schedule=schedule,
        num_microbatches=num_microbatches,
        optimizer=optimizer,
        activations=(activations,),
        disk=disk,
    )
    for model, schedule, num_microbatches, optimizer, activations, disk in (
        ("weave", "1f1b", 4, "adamw", "keep", False),
        (DROPOUT, "zb-v", 3, "momentum", "recompute", True),
    )
)


def test_two_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    run_worker(write_cases(tmp_path / "cases.json", CASES), tmp_path, 2)
    for case in CASES:
        subject = make_subject(case)
        one = train_alone(case, subject, tmp_path)
        many = read_curve(case, tmp_path, 2, list(subject.weights))
        assert find_differences(one, many) == (), case.name
