"""`packhorse train`: from a recipe to a trained model, or to a state that can be resumed."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from packhorse.cli.options import (
    AsJson,
    BudgetText,
    MachineName,
    MemoryText,
    RecipePath,
    Settings,
)
from packhorse.errors import DoesNotFitError

if TYPE_CHECKING:
    from packhorse.cli.machines import MachineChoice
    from packhorse.cli.planning import Planned
    from packhorse.cli.screen import Screen
    from packhorse.cli.training_screen import Summary
    from packhorse.machine.spec import Machine
    from packhorse.plan.ranks import RankPlans
    from packhorse.plan.spec import Plan
    from packhorse.program.program import Program
    from packhorse.timeline.spec import Timeline
    from packhorse.trainer.crew import Crew
    from packhorse.trainer.recipe import Recipe
    from packhorse.trainer.run_folder import Resume

NEWEST: Final = "newest"


def train_recipe(
    recipe: RecipePath,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Train by this plan instead of a new one.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]",
            help="Continue from the newest state, or from a checkpoint folder.",
        ),
    ] = None,
    machine: MachineName = None,
    budget: BudgetText = None,
    memory: MemoryText = None,
    settings: Settings = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Check every task against what it declares: slow.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by a recipe."""
    from packhorse.cli.drift import watch_drift
    from packhorse.cli.earlier_plans import read_earlier
    from packhorse.cli.machines import MachineChoice, advise_as_typed, choose_machine
    from packhorse.cli.measured_steps import read_measured_steps
    from packhorse.cli.planning import load_libraries
    from packhorse.cli.screen import Screen
    from packhorse.cli.seats import find_seat, spell_launcher
    from packhorse.cli.train_ranks import (
        TrainRequest,
        note_finished,
        refuse_alone,
        train_seated,
    )
    from packhorse.cli.training_summary import render_summary, say_where, summary_as_dict
    from packhorse.compiler.lower import lower_plan
    from packhorse.report.explain import plan_table
    from packhorse.runtime.scratch import find_scratch
    from packhorse.trainer.recipe_files import load_recipe
    from packhorse.trainer.run_folder import StartFresh, find_beginning, read_resume
    from packhorse.trainer.starting import refuse_early
    from packhorse.trainer.stop_signals import stop_at_once

    seat = find_seat()
    screen = Screen(as_json=as_json, muted=seat is not None and seat.rank > 0)
    choice = MachineChoice(name=machine, budget=budget, memory=memory)
    go_on = _spell_resume(recipe, choice, settings or (), launcher=spell_launcher(seat))

    def read() -> TrainRequest:
        loaded = load_recipe(recipe, settings or ())
        for warning in loaded.warnings:
            screen.warn(warning)
        return TrainRequest(
            path=recipe,
            loaded=loaded,
            plan=plan,
            beginning=read_resume(
                True if resume == NEWEST else resume, loaded.recipe.resume_from_checkpoint
            ),
            choice=choice,
            audit=audit,
            go_on=go_on,
        )

    if seat is not None:
        train_seated(read, screen)
        return
    request = read()
    loaded, beginning = request.loaded, request.beginning
    # A refusal should not come after minutes of planning.
    refuse_alone(machine, plan)
    refuse_early(loaded.recipe.run_folder, beginning)
    note_finished(request, screen)
    with stop_at_once(), advise_as_typed(choice):
        baseline_bytes = load_libraries(screen)
        chosen = choose_machine(
            choice,
            screen,
            granted=loaded.recipe.granted,
            threads=loaded.recipe.pins.num_threads,
            here=True,
        )
        scratch = find_scratch(chosen.tier("disk"))
        if isinstance(beginning, StartFresh) and scratch is not None:
            find_beginning(loaded.recipe.run_folder, beginning, scratch.parts[0].folder)
        planned = _settle_plan(
            loaded.recipe, chosen, plan, beginning, screen, baseline_bytes=baseline_bytes
        )
        for note in planned.notes:
            screen.note(note)
        so_far = None
        if not isinstance(beginning, StartFresh):
            so_far = read_measured_steps(
                loaded.recipe.run_folder, planned.plan, read_earlier(loaded.recipe), planned.run
            )
        screen.show(plan_table(planned.plan, planned.run, so_far), "")
        program = lower_plan(planned.plan, planned.traced.model, "train_step")
        predicted = _predict(planned, program)
        watch = watch_drift(planned, program, predicted)
        # The run lowers its own.
        del program
        # Traced graphs refer to themselves: those that were not chosen must go before training.
        gc.collect()
    summary = run_planned(
        planned,
        (predicted,),
        beginning,
        screen,
        go_on=go_on,
        watch=watch,
        baseline_bytes=baseline_bytes,
        audit=audit,
    )
    screen.show("", render_summary(planned, summary, baseline_bytes=baseline_bytes))
    # Lines to be copied stay whole, however long the path is.
    screen.show_text(say_where(planned.prepared.recipe.run_folder))
    screen.answer(summary_as_dict(planned, summary))


