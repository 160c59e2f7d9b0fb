"""`packhorse simulate`: when does what happen? A timeline, and a trace that Perfetto opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from packhorse.cli.options import AsJson, MachineName, ModelPath
from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.cli.screen import Screen
    from packhorse.machine.spec import Machine
    from packhorse.model.spec import Model
    from packhorse.profile.spec import Profile
    from packhorse.program.buffers import PoolId
    from packhorse.program.program import Program
    from packhorse.timeline.spec import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is simulated, and beside which file its companions lie."""

    program: Program
    model: Model
    heap: Literal["keep", "map"]
    beside: Path


def simulate(
    path: Annotated[
        Path,
        typer.Argument(metavar="PLAN | PROGRAM", help="A plan.json, run folder or program text."),
    ],
    machine: MachineName = None,
    model: ModelPath = None,
    one_by_one: Annotated[
        bool,
        typer.Option("--one-by-one", help="One task after another, instead of lanes that overlap."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The timeline. Absent: timeline.json beside the input."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The Perfetto trace. Absent: beside the timeline."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the timeline as an SVG picture.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the timeline of one step."""
    from packhorse.cli.outputs import write_output
    from packhorse.cli.screen import Screen
    from packhorse.cli.simulate_ranks import (
        SimulateRequest,
        look_for_rank_plans,
        simulate_rank_plans,
    )
    from packhorse.report.pictures import draw_timeline
    from packhorse.report.terminal import picture_timeline
    from packhorse.timeline.files import format_timeline
    from packhorse.timeline.perfetto import format_trace

    screen = Screen(as_json=as_json)
    plans = look_for_rank_plans(path)
    if plans is not None:
        request = SimulateRequest(
            path=path,
            model=model,
            machine=machine,
            one_by_one=one_by_one,
            out=out,
            trace=trace,
            svg=svg,
        )
        simulate_rank_plans(plans, request, screen)
        return
    subject = _read_subject(path, model)
    timeline = _simulate(
        subject,
        _find_machine(subject.beside, machine, screen),
        one_by_one=one_by_one,
        elsewhere=machine is not None,
    )
    capacity_bytes: dict[PoolId, int] = {
        pool.id: pool.capacity_bytes for pool in subject.program.pools
    }
    out = out or subject.beside.with_name("timeline.json")
    trace = trace or out.with_name(f"{out.stem}.trace.json")
    written = [
        write_output(out, format_timeline(timeline)),
        write_output(trace, format_trace(timeline)),
    ]
    if svg is not None:
        title = f"{subject.model.name}: {subject.program.kind}"
        drawn = draw_timeline(timeline, capacity_bytes=capacity_bytes, title=title)
        written.append(write_output(svg, drawn))
    screen.show(picture_timeline(timeline, capacity_bytes=capacity_bytes))
    screen.wrote(*written)
    screen.answer(
        {
            "step_ns": timeline.step_ns,
            "makespan_ns": timeline.makespan_ns,
            "bubble": timeline.bubble,
            "idle_in_span": timeline.idle_in_span,
            "tasks": len(timeline.spans),
            "peak_bytes": dict(timeline.peak_bytes),
            "capacity_bytes": dict(capacity_bytes),
            "files": [str(each) for each in written],
        }
    )


def _read_subject(path: Path, model_path: Path | None) -> _Subject:
    from packhorse.cli.companions import plan_path, read_plan_model
    from packhorse.cli.kinds import detect_kind, read_text
    from packhorse.compiler.lower import lower_plan
    from packhorse.plan.files import read_plan
    from packhorse.program.tasks import Recv, Send
    from packhorse.program.text import parse_program

    kind = detect_kind(path)
    if kind in ("plan", "run folder"):
        path = plan_path(path)
        plan, model = read_plan(path), read_plan_model(path, model_path)
        program = lower_plan(plan, model, "train_step")
        return _Subject(program=program, model=model, heap=plan.heap.value, beside=path)
    if kind != "program":
        raise InputError(
            f"a {kind} cannot be simulated",
            where=str(path),
            fix="name a plan.json, a run folder, or a program that `packhorse lower` wrote",
        )
    program = parse_program(read_text(path))
    if any(isinstance(task, Send | Recv) for task in program.tasks):
        raise InputError(
            f"this is the program of rank {program.rank} of several: its messages wait for theirs",
            where=str(path),
            fix="simulate the plan of all ranks: packhorse simulate plan.json",
        )
    beside = path.with_name("plan.json")
    return _Subject(
        program=program,
        model=read_plan_model(beside, model_path),
        heap=_heap_of(program),
        beside=beside,
    )


def _heap_of(program: Program) -> Literal["keep", "map"]:
    # A kept heap has a pool of its own beside that of the chunks.
    from packhorse.compiler.buffers import HEAP

    return "keep" if program.workspace_pool == HEAP else "map"


def _find_machine(beside: Path, name: str | None, screen: Screen) -> Machine:
    from packhorse.cli.companions import companion_path
    from packhorse.cli.machines import MachineChoice, choose_machine

    if name is None and (known := companion_path(beside, "machine")).is_file():
        name = str(known)
    return choose_machine(MachineChoice(name=name), screen)


def _simulate(
    subject: _Subject, machine: Machine, *, one_by_one: bool, elsewhere: bool
) -> Timeline:
    from packhorse.simulator.costs import TaskCosts
    from packhorse.simulator.engine import simulate_program, simulate_run

    costs = TaskCosts(
        machine=machine,
        profile=_find_profile(subject, machine, elsewhere=elsewhere),
        model=subject.model,
        program=subject.program,
        heap=subject.heap,
    )
    if one_by_one:
        return simulate_program(subject.program, costs=costs)
    return simulate_run(subject.program, costs=costs)


def _find_profile(subject: _Subject, machine: Machine, *, elsewhere: bool) -> Profile:
    """Take the times that the plan was predicted with; on another machine, estimates."""
    from packhorse.cli.companions import companion_path
    from packhorse.profile.analytic import estimate_profile
    from packhorse.profile.files import read_profile
    from packhorse.profile.identity import fits_model

    path = companion_path(subject.beside, "profile")
    if not elsewhere and path.is_file():
        profile = read_profile(path)
        if fits_model(profile, subject.model):
            return profile
    return estimate_profile(subject.model, machine)
