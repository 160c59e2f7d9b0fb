"""Ranks that run different programs: the bits of one process, whatever schedule and plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from ranked_ways import WAYS
from subjects import choose_pairwise, find_subject

from bench.planned import Subject, Ways, trace_subject, train_by_plan
from bench.ranked import lower_ranks, open_rank, run_ranks, spread_blocks, train_on_ranks
from bench.reference import Curve, find_differences
from bench.zoo import ZOO, batch_of, build_gpt2, clip_of, make_optimizer_words, make_steps
from packhorse.errors import NonFiniteError, PeerLostError, RefusedError
from packhorse.runtime.transport.loopback import LoopbackGroup
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named
from packhorse.schedule.spec import Schedule

FACTORS = (
    ("llama", "gpt2", "qwen3", "gemma3", "mixtral", "weave"),
    ("gpipe", "1f1b", "interleaved", "layered"),
    ("2", "3"),
    ("1", "2", "5"),
    ("adamw", "momentum"),
    tuple(WAYS),
)


def make_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    return make_named(name, num_ranks, num_microbatches, even_costs(num_ranks))


@cache
def run_alone(name: str, optimizer: str, num_microbatches: int, scratch: Path) -> Curve:
    subject = find_subject(name, "all", optimizer)
    steps = make_steps(ZOO[name], num_steps=3, num_microbatches=num_microbatches)
    return train_by_plan(
        subject, WAYS["kept"], steps, max_grad_norm=clip_of(optimizer), scratch=scratch
    )


def run_ranked(
    subject: Subject, name: str, schedule: Schedule, steps, ways, scratch: Path, clip: float | None
) -> Curve:
    stages = spread_blocks(subject.traced.model, schedule.num_stages)
    return train_on_ranks(
        subject, schedule, stages, ways, steps, max_grad_norm=clip, scratch=scratch
    )


@pytest.mark.parametrize("row", choose_pairwise(FACTORS), ids="-".join)
def test_ranks_have_the_bits_of_one_process(row: tuple[str, ...], tmp_path: Path) -> None:
    name, family, num_ranks, num_microbatches, optimizer, ways = row
    one = run_alone(name, optimizer, int(num_microbatches), tmp_path)
    many = run_ranked(
        find_subject(name, "all", optimizer),
        name,
        make_schedule(family, int(num_ranks), int(num_microbatches)),
        make_steps(ZOO[name], num_steps=3, num_microbatches=int(num_microbatches)),
        [WAYS[ways]],
        tmp_path,
        clip_of(optimizer),
    )
    assert find_differences(one, many) == ()


def test_each_rank_may_plan_in_its_own_way(tmp_path: Path) -> None:
    steps = make_steps(ZOO["weave"], num_steps=3, num_microbatches=4)
    many = run_ranked(
        find_subject("weave"),
        "weave",
        make_schedule("1f1b", 4, 4),
        steps,
        list(WAYS.values()),
        tmp_path,
        clip_of("adamw"),
    )
    assert find_differences(run_alone("weave", "adamw", 4, tmp_path), many) == ()


def test_fewer_microbatches_than_ranks_and_frozen_ranks(tmp_path: Path) -> None:
    """The lowest blocks are frozen: the first rank trains less, and others nothing of a layer."""
    subject = find_subject("llama", "frozen")
    steps = make_steps(ZOO["llama"], num_steps=3, num_microbatches=2)
    one = train_by_plan(subject, WAYS["kept"], steps, max_grad_norm=0.5, scratch=tmp_path)
    many = run_ranked(
        subject, "llama", make_schedule("1f1b", 5, 2), steps, [WAYS["kept"]], tmp_path, 0.5
    )
    assert find_differences(one, many) == ()


def test_dropout_draws_the_masks_of_one_process(tmp_path: Path) -> None:
    subject = find_dropout_subject()
    steps = make_steps(ZOO["gpt2"], num_steps=3, num_microbatches=3)
    one = train_by_plan(subject, WAYS["kept"], steps, max_grad_norm=0.5, scratch=tmp_path)
    for ways in (WAYS["kept"], WAYS["recomputed"]):
        many = run_ranked(
            subject, "gpt2", make_schedule("1f1b", 3, 3), steps, [ways], tmp_path, 0.5
        )
        assert find_differences(one, many) == ()


def test_evaluation_between_steps_says_the_same_on_all_ranks(tmp_path: Path) -> None:
    subject = find_subject("qwen3")
    steps = make_steps(ZOO["qwen3"], num_steps=2, num_microbatches=3)
    schedule = make_schedule("1f1b", 2, 3)
    stages = spread_blocks(subject.traced.model, 2)
    losses: list[list[float]] = []
    for num_ranks in (1, 2):
        cut = stages if num_ranks == 2 else [[b.id for b in subject.traced.model.blocks]]
        told = _train_and_evaluate(
            subject,
            schedule if num_ranks == 2 else make_schedule("1f1b", 1, 3),
            cut,
            steps,
            tmp_path,
        )
        losses.append(told)
    assert losses[0] == losses[1]


def test_a_loss_that_is_nan_ends_all_ranks(tmp_path: Path) -> None:
    subject = find_subject("qwen3")
    weights = dict(subject.weights)
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], float("nan"))
    broken = Subject(
        exported=subject.exported,
        traced=subject.traced,
        optimizer=subject.optimizer,
        weights=weights,
        compute_dtype=subject.compute_dtype,
    )
    steps = make_steps(ZOO["qwen3"], num_steps=1, num_microbatches=3)
    with pytest.raises(NonFiniteError, match="the loss became nan in step 1"):
        run_ranked(
            broken, "qwen3", make_schedule("1f1b", 3, 3), steps, [WAYS["kept"]], tmp_path, None
        )


def test_a_parameter_of_several_ranks_is_summed_once_a_step() -> None:
    subject = find_subject("llama")
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(RefusedError, match="is used by blocks on several ranks"):
        lower_ranks(
            subject,
            schedule,
            spread_blocks(subject.traced.model, 2),
            [Ways()],
            num_microbatches=2,
            clips=True,
        )


def test_a_rank_that_gives_up_wakes_the_others() -> None:
    group = LoopbackGroup(3)

    def work(rank: int) -> None:
        end = group.end_of(rank)
        if rank == 2:
            end.abort("its disk is full")
            return
        with pytest.raises(PeerLostError, match="rank 2: its disk is full"):
            end.receive(torch.empty(4), peer=1 - rank)

    run_ranks(3, work)


def test_nothing_comes_for_too_long() -> None:
    end = LoopbackGroup(2, wait_s=0.01).end_of(0)
    with pytest.raises(PeerLostError, match="nothing came for 0 s"):
        end.receive(torch.empty(4), peer=1)


def test_a_rank_that_ends_early_lets_the_others_go(tmp_path: Path) -> None:
    """Its own lanes wait for messages as well; nobody waits for a time limit."""
    subject = find_subject("qwen3")
    steps = make_steps(ZOO["qwen3"], num_steps=1, num_microbatches=2)
    schedule = make_schedule("1f1b", 2, 2)
    ranked = lower_ranks(
        subject,
        schedule,
        spread_blocks(subject.traced.model, 2),
        [WAYS["kept"]],
        num_microbatches=2,
        clips=False,
    )
    group = LoopbackGroup(2)

    def work(rank: int) -> None:
        with open_rank(subject, ranked, rank, group.end_of(rank), tmp_path) as engine:
            if rank == 1:
                raise KeyError("no such row")
            engine.train_step(steps[0], step=1, learning_rate=0.1)

    with pytest.raises(KeyError, match="no such row"):
        run_ranks(2, work)


def test_loopback_keeps_the_order_of_each_channel() -> None:
    group = LoopbackGroup(2)

    def work(rank: int) -> list[float]:
        end = group.end_of(rank)
        if rank == 0:
            for number in range(20):
                end.send(torch.full((3,), float(number)), peer=1)
            return []
        found = []
        for _ in range(20):
            tensor = torch.empty(3)
            end.receive(tensor, peer=0)
            found.append(float(tensor[0]))
        return found

    assert run_ranks(2, work)[1] == [float(number) for number in range(20)]


@cache
def find_dropout_subject() -> Subject:

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build_gpt2(dropout=0.2).train()
    batch = batch_of(make_steps(ZOO["gpt2"], num_steps=1, num_microbatches=1))
    return trace_subject(module, batch, make_optimizer_words("adamw", ZOO["gpt2"], "all"))


def _train_and_evaluate(subject, schedule, stages, steps, scratch: Path) -> list[float]:
    curve = train_on_ranks(
        subject,
        schedule,
        stages,
        [Ways(tied_sum="per_step")],
        steps,
        max_grad_norm=None,
        scratch=scratch,
        evaluate=True,
    )
    return list(curve.totals)
