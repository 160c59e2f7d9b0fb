import json
from dataclasses import replace

import pytest

from packhorse.plan.spec import BlockPlan, Choice
from packhorse.report.choices import fold_choices, fold_names
from packhorse.report.explain import explain_plan, explanation_as_dict, plan_table
from packhorse.report.relief import find_relief, price_clipping
from packhorse.report.run import estimate_run
from tests.report.samples import MACHINE, make_predicted_plan, render

PLAN = make_predicted_plan()
RUN = estimate_run(
    PLAN,
    MACHINE,
    num_steps=1200,
    num_saves=6,
    num_kept=2,
    first_step_ns=23_000_000_000,
    endurance_bytes=600 * 10**12,
)


def test_golden_texts(golden):
    golden("report/plan_table.txt", render(plan_table(PLAN, RUN), encoding="ascii"))
    golden("report/explain.txt", render(explain_plan(PLAN, RUN), encoding="ascii"))


def test_block_characters_where_the_terminal_has_them():
    text = render(explain_plan(PLAN, RUN))
    assert "\u2588" in text
    assert "\u2588" not in render(explain_plan(PLAN, RUN), encoding="ascii")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_no_line_is_wider_than_the_terminal(width, encoding):
    for renderable in (explain_plan(PLAN, RUN), plan_table(PLAN, RUN), plan_table(PLAN)):
        lines = render(renderable, width=width, encoding=encoding).splitlines()
        assert max(len(line) for line in lines) <= width


def test_a_plan_without_prediction_is_explained_too():
    plan = replace(PLAN, prediction=None)
    for renderable in (explain_plan(plan), plan_table(plan)):
        assert "This plan has no prediction" in render(renderable)
    assert explanation_as_dict(plan)["step_ns"] is None
    assert find_relief(plan) == ()


def test_the_dict_says_the_same():
    as_dict = json.loads(json.dumps(explanation_as_dict(PLAN, RUN)))
    assert as_dict["peak_bytes"]["disk"] == {"parameters": 540 << 20, "optimizer": 1080 << 20}
    assert as_dict["bottleneck"] == "compute: 79.8 % of the step"
    assert as_dict["run"]["steps"] == 1200
    assert {choice["choice"] for choice in as_dict["choices"]} >= {"activations", "C heap"}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["embed"], "embed"),
        (["embed", "layers.0", "layers.1", "layers.2", "head"], "embed, layers.0-2, head"),
        (["0", "1", "3", "4"], "0-1, 3-4"),
        (["h.0.mlp", "h.1.mlp"], "h.0-1.mlp"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], "a.0.b.0-1, a.1.b.0"),
        (["0", "2", "4", "6", "8", "9", "11"], "0, 2, 4, 6, 3 more"),
        (["layers.9", "layers.10"], "layers.9-10"),
    ],
)
def test_names_that_count_up_are_ranges(names, text):
    assert fold_names(names) == text


def test_equal_choices_are_folded_and_many_reasons_too():
    groups = [group for group in fold_choices(PLAN) if group.choice == "activations"]
    assert [(group.value, group.where) for group in groups] == [
        ("keep", "embed, head"),
        ("recompute", "layers.1-6"),
    ]
    own_reasons = replace(
        PLAN,
        blocks=tuple(
            BlockPlan(name=block.name, activations=Choice(value="keep", because=f"saves {at} ms"))
            for at, block in enumerate(PLAN.blocks)
        ),
    )
    groups = [group for group in fold_choices(own_reasons) if group.choice == "activations"]
    assert [group.because for group in groups] == [
        "saves 0 ms (and 7 more reasons in the plan file)"
    ]


def test_relief_names_the_largest_gain_first():
    first, second = find_relief(PLAN)
    assert first.startswith("Disk traffic is 16.2 % of the step (3.16 GiB).")
    assert "a larger global batch" in first
    assert second.startswith("Recompute of 6 of 8 blocks is 14.8 % of the step")
    bound = {"forward": PLAN.prediction.step_ns}
    plan = replace(PLAN, prediction=replace(PLAN.prediction, time_ns=bound))
    assert find_relief(plan) == ("Nothing but compute: a faster device, or fewer operations.",)


def test_clipping_has_its_price():
    assert price_clipping(PLAN).startswith("Clipping takes 54.0 ms a step for the norm and keeps")
    unclipped = replace(PLAN, optimizer=replace(PLAN.optimizer, clips=False))
    assert price_clipping(unclipped) == "Gradients are not clipped, which costs nothing."
