"""From a recipe and a machine to a plan, its model and its profile; shows what it is doing.

In: a recipe and a machine. Out: a `Planned`, or the refusal with the smallest budget that works.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.errors import DoesNotFitError
from packhorse.units import format_bytes

if TYPE_CHECKING:
    from packhorse.cli.screen import Screen
    from packhorse.graph.trace import Traced
    from packhorse.machine.cluster import Cluster
    from packhorse.machine.spec import Machine, TierName
    from packhorse.model.spec import Model
    from packhorse.plan.ranks import RankPlans
    from packhorse.plan.spec import Plan
    from packhorse.profile.spec import Profile
    from packhorse.report.explain import Advice
    from packhorse.report.run import RunEstimate
    from packhorse.timeline.spec import Timeline
    from packhorse.trainer.preparation import PreparedRun
    from packhorse.trainer.recipe import Recipe
    from packhorse.trainer.run_data import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What one rank's plan has in common with those of the others.

    `whole` is the model of all ranks, `profiles` what its bodies take on each of them; `timelines`
    are their steps as predicted, on one clock.
    """

    plans: RankPlans
    cluster: Cluster
    whole: Traced
    profiles: tuple[Profile, ...]
    timelines: tuple[Timeline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, what it was made from, and what lies beside it; `notes` is what was not measured.

    With `joint` it is the plan of the first of several ranks, `traced` is its part of the model,
    and `run` is the run of all.
    """

    prepared: PreparedRun
    traced: Traced
    plan: Plan
    profile: Profile
    machine: Machine
    run: RunEstimate
    notes: tuple[str, ...]
    joint: Joint | None = None

    @property
    def whole(self) -> Traced:
        """The whole traced model."""
        return self.traced if self.joint is None else self.joint.whole


def load_libraries(screen: Screen) -> int:
    """Load what planning and training need; give the bytes that this process then holds."""
    with screen.progress("starting") as progress:
        progress("loading libraries", 0, None)
        from packhorse.trainer.candidates import measure_baseline

        return measure_baseline()


def plan_recipe(
    recipe: Recipe,
    machine: Machine,
    screen: Screen,
    *,
    measure: bool = True,
    baseline_bytes: int | None = None,
) -> Planned:
    """Trace a recipe's model and find the fastest plan that fits.

    Args:
        baseline_bytes: `load_libraries()` of before the machine was chosen, where it is this
            computer: what measuring left in memory counts as well. None: no base is counted, and
            the notes say so.
        measure: time the model's blocks here; False estimates them from the machine's rates, as
            for a machine that is somewhere else.

    Raises:
        InputError: something in the recipe, or that it names, is wrong.
        DoesNotFitError: no plan fits the budgets.
    """
    from packhorse.search.search import find_plan
    from packhorse.search.space import Arithmetic, Candidate
    from packhorse.trainer.candidates import MEASURE_LIMIT_S
    from packhorse.trainer.numerics import find_instructions
    from packhorse.trainer.preparation import offer_candidates, prepare_run

    started_s = time.monotonic()
    with screen.progress("planning") as progress:
        prepared = prepare_run(recipe, machine, progress=progress)
        candidates = offer_candidates(
            prepared,
            machine,
            limit_s=MEASURE_LIMIT_S if measure else 0.0,
            # What an emulated machine's device holds is not this process's.
            baseline_bytes=None if machine.emulation else baseline_bytes,
            progress=progress,
        )
        first = candidates.entries[0]
        warn_of_busy_times(screen, first.profile, first.traced.model, machine)
        progress("searching for the fastest plan that fits", 0, None)
        pins = recipe.pins
        plan = find_plan(
            [
                Candidate(
                    model=entry.traced.model,
                    profile=entry.profile,
                    loss_chunk_tokens=entry.loss_chunk_tokens,
                )
                for entry in candidates.entries
            ],
            machine,
            optimizer=prepared.optimizer_plan,
            arithmetic=Arithmetic(
                compute_dtype=prepared.compute_dtype,
                tied_sum=pins.tied_sum or "per_microbatch",
                attention=candidates.attention,
                num_threads=machine.num_threads,
                device=machine.device,
                num_workers=1,
                instructions=find_instructions(machine),
            ),
            global_batch_rows=prepared.cut.global_rows,
            pins=pins,
        )
    chosen = candidates.find(
        rows=plan.numerics.microbatch_rows.value,
        loss_chunk_tokens=plan.numerics.loss_chunk_tokens.value,
    )
    return Planned(
        prepared=prepared,
        traced=chosen.traced,
        plan=plan,
        profile=chosen.profile,
        machine=machine,
        run=estimate_recipe(
            plan,
            machine,
            prepared,
            chosen.traced.model,
            chosen.profile,
            planning_ns=round((time.monotonic() - started_s) * 1e9) if measure else 0,
        ),
        notes=(
            *candidates.notes,
            *_say_base(machine, baseline_bytes),
            *say_emulation(machine),
            *say_schedule(prepared),
        ),
    )


def take_plan(recipe: Recipe, machine: Machine, plan: Plan, path: Path, screen: Screen) -> Planned:
    """Trace a recipe's model as a given plan says; predict and prove the plan anew.

    What the file promises is not believed: it may have been edited, or made for other budgets.

    Args:
        path: where the plan lies; the profile that it was predicted with lies beside it, else the
            machine's rates stand in.

    Raises:
        InputError: something in the recipe, or that it names, is wrong.
        MismatchError: the plan is for another model or batch.
        DoesNotFitError: it needs more than the machine's budgets.
        RuleError: it was edited to something that breaks a rule.
    """
    from packhorse.cli.companions import companion_path
    from packhorse.plan.identity import check_plan
    from packhorse.profile.analytic import estimate_profile
    from packhorse.profile.files import read_profile
    from packhorse.profile.identity import fits_model
    from packhorse.search.prediction import predict_plan
    from packhorse.search.writing import prove_plan
    from packhorse.trainer.numerics import say_other_instructions
    from packhorse.trainer.preparation import prepare_run, trace_for_plan

    started_s = time.monotonic()
    with screen.progress("preparing") as progress:
        prepared = prepare_run(recipe, machine, progress=progress)
        progress("tracing the model as the plan says", 0, None)
        traced = trace_for_plan(prepared, plan)
    check_plan(plan, traced.model)
    beside = companion_path(path, "profile")
    profile = read_profile(beside) if beside.is_file() else None
    notes: tuple[str, ...] = ()
    if profile is None or not fits_model(profile, traced.model):
        profile = estimate_profile(traced.model, machine)
        notes = ("the plan has no profile beside it: times are estimated from the machine's rates",)
    warn_of_busy_times(screen, profile, traced.model, machine, earlier=True)
    plan = replace(plan, prediction=predict_plan(plan, traced.model, profile, machine))
    plan = _fit_budgets(plan, machine, path)
    prove_plan(plan, traced.model)
    planning_ns = round((time.monotonic() - started_s) * 1e9)
    return Planned(
        prepared=prepared,
        traced=traced,
        plan=plan,
        profile=profile,
        machine=machine,
        run=estimate_recipe(
            plan, machine, prepared, traced.model, profile, planning_ns=planning_ns
        ),
        notes=(
            *notes,
            *say_other_instructions(plan.numerics),
            *say_emulation(machine),
            *say_schedule(prepared),
        ),
    )


def warn_of_busy_times(
    screen: Screen, profile: Profile, model: Model, machine: Machine, *, earlier: bool = False
) -> None:
    """Say that the times of the blocks were measured while others computed here.

    Args:
        earlier: they were not measured now, but when the plan was made.
    """
    from packhorse.cli.machines import warn_of_busy
    from packhorse.machine.contention import BUSY_SHARE
    from packhorse.profile.analytic import find_slowdown

    if profile.busy_share < BUSY_SHARE:
        return  # nobody would read the estimate
    warn_of_busy(
        screen,
        profile.busy_share,
        what="the times of the blocks that lie beside the plan" if earlier else "the blocks' times",
        fix="`packhorse plan` measures them again",
        slowdown=find_slowdown(profile, model, machine),
    )


def say_schedule(prepared: PreparedRun) -> tuple[str, ...]:
    """Say what is odd about the learning rates of a run."""
    from packhorse.optim.schedules import say_warmup

    return say_warmup(prepared.recipe.warmup_steps, prepared.data.num_steps)


def _say_base(machine: Machine, baseline_bytes: int | None) -> tuple[str, ...]:
    # What an emulated machine's device holds is not the process's, so there it is all counted.
    if baseline_bytes is not None or machine.emulation is not None:
        return ()
    said = (
        f"{machine.name} is not this computer as it was measured, so the plan counts no base: what"
        " code, libraries and traced graphs take of the device tier comes on top, and `packhorse"
        " train` there needs that much more budget"
    )
    return (said,)


def say_emulation(machine: Machine) -> tuple[str, ...]:
    """Say of a machine that it is only acted."""
    if machine.emulation is None:
        return ()
    said = (
        f"{machine.name} is acted on this CPU: as {machine.emulation.of}, every time"
        f" {machine.emulation.slowdown:g} x as long"
    )
    return (said,)


def _fit_budgets(plan: Plan, machine: Machine, path: Path) -> Plan:
    """Give a plan the machine's budgets, or refuse it with need and have of each tier."""
    prediction = plan.prediction
    assert prediction is not None
    have_bytes: dict[TierName, int] = {tier.name: tier.budget_bytes for tier in machine.tiers}
    excess = [
        f"tier {tier}: need {format_bytes(need)}, have {format_bytes(have_bytes.get(tier, 0))}"
        for tier, causes in prediction.peak_bytes.items()
        if (need := sum(causes.values())) > have_bytes.get(tier, 0)
    ]
    if excess:
        raise DoesNotFitError(
            f"the plan needs more than the budget allows: {', '.join(excess)}",
            where=str(path),
            fix="raise the budget, or leave --plan out: a new plan is made for this budget",
        )
    return replace(plan, budget_bytes=have_bytes)


def estimate_recipe(
    plan: Plan,
    machine: Machine,
    prepared: PreparedRun,
    model: Model,
    profile: Profile,
    *,
    planning_ns: int,
    batch_ns: int | None = None,
) -> RunEstimate:
    """Estimate the whole run of a recipe under a plan.

    Args:
        plan: a plan that has a prediction.
        model: traced as the plan says; its profile and the machine give the time of evaluations.
        planning_ns: what tracing took; it comes again before the first step.
        batch_ns: what evaluating a batch takes, where that is known.
    """
    from packhorse.report.run import estimate_run
    from packhorse.search.prediction import predict_evaluation_ns
    from packhorse.search.save_time import predict_save_ns
    from packhorse.trainer.save_sizes import SMALL_FILES_BYTES, size_saves

    recipe, data = prepared.recipe, prepared.data
    num_saves = -(-data.num_steps // recipe.save_steps) if recipe.save_steps else 0
    summary = data.prepared[0].summary
    sizes = size_saves(prepared, plan, model)

    def save_ns(most_bytes: int) -> int | None:
        # Room is asked for at most; config and tokenizer are rarely worth their time.
        file_bytes = most_bytes - SMALL_FILES_BYTES
        return predict_save_ns(plan, model, profile, machine, file_bytes=file_bytes)

    evaluation_ns = 0
    if data.evaluation is not None:
        count = plan.numerics.num_microbatches
        if batch_ns is None:
            batch_ns = predict_evaluation_ns(plan, model, profile, machine, count)
        evaluation_ns = data.evaluation.steps_per_epoch * batch_ns
    run = estimate_run(
        plan,
        machine,
        num_steps=data.num_steps,
        num_saves=num_saves,
        num_kept=recipe.save_total_limit or num_saves,
        weights_bytes=sizes.model_bytes,
        checkpoint_bytes=sizes.checkpoint_bytes,
        checkpoint_ns=save_ns(sizes.checkpoint_bytes) if num_saves else None,
        weights_ns=save_ns(sizes.model_bytes),
        num_evaluations=_count_evaluations(data, recipe.eval_steps),
        evaluation_ns=evaluation_ns,
        tokens_per_step=round(summary.num_tokens / summary.num_rows * prepared.cut.global_rows),
    )
    return replace(run, first_step_ns=planning_ns + _loading_ns(run, machine))


def _count_evaluations(data: RunData, interval: int | None) -> int:
    """Count them as training does: before the first step, every so many steps, after the last."""
    if data.evaluation is None:
        return 0
    if interval is None:
        return 1
    return 1 + data.num_steps // interval + bool(data.num_steps % interval)


def advise(plan: Plan, model: Model, profile: Profile, machine: Machine) -> Advice:
    """Work out what would make a plan faster, and what clipping costs."""
    from packhorse.report.explain import Advice
    from packhorse.search.relief import NO_CLIPPING, describe_clipping, find_relief

    return Advice(
        # Clipping has a sentence of its own.
        relief=tuple(
            relief.text
            for relief in find_relief(plan, model, profile, machine)
            if relief.change != NO_CLIPPING
        ),
        clipping=describe_clipping(plan, model, profile, machine),
    )


def _loading_ns(run: RunEstimate, machine: Machine) -> int:
    read, write = machine.link("disk", "device"), machine.link("device", "disk")
    if read is None or write is None:
        return 0
    loaded_ns = run.weights_bytes * 1e9 / read.bytes_per_s
    return round(loaded_ns + run.scratch_bytes * 1e9 / write.bytes_per_s)


def write_planned(planned: Planned, path: Path) -> tuple[Path, ...]:
    """Write a plan with its model, machine, profile and run beside it."""
    from packhorse.cli.companions import companion_path
    from packhorse.cli.outputs import write_output
    from packhorse.machine.cluster_files import format_cluster
    from packhorse.machine.files import format_machine
    from packhorse.model.files import format_model
    from packhorse.plan.files import format_plan
    from packhorse.plan.rank_files import format_rank_plans
    from packhorse.profile.files import format_profile
    from packhorse.report.run_files import format_run

    joint = planned.joint
    plan = format_plan(planned.plan) if joint is None else format_rank_plans(joint.plans)
    machine = format_machine(planned.machine) if joint is None else format_cluster(joint.cluster)
    return (
        write_output(path, plan),
        write_output(companion_path(path, "model"), format_model(planned.whole.model)),
        write_output(companion_path(path, "machine"), machine),
        write_output(companion_path(path, "profile"), format_profile(planned.profile)),
        write_output(companion_path(path, "run"), format_run(planned.run)),
    )
