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
@settings(max_examples=30, deadline=None)
def test_what_plans_share_makes_no_difference_to_any(data):
    model = data.draw(models())
    lowerer = Lowerer(model)
    for plan in data.draw(st.lists(plans(model), min_size=2, max_size=5)):
        cache = data.draw(st.sampled_from(["none", "valleys"]))
        kept = replace(plan, cache=choice(cache))
        for kind in data.draw(st.permutations(KINDS)):
            assert lowerer.lower(kept, kind) == lower_plan(kept, model, kind)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_neighbours_of_a_plan_are_lowered_as_if_they_were_alone(data):
    model = data.draw(models())
    lowerer = Lowerer(model)
    plan = data.draw(plans(model))
    for _ in range(6):
        plan = data.draw(neighbours(plan))
        for kind in ("train_step", "evaluate"):
            assert lowerer.lower(plan, kind) == lower_plan(plan, model, kind)


@st.composite
def neighbours(draw, plan):
    """Draw a plan that differs in one thing; its chunks hold the same parameters."""
    tiers = st.sampled_from(["device", "host", "disk"])
    numerics = plan.numerics
    match draw(st.sampled_from(["chunk", "update", "block", "heap", "values", "order", "count"])):
        case "chunk":
            state = draw(st.sampled_from(["parameters", "gradients", "optimizer"]))
            return replace(plan, chunks=change_one(draw, plan.chunks, state, tiers))
        case "update":
            places = st.sampled_from(["device", "host"])
            return replace(plan, chunks=change_one(draw, plan.chunks, "update", places))
        case "block":
            choices = st.sampled_from(["keep", "recompute"])
            return replace(plan, blocks=change_one(draw, plan.blocks, "activations", choices))
        case "heap":
            return replace(plan, heap=choice(draw(st.sampled_from(["keep", "map"]))))
        case "values":
            return replace(plan, boundaries=choice(draw(tiers)))
        case "order":
            order, tied_sum = draw(
                st.sampled_from(
                    [
                        ("depth_first", "per_microbatch"),
                        ("depth_first", "per_step"),
                        ("layered", "per_step"),
                    ]
                )
            )
            numerics = replace(numerics, tied_sum=tied_sum)
            return replace(plan, order=choice(order), numerics=numerics)
        case _:
            count = draw(st.integers(1, 3))
            return replace(plan, numerics=replace(numerics, num_microbatches=count))


def change_one(draw, parts, name, values):
    number = draw(st.integers(0, len(parts) - 1))
    changed = replace(parts[number], **{name: choice(draw(values))})
    return (*parts[:number], changed, *parts[number + 1 :])


def choice(value):
    return Choice(value=value, because="a test")
