import json
from dataclasses import replace

import pytest

from packhorse.plan.spec import BlockPlan, Choice
from packhorse.report.choices import fold_choices, fold_names
from packhorse.report.explain import Advice, explain_plan, explanation_as_dict, plan_table
from packhorse.report.run import MeasuredSteps, estimate_run
from tests.report.samples import MACHINE, MIB, make_predicted_plan, render

PLAN = make_predicted_plan()
RUN = estimate_run(
    PLAN,
    MACHINE,
    num_steps=1200,
    num_saves=6,
    num_kept=2,
    weights_bytes=540 * MIB,
    checkpoint_bytes=1620 * MIB,
    checkpoint_ns=14_000_000_000,
    weights_ns=5_000_000_000,
    num_evaluations=7,
    evaluation_ns=9_000_000_000,
    first_step_ns=23_000_000_000,
)
ADVICE = Advice(
    relief=tuple(f"{count} chunks stay: 1.00 GiB more" for count in range(7, 0, -1)),
    clipping="Clipping takes 54.0 ms (1.2 %) of a step.",
)


def test_golden_texts(golden):
    golden("report/plan_table.txt", render(plan_table(PLAN, RUN), encoding="ascii"))
    golden("report/explain.txt", render(explain_plan(PLAN, RUN, ADVICE), encoding="ascii"))


def test_block_characters_where_the_terminal_has_them():
    text = render(explain_plan(PLAN, RUN))
    assert "\u2588" in text
    assert "\u2588" not in render(explain_plan(PLAN, RUN), encoding="ascii")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_no_line_is_wider_than_the_terminal(width, encoding):
    for renderable in (explain_plan(PLAN, RUN, ADVICE), plan_table(PLAN, RUN), plan_table(PLAN)):
        lines = render(renderable, width=width, encoding=encoding).splitlines()
        assert max(len(line) for line in lines) <= width


def test_a_plan_without_prediction_is_explained_too():
    plan = replace(PLAN, prediction=None)
    for renderable in (explain_plan(plan), plan_table(plan)):
        assert "This plan has no prediction" in render(renderable)
    assert explanation_as_dict(plan)["step_ns"] is None
    assert explanation_as_dict(plan)["relief"] is None


def test_the_dict_says_the_same():
    as_dict = json.loads(json.dumps(explanation_as_dict(PLAN, RUN, ADVICE)))
    assert as_dict["peak_bytes"]["disk"] == {"parameters": 540 << 20, "optimizer": 1080 << 20}
    assert as_dict["bottleneck"] == "compute: busy 88.2 % of the step"
    assert as_dict["run"]["steps"] == 1200
    assert len(as_dict["relief"]) == 7
    assert as_dict["clipping"] == ADVICE.clipping
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


def test_advice_is_shown_the_most_helpful_first_and_not_all():
    text = render(explain_plan(PLAN, RUN, ADVICE))
    assert "Faster: 7 chunks stay" in text
    assert "Faster: 3 chunks stay" in text
    assert "Faster: 2 chunks stay" not in text
    assert ADVICE.clipping in text
    nothing = render(explain_plan(PLAN, RUN, replace(ADVICE, relief=())))
    assert "Nothing but compute: a faster device, or fewer operations." in nothing
    assert "not beside it" in render(explain_plan(PLAN, RUN), width=300)


def test_causes_whose_names_do_not_say_it_all_have_a_legend():
    prediction = PLAN.prediction
    assert prediction is not None
    peaks = {"disk": {"optimizer": MIB, "slots": MIB}, "device": {"base": MIB, "ahead": MIB}}
    text = " ".join(
        render(
            explain_plan(replace(PLAN, prediction=replace(prediction, peak_bytes=peaks)))
        ).split()
    )
    assert "kept steps: the disk's second copy of what steps change" in text
    assert "process itself: objects of the traced model" in text
    assert "brought ahead: what lanes bring or keep before its turn" in text
    assert "workspace:" not in text  # there is none


def test_what_a_budget_does_not_count_is_said_where_memory_holds_the_libraries_too():
    words = "Python, torch and other libraries themselves come on top"
    assert words in render(plan_table(PLAN))
    on_gpu = replace(PLAN, numerics=replace(PLAN.numerics, device="cuda"))
    assert words not in render(plan_table(on_gpu))


def test_kept_steps_are_a_row_that_says_what_it_is_for():
    assert "resume  from checkpoints alone: " in render(plan_table(PLAN))
    prediction = PLAN.prediction
    assert prediction is not None
    kept = replace(
        PLAN,
        durable=Choice(value=7, because="a test"),
        prediction=replace(
            prediction, peak_bytes={"disk": {"slots": 3 * MIB}}, kept_bytes_per_step=MIB
        ),
    )
    assert (
        "resume  every 7 steps the state is kept, 3.00 MiB of disk for it, 1.00 MiB more written"
    ) in render(plan_table(kept), width=120)


def test_measured_steps_stand_beside_what_the_plan_says():
    so_far = MeasuredSteps(
        num_done=10, num_steps=30, num_recent=9, step_ns=17_250_000_000, by_this_plan=True
    )
    text = " ".join(render(plan_table(PLAN, RUN, so_far), width=300).split())
    assert (
        "so far 10 of 30 steps are done; the last 9 steps took 17.2 s each: 5 min 45 s for the 20"
        " that are left; the plan says 4.31 s a step, 86.2 s"
    ) in text
    other = replace(so_far, by_this_plan=False, num_recent=1)
    text = " ".join(render(plan_table(PLAN, RUN, other), width=300).split())
    assert (
        "the last step, by another plan, took 17.2 s: 5 min 45 s for the 20 that are left" in text
    )
    assert "the plan says" not in text
