"""From a recipe and the machines of several ranks to their plans; shows what it is doing.

In: a recipe and a cluster. Out: a `Planned` of one rank, with the plans of all in its `joint`; or
the refusal that names the rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packhorse.cli.planning import (
    Joint,
    Planned,
    estimate_recipe,
    say_emulation,
    say_schedule,
    warn_of_busy_times,
)
from packhorse.plan.ranks import check_num_ranks
from packhorse.units import MIB

if TYPE_CHECKING:
    from packhorse.cli.screen import Screen
    from packhorse.graph.trace import Traced
    from packhorse.machine.cluster import Cluster
    from packhorse.machine.spec import Machine
    from packhorse.model.spec import Model
    from packhorse.plan.ranks import RankPlans
    from packhorse.profile.spec import Profile
    from packhorse.search.rank_plans import Promised
    from packhorse.trainer.preparation import PreparedRun, Progress
    from packhorse.trainer.recipe import Recipe

# Halves of backwards, proofs of all ranks' programs, gloo's channels: measured on two ranks,
# 26 MiB above a budget that did not count them.
RANK_BYTES: Final = 64 * MIB


def plan_rank_recipe(
    recipe: Recipe,
    cluster: Cluster,
    screen: Screen,
    *,
    measure: bool = True,
    baseline_bytes: int | None = None,
) -> Planned:
    """Trace a recipe's model and find the fastest plans of all ranks that fit.

    Args:
        measure: time the model's blocks here, for the first rank; those of ranks whose machines
            differ are scaled. False estimates them from the machines' rates.
        baseline_bytes: `load_libraries()` of before, as for `plan_recipe`.

    Raises:
        InputError: something in the recipe, or that it names, is wrong.
        DoesNotFitError: no plans fit the budgets of all ranks.
    """
    from packhorse.graph.halving import halve_backwards
    from packhorse.search.rank_plans import RankCandidate, find_rank_plans
    from packhorse.search.space import Arithmetic
    from packhorse.trainer.candidates import MEASURE_LIMIT_S
    from packhorse.trainer.numerics import find_instructions
    from packhorse.trainer.preparation import offer_candidates

    started_s = time.monotonic()
    first = cluster.ranks[0]
    with screen.progress("planning") as progress:
        prepared = prepare_for_ranks(recipe, cluster, progress)
        candidates = offer_candidates(
            prepared,
            first,
            limit_s=MEASURE_LIMIT_S if measure else 0.0,
            baseline_bytes=None if first.emulation else baseline_bytes,
            progress=progress,
        )
        entry = candidates.entries[0]
        warn_of_busy_times(screen, entry.profile, entry.traced.model, first)
        progress(f"searching for the fastest plans of {cluster.num_ranks} ranks", 0, None)
        halved = [halve_backwards(entry.traced) for entry in candidates.entries]
        offered = [
            RankCandidate(
                model=traced.model,
                profiles=profile_ranks(_count_ranks(entry.profile), traced.model, cluster),
                loss_chunk_tokens=entry.loss_chunk_tokens,
            )
            for entry, traced in zip(candidates.entries, halved, strict=True)
        ]
        pins = recipe.pins
        tied = any(candidate.model.summed_parameters for candidate in offered)
        promised = find_rank_plans(
            offered,
            cluster,
            optimizer=prepared.optimizer_plan,
            arithmetic=Arithmetic(
                compute_dtype=prepared.compute_dtype,
                # Ranks that share a parameter add their sums once a step.
                tied_sum=pins.tied_sum or ("per_step" if tied else "per_microbatch"),
                attention=candidates.attention,
                num_threads=first.num_threads,
                device=first.device,
                num_workers=1,
                instructions=find_instructions(first),
            ),
            global_batch_rows=prepared.cut.global_rows,
            pins=pins,
        )
    numerics = promised.plans.ranks[0].numerics
    at = next(
        index
        for index, candidate in enumerate(offered)
        if candidate.model.rows == numerics.microbatch_rows.value
        and candidate.loss_chunk_tokens == numerics.loss_chunk_tokens.value
    )
    return _join(
        prepared,
        halved[at],
        promised,
        offered[at].profiles,
        cluster,
        notes=candidates.notes,
        planning_ns=round((time.monotonic() - started_s) * 1e9) if measure else 0,
    )


def take_rank_plans(
    recipe: Recipe, cluster: Cluster, plans: RankPlans, path: Path, screen: Screen
) -> Planned:
    """Trace a recipe's model as given plans say; predict and prove them anew.

    Args:
        path: where the plans lie; the profile that they were predicted with lies beside them, else
            the machines' rates stand in.

    Raises:
        InputError: something in the recipe, or that it names, is wrong.
        MismatchError: the plans are for another model, batch or number of ranks.
        DoesNotFitError: a rank needs more than its machine's budgets.
        RuleError: they were edited to something that breaks a rule.
    """
    from packhorse.cli.companions import companion_path
    from packhorse.compiler.ranks import cut_stages
    from packhorse.profile.analytic import estimate_profile
    from packhorse.profile.files import read_profile
    from packhorse.profile.identity import fits_model
    from packhorse.search.rank_plans import fit_budgets
    from packhorse.trainer.numerics import say_other_instructions

    started_s = time.monotonic()
    check_num_ranks(plans, cluster.num_ranks, where=str(path))
    with screen.progress("preparing") as progress:
        prepared = prepare_for_ranks(recipe, cluster, progress)
        progress("tracing the model as the plans say", 0, None)
        traced = trace_for_ranks(prepared, plans)
    beside = companion_path(path, "profile")
    profile = read_profile(beside) if beside.is_file() else None
    notes = say_other_instructions(plans.ranks[0].numerics)
    if profile is None or not fits_model(profile, traced.model):
        profile = estimate_profile(traced.model, cluster.ranks[0])
        notes += (
            "the plan has no profile beside it: times are estimated from the machine's rates",
        )
    warn_of_busy_times(screen, profile, traced.model, cluster.ranks[0], earlier=True)
    profiles = profile_ranks(profile, traced.model, cluster)
    parts = cut_stages(plans.pipeline, traced.model)
    promised = fit_budgets(plans, parts, profiles, cluster, where=str(path))
    return _join(
        prepared,
        traced,
        promised,
        profiles,
        cluster,
        notes=notes,
        planning_ns=round((time.monotonic() - started_s) * 1e9),
    )


def prepare_for_ranks(
    recipe: Recipe, cluster: Cluster, progress: Progress | None = None
) -> PreparedRun:
    """Prepare a run of several ranks, the same on each of them.

    Raises:
        InputError: something in the recipe, or that it names, is wrong.
    """
    from packhorse.trainer.preparation import prepare_run

    # What only some have units for is not chosen for all.
    bf16_native = all(machine.bf16_native for machine in cluster.ranks)
    machine = replace(cluster.ranks[0], bf16_native=bf16_native)
    return prepare_run(recipe, machine, progress=progress)


def trace_for_ranks(prepared: PreparedRun, plans: RankPlans) -> Traced:
    """Trace the whole model exactly as the plans of its ranks say.

    Raises:
        RecipeError: the plans were made for another batch or dtype than the recipe asks for.
        ModelError: the model cannot be traced.
    """
    from packhorse.graph.halving import halve_backwards
    from packhorse.trainer.preparation import trace_for_plan

    return halve_backwards(trace_for_plan(prepared, plans.ranks[0]))


def _count_ranks(profile: Profile) -> Profile:
    """Count what a process holds as one of several ranks, where its base is known."""
    base_bytes = profile.base_bytes and profile.base_bytes + RANK_BYTES
    return replace(profile, base_bytes=base_bytes)


def profile_ranks(profile: Profile, model: Model, cluster: Cluster) -> tuple[Profile, ...]:
    """Give what bodies take on each rank, from what they take on the first.

    Ranks that compute like the first one have its times; those of others are scaled.
    """
    return tuple(_scale(profile, model, cluster.ranks[0], other) for other in cluster.ranks)


def _scale(profile: Profile, model: Model, machine: Machine, other: Machine) -> Profile:
    from packhorse.profile.analytic import estimate_profile
    from packhorse.profile.scaling import scale_profile

    if _computes_alike(machine, other):
        return profile
    scaled = scale_profile(
        profile, estimate_profile(model, machine), estimate_profile(model, other)
    )
    return replace(scaled, base_bytes=profile.base_bytes, busy_share=profile.busy_share)


def _computes_alike(one: Machine, other: Machine) -> bool:
    return (one.matmul, one.memory_bytes_per_s, one.num_threads, one.device) == (
        other.matmul,
        other.memory_bytes_per_s,
        other.num_threads,
        other.device,
    )


def _join(
    prepared: PreparedRun,
    traced: Traced,
    promised: Promised,
    profiles: Sequence[Profile],
    cluster: Cluster,
    *,
    notes: tuple[str, ...],
    planning_ns: int,
) -> Planned:
    from packhorse.compiler.ranks import cut_stages
    from packhorse.graph.parts import cut_traced
    from packhorse.search.rank_plans import merge_predictions, predict_ranks

    plans = promised.plans
    parts = cut_stages(plans.pipeline, traced.model)
    evaluation_ns = max(
        timeline.step_ns
        for timeline in predict_ranks(plans.ranks, parts, profiles, cluster.ranks, kind="evaluate")
    )
    return Planned(
        prepared=prepared,
        traced=cut_traced(traced, plans.pipeline.owners)[0],
        plan=plans.ranks[0],
        profile=profiles[0],
        machine=cluster.ranks[0],
        run=estimate_recipe(
            merge_predictions(plans),
            cluster.ranks[0],
            prepared,
            parts[0],
            profiles[0],
            planning_ns=planning_ns,
            batch_ns=evaluation_ns,
        ),
        notes=(
            *notes,
            *dict.fromkeys(said for machine in cluster.ranks for said in say_emulation(machine)),
            *say_schedule(prepared),
        ),
        joint=Joint(
            plans=plans,
            cluster=cluster,
            whole=traced,
            profiles=tuple(profiles),
            timelines=promised.timelines,
        ),
    )
