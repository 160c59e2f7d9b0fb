"""One training run: from a plan to a model on the disk.

In: a prepared recipe, a plan with its traced model, a machine, how to begin, an observer. Out: a
`TrainResult` and a run folder. Killed at any moment, the run resumes at its newest checkpoint
or kept step and the curve is bitwise the same: batches, learning rates and random numbers are
functions of the step.

Ranks that share a model each call it, with the plans of all: the first one has the run folder, the
others a log in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256

from packhorse.graph.trace import Traced
from packhorse.machine.cluster import Cluster
from packhorse.machine.cluster_files import format_cluster
from packhorse.machine.files import format_machine
from packhorse.machine.spec import Machine
from packhorse.plan.files import PLAN_NAME, format_plan
from packhorse.plan.rank_files import format_rank_plans
from packhorse.plan.ranks import RankPlans
from packhorse.plan.spec import Plan
from packhorse.runtime.emulation import Pace
from packhorse.runtime.memory.heap import trim_heap
from packhorse.runtime.scratch import find_scratch
from packhorse.timeline.files import PREDICTED_NAME, format_timeline, name_for_rank
from packhorse.timeline.spec import Timeline
from packhorse.trainer.crew import ALONE, Crew
from packhorse.trainer.frozen_values import SavedWeights, ValueSource
from packhorse.trainer.joint import join_ranks
from packhorse.trainer.loop import TrainingLoop
from packhorse.trainer.observer import (
    Observer,
    SilentObserver,
    TrainResult,
    Watch,
)
from packhorse.trainer.preparation import PreparedRun, trace_for_plan
from packhorse.trainer.rank_folder import RankFolder
from packhorse.trainer.recipe_files import format_recipe
from packhorse.trainer.reporters import open_reporters
from packhorse.trainer.run_folder import (
    MACHINE_NAME,
    RECIPE_NAME,
    Resume,
    RunFolder,
    StartFresh,
)
from packhorse.trainer.saving import RunSaver
from packhorse.trainer.session import Session
from packhorse.trainer.starting import begin_together, fill_states, resumed_from
from packhorse.trainer.stop_signals import AgreedSignals, StopSignals, stop_at_once


def train(
    prepared: PreparedRun,
    *,
    plan: Plan | RankPlans,
    machine: Machine | Cluster,
    traced: Traced | None = None,
    predicted: Sequence[Timeline] = (),
    resume: Resume = StartFresh(),  # noqa: B008 a frozen value
    observer: Observer | None = None,
    watch: Watch | None = None,
    baseline_bytes: int | None = None,
    pace: Pace | None = None,
    audit: bool = False,
    go_on: str = "packhorse train RECIPE --resume",
    crew: Crew = ALONE,
) -> TrainResult:
    """Run a recipe under a plan.

    Args:
        prepared: from `prepare_run`.
        plan: for this model, batch and machine; or those of all ranks.
        machine: its disk tier names the scratch folders, and how their bytes move; or those of all
            ranks.
        traced: the whole model as the plan says; traced here when absent.
        predicted: what the plan promises of a step, by rank, for the run folder; the first rank
            writes them for all.
        resume: where to begin.
        observer: who watches.
        watch: asked after each step what there is to say of its timeline; that is noted.
        baseline_bytes: `measure_baseline()` of before; the budget comes on top, and is reported.
        pace: how long tasks take on the machine that is emulated; None: as long as they take.
        audit: check every task against what it declares (slow).
        go_on: the command that resumes the run, for who stops it.
        crew: all ranks that share the model.

    Raises:
        InputError: another process trains in the folder, it holds state and the start is fresh,
            there is nothing to resume, or the plan is for something else.
        StorageError: what the run saves will not fit on the disk, or the disk fails.
        NonFiniteError: a loss or gradient is NaN or infinite.
        StoppedError: a signal came; the state was saved.
    """
    recipe = prepared.recipe
    own_plan = plan.ranks[crew.rank] if isinstance(plan, RankPlans) else plan
    own_machine = machine.ranks[crew.rank] if isinstance(machine, Cluster) else machine
    with ExitStack() as stack:
        # Before anything that takes long: may this run begin here?
        with stop_at_once():
            scratch = find_scratch(own_machine.tier("disk"))
            place = None if scratch is None else scratch.parts[0].folder
            beginning, cleared = begin_together(crew, stack, recipe.run_folder, resume, place)
        signals = stack.enter_context(StopSignals())
        reporters = () if crew.rank else open_reporters(recipe)
        for reporter in reporters:
            stack.callback(reporter.close)
        whole = trace_for_plan(prepared, own_plan) if traced is None else traced
        own, joint = whole, None
        if isinstance(plan, RankPlans):
            crew.tell("proving the programs")
            crew.compare(
                _describe_run(prepared, whole, plan),
                "give every rank the same versions, model and data, then start all of them",
            )
            own, joint = join_ranks(whole, plan, crew)
        session = stack.enter_context(
            Session(
                own,
                own_plan,
                optimizer=prepared.optimizer,
                max_grad_norm=recipe.max_grad_norm,
                seed=recipe.seed,
                scratch=scratch,
                pace=pace,
                audit=audit,
                owner=recipe.run_folder,
                resumed=beginning.kept,
                watch=signals.watch,
                baseline_bytes=baseline_bytes,
                joint=joint,
            )
        )
        crew.tell_tasks(session.describe_running)
        crew.tell("loading the states")
        weights = prepared.open_weights()
        stack.callback(weights.close)
        source: ValueSource = weights
        if beginning.checkpoint is not None:
            source = SavedWeights(beginning.checkpoint)
            stack.callback(source.close)
        saver = RunSaver(
            session, prepared, own_plan, dtypes=weights.dtypes, source=source, crew=crew
        )
        watcher = observer or SilentObserver()
        watcher.progressed("loading", 0, None)
        finished, notes = fill_states(session, saver, beginning, weights, resume=resume)
        if saver.reads_source:
            source.release()
        else:
            source.close()
        if source is not weights:
            weights.close()
        trim_heap()
        folder = stack.enter_context(
            RankFolder(recipe.run_folder, rank=crew.rank)
            if crew.rank
            else RunFolder(recipe.run_folder, finished_steps=finished)
        )
        notes += [f"removed what an interrupted save left: {path.name}" for path in cleared]
        if not crew.rank:
            saver.ensure_space(first_step=finished + 1, num_steps=prepared.data.num_steps)
        folder.write_file(RECIPE_NAME, format_recipe(recipe))
        folder.write_file(MACHINE_NAME, _write_machine(machine))
        folder.write_file(PLAN_NAME, _write_plan(plan))
        for each in predicted:
            name = name_for_rank(PREDICTED_NAME, each.rank)
            folder.write_file(name, format_timeline(each))
        run = TrainingLoop(
            prepared=prepared,
            session=session,
            saver=saver,
            folder=folder,
            crew=crew,
            reporters=reporters,
            observer=watcher,
            watch=watch,
            signals=AgreedSignals(signals, crew),
            peak_flops_per_s=_peak_rate(machine, own_plan),
            resumed_from=resumed_from(beginning),
            baseline_bytes=baseline_bytes,
            go_on=go_on,
        )
        for text in notes:
            run.note(text)
        return run.go(finished)


def _describe_run(prepared: PreparedRun, whole: Traced, plans: RankPlans) -> dict[str, str]:
    """What has to be the same on every rank before programs are made from it."""
    data = prepared.data
    held_out = "none" if data.evaluation is None else data.evaluation.cache.manifest.digest
    return {
        "the fingerprint of the traced model": whole.model.fingerprint,
        "the digest of the training data": data.digest,
        "the digest of the evaluation data": held_out,
        "the digest of the plans": sha256(format_rank_plans(plans).encode()).hexdigest()[:16],
    }


def _write_machine(machine: Machine | Cluster) -> str:
    return format_cluster(machine) if isinstance(machine, Cluster) else format_machine(machine)


def _write_plan(plan: Plan | RankPlans) -> str:
    return format_rank_plans(plan) if isinstance(plan, RankPlans) else format_plan(plan)


def _peak_rate(machine: Machine | Cluster, plan: Plan) -> float:
    """The best matmul rate, that of all ranks together."""
    dtype = plan.numerics.compute_dtype
    machines = machine.ranks if isinstance(machine, Cluster) else (machine,)
    best = [
        max((p.flops_per_s for p in each.matmul if p.dtype == dtype), default=float("inf"))
        for each in machines
    ]
    return sum(best)
