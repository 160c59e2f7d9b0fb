"""Schedules that take backwards apart, on ranks that are threads: the bits of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ranked_ways import WAYS
from subjects import choose_pairwise, find_subject

from bench.planned import Subject, train_by_plan
from bench.ranked import lower_ranks, spread_blocks, train_on_ranks
from bench.reference import Curve, find_differences
from bench.zoo import ZOO, clip_of, make_steps
from packhorse.graph.halving import halve_backwards
from packhorse.program.tasks import InputGrad, WeightGrad
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named

COUNT = 4
CASES = choose_pairwise(
    (
        ("llama", "gpt2", "weave"),
        ("zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe-v"),
        ("2", "3"),
        ("kept", "recomputed", "on disk"),
    )
)


@cache
def halved(name: str) -> Subject:
    subject = find_subject(name)
    return replace(subject, traced=halve_backwards(subject.traced))


@cache
def run_alone(name: str, scratch: Path) -> Curve:
    steps = make_steps(ZOO[name], num_steps=2, num_microbatches=COUNT)
    return train_by_plan(
        halved(name), WAYS["kept"], steps, max_grad_norm=clip_of("adamw"), scratch=scratch
    )


@pytest.mark.parametrize("row", CASES, ids="-".join)
def test_ranks_that_run_halves_have_the_bits_of_one_process(
    row: tuple[str, ...], tmp_path: Path
) -> None:
    name, family, num_ranks, ways = row
    subject = halved(name)
    schedule = make_named(family, int(num_ranks), COUNT, even_costs(int(num_ranks)))
    many = train_on_ranks(
        subject,
        schedule,
        spread_blocks(subject.traced.model, schedule.num_stages),
        [WAYS[ways]],
        make_steps(ZOO[name], num_steps=2, num_microbatches=COUNT),
        max_grad_norm=clip_of("adamw"),
        scratch=tmp_path,
    )
    assert find_differences(run_alone(name, tmp_path), many) == ()


def test_each_rank_has_the_halves_of_its_blocks() -> None:
    subject = halved("llama")
    schedule = make_named("zb-h1", 2, COUNT, even_costs(2))
    stages = spread_blocks(subject.traced.model, 2)
    ranked = lower_ranks(
        subject, schedule, stages, [WAYS["kept"]], num_microbatches=COUNT, clips=True
    )
    programs = ranked.programs["train_step"]
    for program, stage in zip(programs, stages, strict=True):
        halves = [task for task in program.tasks if isinstance(task, InputGrad | WeightGrad)]
        assert {task.block for task in halves} == set(range(len(stage)))
        firsts = {(t.block, t.microbatch) for t in halves if isinstance(t, InputGrad)}
        seconds = {(t.block, t.microbatch) for t in halves if isinstance(t, WeightGrad)}
        assert len(seconds) == COUNT * len(stage)
        assert firsts <= seconds
