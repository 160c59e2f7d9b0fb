"""Whoever lowers many plans of a model gets the programs of each one lowered alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_cases import models, plans

from packhorse.compiler.lower import Lowerer, lower_plan
from packhorse.plan.spec import Choice

KINDS = ("train_step", "evaluate", "load", "save")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_plans_share_makes_no_difference_to_any(data):
    model = data.draw(models())
    lowerer = Lowerer(model)
    for plan in data.draw(st.lists(plans(model), min_size=2, max_size=5)):
        cache = data.draw(st.sampled_from(["none", "valleys"]))
        kept = replace(plan, cache=Choice(value=cache, because="a test"))
        for kind in data.draw(st.permutations(KINDS)):
            assert lowerer.lower(kept, kind) == lower_plan(kept, model, kind)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_neighbours_of_a_plan_are_lowered_as_if_they_were_alone(data):
    model = data.draw(models())
    lowerer = Lowerer(model)
    plan = data.draw(plans(model))
    tiers = st.sampled_from(["device", "host", "disk"])
    for _ in range(4):
        chunks = list(plan.chunks)
        number = data.draw(st.integers(0, len(chunks) - 1))
        state = data.draw(st.sampled_from(["parameters", "gradients", "optimizer", "update"]))
        there = data.draw(st.sampled_from(["device", "host"]) if state == "update" else tiers)
        moved = {state: Choice(value=there, because="a test")}
        chunks[number] = replace(chunks[number], **moved)
        plan = replace(plan, chunks=tuple(chunks))
        assert lowerer.lower(plan, "train_step") == lower_plan(plan, model, "train_step")
