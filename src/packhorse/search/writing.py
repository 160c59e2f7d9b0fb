"""From the chosen state to the plan that people read: reasons, prediction, proof.

In: the evaluation that the search ended with. Out: a `Plan`. All of its programs have passed the
verifier under the plan's own budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from packhorse.compiler.lower import lower_plan
from packhorse.machine.spec import TierName
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan
from packhorse.program.program import ProgramKind
from packhorse.search.evaluation import Evaluation, Evaluator, count_modelled
from packhorse.search.prediction import predict_plan
from packhorse.search.reasons import Reasons
from packhorse.search.sketch import Sketches
from packhorse.search.space import build_plan
from packhorse.verifier.rules import verify_program

KINDS: Final[tuple[ProgramKind, ...]] = ("train_step", "evaluate", "load", "save")


def write_plan(
    evaluator: Evaluator,
    sketches: Sketches,
    evaluation: Evaluation,
    *,
    budget_bytes: Mapping[TierName, int],
) -> Plan:
    """Write the plan of a state: every choice with its reason, and what it promises."""
    problem, setting = evaluator.problem, evaluation.setting
    need = evaluator.needs_of_all(evaluation)["device"]
    reasons = Reasons(
        problem=problem,
        evaluation=evaluation,
        sketch=sketches.of(setting),
        left_bytes=budget_bytes["device"] - need,
        budget_bytes=budget_bytes["device"],
    )
    plan = build_plan(
        problem,
        setting,
        evaluation.taken,
        budget_bytes=budget_bytes,
        reason=reasons.of,
    )
    prove_plan(plan, setting.model)
    candidate = setting.candidate
    prediction = predict_plan(plan, candidate.model, candidate.profile, problem.machine)
    disk = problem.machine.tier("disk")
    return replace(
        plan,
        prediction=prediction,
        scratch=None if disk is None else disk.path,
        drives=() if disk is None else disk.drives,
    )


def prove_plan(plan: Plan, model: Model) -> None:
    """Verify every program of a plan; micro-batches beyond the third are like the second.

    Raises:
        RuleError: a program breaks a rule, for example the capacity of a tier.
    """
    count = count_modelled(plan.order.value, plan.numerics.num_microbatches)
    short = replace(plan, numerics=replace(plan.numerics, num_microbatches=count))
    for kind in KINDS:
        verify_program(lower_plan(short, model, kind), model)
