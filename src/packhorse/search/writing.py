"""From the chosen state to the plan that people read: reasons, prediction, proof.

In: the evaluation that the search ended with. Out: a `Plan`. All of its programs have passed the
verifier under the plan's own budgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from packhorse.compiler.durability import list_kinds
from packhorse.compiler.lower import Lowerer
from packhorse.machine.spec import TierName
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan
from packhorse.search.durability import choose_durable
from packhorse.search.evaluation import Evaluation, Evaluator, count_modelled
from packhorse.search.keeping import choose_cache
from packhorse.search.prediction import predict_plan
from packhorse.search.reasons import Reasons
from packhorse.search.sketch import Sketches
from packhorse.search.space import build_plan
from packhorse.search.stride import place_updates
from packhorse.verifier.rules import verify_program


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
        prefetch=evaluation.prefetch,
        budget_bytes=budget_bytes,
        reason=reasons.of,
    )
    candidate, machine = setting.candidate, problem.machine
    plan = place_updates(plan, candidate.model, candidate.profile, machine, pins=problem.pins)
    lowerer = evaluator.lowerer_of(candidate.model)
    plan = choose_cache(
        plan, candidate.model, candidate.profile, machine, pins=problem.pins, lowerer=lowerer
    )
    prediction = predict_plan(plan, candidate.model, candidate.profile, machine, lowerer=lowerer)
    durable = choose_durable(
        replace(plan, prediction=prediction),
        candidate.model,
        candidate.profile,
        machine,
        pin=problem.pins.durable,
        resumable=problem.resumable,
    )
    plan = replace(plan, durable=durable)
    prove_plan(plan, setting.model, lowerer=lowerer)
    prediction = predict_plan(plan, candidate.model, candidate.profile, machine, lowerer=lowerer)
    disk = problem.machine.tier("disk")
    return replace(
        plan,
        prediction=prediction,
        scratch=None if disk is None else disk.path,
        drives=() if disk is None else disk.drives,
    )


def prove_plan(plan: Plan, model: Model, *, lowerer: Lowerer | None = None) -> None:
    """Verify every program of a plan; micro-batches beyond the third are like the second.

    Args:
        lowerer: of the model, for who has lowered plans of it before.

    Raises:
        RuleError: a program breaks a rule, for example the capacity of a tier.
    """
    count = count_modelled(plan.order.value, plan.numerics.num_microbatches)
    short = replace(plan, numerics=replace(plan.numerics, num_microbatches=count))
    lowerer = lowerer or Lowerer(model)
    for kind in list_kinds(plan):
        verify_program(lowerer.lower(short, kind), model)