def _settle_plan(
    recipe: Recipe,
    machine: Machine,
    path: Path | None,
    beginning: Resume,
    screen: Screen,
    *,
    baseline_bytes: int,
) -> Planned:
    """Take the plan that was named, or that of the run that is resumed, or make one."""
    from packhorse.cli.earlier_plans import read_earlier
    from packhorse.cli.planning import plan_recipe, take_plan
    from packhorse.plan.files import PLAN_NAME, read_plan
    from packhorse.plan.ranks import RankPlans
    from packhorse.trainer.run_folder import StartFresh

    if path is not None:
        return take_plan(recipe, machine, read_plan(path), path, screen)
    plan = None if isinstance(beginning, StartFresh) else read_earlier(recipe)
    if isinstance(plan, RankPlans):
        screen.note(f"the run so far had {len(plan.ranks)} ranks: a plan for one is made")
        return _plan_again(recipe, machine, plan, screen, baseline_bytes)
    if plan is not None:
        earlier = recipe.run_folder / PLAN_NAME
        try:
            planned = take_plan(recipe, machine, plan, earlier, screen)
        except DoesNotFitError:
            screen.note(f"{earlier} needs more than the budget now is, so a new plan is made")
            return _plan_again(recipe, machine, plan, screen, baseline_bytes)
        # The same numerics: the curve goes on as if it had never been interrupted.
        screen.note(f"by the plan of the run that is resumed: {earlier}")
        return planned
    return plan_recipe(recipe, machine, screen, baseline_bytes=baseline_bytes)


def _plan_again(
    recipe: Recipe,
    machine: Machine,
    earlier: Plan | RankPlans,
    screen: Screen,
    baseline_bytes: int,
) -> Planned:
    """Plan anew, alike in what decides the bits."""
    from packhorse.cli.earlier_plans import plan_alike
    from packhorse.cli.planning import plan_recipe

    def plan(pinned: Recipe, threads: int | None) -> Planned:
        own = replace(machine, num_threads=threads or machine.num_threads)
        return plan_recipe(pinned, own, screen, baseline_bytes=baseline_bytes)

    return plan_alike(recipe, earlier, screen, plan)


def _predict(planned: Planned, program: Program) -> Timeline:
    from packhorse.simulator.costs import TaskCosts
    from packhorse.simulator.engine import simulate_run

    costs = TaskCosts(
        machine=planned.machine,
        profile=planned.profile,
        model=planned.traced.model,
        program=program,
        heap=planned.plan.heap.value,
    )
    return simulate_run(program, costs=costs)


def run_planned(
    planned: Planned,
    predicted: Sequence[Timeline],
    beginning: Resume,
    screen: Screen,
    *,
    go_on: str,
    watch: Callable[[Timeline], str | None],
    baseline_bytes: int,
    audit: bool,
    crew: Crew | None = None,
) -> Summary:
    """Train by a plan, with a person watching; of several ranks this is the first."""
    from packhorse.cli.pace import find_pace
    from packhorse.cli.training_screen import TrainingScreen
    from packhorse.trainer.crew import ALONE
    from packhorse.trainer.training import train

    plan, recipe, joint = planned.plan, planned.prepared.recipe, planned.joint
    with TrainingScreen(
        screen.err if screen.as_json else screen.out,
        predicted_ns=plan.prediction.step_ns if plan.prediction else None,
        base_bytes=plan.base_bytes,
        budget_bytes=dict(plan.budget_bytes.items()),
        logging_steps=recipe.logging_steps,
        at_start=lambda: _write_companions(planned, recipe.run_folder),
    ) as watcher:
        train(
            planned.prepared,
            plan=plan if joint is None else joint.plans,
            machine=planned.machine if joint is None else joint.cluster,
            traced=planned.whole,
            predicted=predicted,
            resume=beginning,
            observer=watcher,
            watch=watch,
            baseline_bytes=baseline_bytes,
            pace=find_pace(planned.machine, planned.profile, plan, planned.traced.model),
            audit=audit,
            go_on=go_on,
            crew=crew or ALONE,
        )
    return watcher.summary


def _spell_resume(
    recipe: Path, choice: MachineChoice, settings: Sequence[str], *, launcher: Sequence[str]
) -> str:
    """The command that goes on with a run: as it was typed, but from its newest state."""
    words = [*launcher, "packhorse", "train", str(recipe), "--resume"]
    typed = {"--machine": choice.name, "--budget": choice.budget, "--memory": choice.memory}
    for option, value in typed.items():
        words += [option, value] if value is not None else []
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)


def _write_companions(planned: Planned, folder: Path) -> None:
    """Write what belongs to the plan into the run folder, so that it is read without torch."""
    from packhorse.cli.companions import companion_path
    from packhorse.cli.outputs import write_output
    from packhorse.model.files import format_model
    from packhorse.plan.files import PLAN_NAME
    from packhorse.profile.files import format_profile
    from packhorse.report.run_files import format_run

    plan = folder / PLAN_NAME
    write_output(companion_path(plan, "model"), format_model(planned.whole.model))
    write_output(companion_path(plan, "profile"), format_profile(planned.profile))
    write_output(companion_path(plan, "run"), format_run(planned.run))
