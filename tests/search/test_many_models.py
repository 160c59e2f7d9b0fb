"""Random models, budgets and pins: every plan that the search gives passes the verifier."""

from __future__ import annotations

import random

import pytest

from packhorse.compiler.lower import lower_plan
from packhorse.plan.files import format_plan, parse_plan
from packhorse.plan.identity import check_plan
from packhorse.verifier.rules import verify_program
from tests.search.toy_search import (
    ADAMW,
    SGD,
    make_candidates,
    make_machine,
    need,
    search,
    smallest_plan,
)


@pytest.mark.parametrize("seed", range(12))
def test_every_plan_fits_and_is_proved(seed):
    dice = random.Random(seed)
    options = {
        "num_layers": dice.randint(1, 5),
        "hidden": dice.choice([16, 32, 64]),
        "vocabulary": dice.choice([64, 300, 1024]),
        "length": dice.choice([16, 64, 200]),
        "tied_head": dice.random() < 0.4,
        "frozen": dice.choice([[], ["layers.1"], ["embed", "layers.1"]]),
        "saves": dice.random() < 0.8,
    }
    if options["num_layers"] > 2:
        options["shared_layers"] = (1, 3)
        options["skips"] = ((0, 2),)
    rows = dice.choice([(1,), (1, 2), (2, 4)])
    candidates = make_candidates(rows, base_bytes=dice.choice([0, 5000]), **options)
    pins = dice.choice(
        [{}, {"chunk_bytes": 4096}, {"recompute": "all"}, {"heap": "keep", "chunk_bytes": 16384}]
    )
    common = {
        "total": dice.choice([4, 8]),
        "optimizer": dice.choice([ADAMW, SGD]),
        "pins": pins,
    }
    least = search(candidates, how=smallest_plan, **common).budget_bytes["device"]
    most = need(search(candidates, **common))
    budget = least + int((most - least) * dice.random())
    plan = search(candidates, make_machine(budget), **common)
    assert need(plan) <= budget == plan.budget_bytes["device"]
    assert parse_plan(format_plan(plan)) == plan
    model = next(
        candidate.model
        for candidate in candidates
        if candidate.model.rows == plan.numerics.microbatch_rows.value
    )
    check_plan(plan, model)
    for kind in ("train_step", "evaluate", "load", "save"):
        verify_program(lower_plan(plan, model, kind), model)
