"""A model under a schedule on machines that nobody has, all the way: cut, lowered, proved, timed.

In: what was typed. Out: picture, step, idle time, peaks of ranks and seconds of each part on the
screen; a document; files. One replica stands for all.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from packhorse.errors import InputError
from packhorse.schedule.replicas import Replicas

if TYPE_CHECKING:
    from packhorse.cli.schedule_reading import ScheduleRequest
    from packhorse.cli.screen import Screen, Tell
    from packhorse.model.spec import Model
    from packhorse.plan.spec import OptimizerPlan
    from packhorse.program.buffers import PoolId
    from packhorse.search.dry_run import CutModel, Fleet, RankProgram
    from packhorse.timeline.spec import Timeline

Part = Literal["read", "cut", "lower", "verify", "simulate", "draw"]
NOTES_HEAD: Final = "idle, peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRequest:
    """What was typed beside the schedule: the model, the machine of each rank, their links."""

    model: Path
    machine: str | None
    budget: str | None
    link: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What is known of a step of all ranks of one replica, and how long each part took.

    `since_ns` is when the step before ended on all ranks. Timelines have what pictures show.
    """

    cut: CutModel
    fleet: Fleet
    link_words: str
    num_blocks: tuple[int, ...]
    num_tasks: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    timelines: tuple[Timeline, ...]
    since_ns: int
    end_ns: int
    taken_s: Mapping[Part, float]

    @property
    def replicas(self) -> Replicas:
        """The schedule and its replicas."""
        return Replicas(first=self.cut.schedule, count=self.fleet.num_replicas)

    @property
    def step_ns(self) -> int:
        """From the end of the step before to the end of this one, on all ranks."""
        return self.end_ns - self.since_ns

    @property
    def fullest(self) -> int:
        """The rank with the highest peak."""
        return self.peak_bytes.index(max(self.peak_bytes))

    def bubble_of(self, rank: int) -> float:
        """Share of the step in which a rank computes nothing."""
        return max(1 - self.timelines[rank].busy_ns("compute") / max(self.step_ns, 1), 0.0)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks compute nothing, over all ranks."""
        ranks = range(len(self.timelines))
        return sum(map(self.bubble_of, ranks)) / len(ranks)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all replicas."""
        model, schedule = self.cut.model, self.cut.schedule
        rows = model.rows * schedule.num_microbatches * self.fleet.num_replicas
        return rows * model.length * 1e9 / max(self.step_ns, 1)


class _Laps:
    # How long each part took.

    def __init__(self) -> None:
        self.taken_s: dict[Part, float] = {}

    @contextmanager
    def time(self, part: Part) -> Generator[None]:
        begin_s = time.monotonic()
        yield
        self.taken_s[part] = time.monotonic() - begin_s


def show_on_paper(
    screen: Screen,
    request: ScheduleRequest,
    paper: PaperRequest,
    *,
    svg: Path | None,
    csv: Path | None,
) -> None:
    """Take a model the whole way, and show what came out.

    Raises:
        InputError: an option is wrong or missing, or there are more stages than blocks.
        DoesNotFitError: a rank needs more memory than it has.
        RuleError: the schedule or a program breaks a rule.
    """
    from packhorse.cli.outputs import check_output, write_output
    from packhorse.cli.schedule_paper_report import (
        describe_dry_run,
        list_facts,
        note_ranks,
        part_table,
        rank_table,
        title_of,
    )
    from packhorse.report.rank_rows import picture_ranks
    from packhorse.report.ranks import draw_ranks
    from packhorse.schedule.csv_text import format_csv

    for path in (svg, csv):
        if path is not None:
            check_output(path)
    laps = _Laps()
    with screen.progress("schedule") as tell:
        run = dry_run(request, paper, screen, tell, laps)
        written: list[Path] = []
        with laps.time("draw"):
            if svg is not None:
                tell("drawing", 0, None)
                drawn = draw_ranks(
                    run.timelines,
                    title=title_of(request.name, run),
                    facts=describe_dry_run(run),
                    notes=note_ranks(run),
                    notes_head=NOTES_HEAD,
                )
                written.append(write_output(svg, drawn))
            if csv is not None:
                written.append(write_output(csv, format_csv(run.cut.schedule)))
    screen.show(
        title_of(request.name, run),
        picture_ranks(run.timelines),
        describe_dry_run(run),
        *list_facts(run),
        "",
        rank_table(run),
        "",
        part_table(run),
    )
    if written:
        screen.wrote(*written)
    screen.answer(_answer(request.name, run, written))


def dry_run(
    request: ScheduleRequest, paper: PaperRequest, screen: Screen, tell: Tell, laps: _Laps
) -> DryRun:
    """Cut, lower, verify and simulate; gives what is worth knowing of it."""
    from packhorse.cli.machines import MachineChoice, choose_machine
    from packhorse.cli.rank_link import choose_link
    from packhorse.cli.schedule_reading import need_sizes, take_schedule
    from packhorse.cli.stage_names import show_stages
    from packhorse.model.files import read_model
    from packhorse.schedule.finding import SEARCHED
    from packhorse.search.dry_run import Fleet, cut_and_search, cut_for, lower_cut
    from packhorse.simulator.joint import simulate_ranks
    from packhorse.simulator.replicas import show_reductions
    from packhorse.verifier.joint import verify_ranks

    with laps.time("read"):
        model = read_model(paper.model)
        machine = choose_machine(MachineChoice(name=paper.machine, budget=paper.budget), screen)
        link, link_words = choose_link(paper.link, machine)
        optimizer = _plan_optimizer(model)
    with laps.time("cut"):
        tell("cutting", 0, None)
        fleet = Fleet(
            machine=machine,
            link=link,
            num_ranks=request.num_ranks or 0,
            num_replicas=request.num_replicas,
        )
        if request.name == SEARCHED:
            _need_no_stages(request)
            num_ranks, num_microbatches = need_sizes(request)
            fleet = replace(fleet, num_ranks=num_ranks)
            cut = cut_and_search(model, fleet, num_microbatches, optimizer=optimizer)
        else:
            schedule, _ = take_schedule(request)
            fleet = replace(fleet, num_ranks=schedule.num_ranks)
            cut = cut_for(model, fleet, schedule, optimizer=optimizer)
    with laps.time("lower"):
        ranks: list[RankProgram] = []
        for each in lower_cut(cut, fleet, optimizer=optimizer):
            ranks.append(each)
            tell("lowering", len(ranks), fleet.num_ranks)
    programs = [each.program for each in ranks]
    with laps.time("verify"):
        tell("verifying", 0, None)
        proofs = verify_ranks(programs, [each.part for each in ranks])
        proved = [proof.peak_bytes for proof in proofs]
        del proofs
    with laps.time("simulate"):
        tell("simulating", 0, None)
        timelines = simulate_ranks(programs, [each.costs for each in ranks])
    return DryRun(
        cut=cut,
        fleet=fleet,
        link_words=link_words,
        num_blocks=tuple(len(each.part.blocks) for each in ranks),
        num_tasks=tuple(len(program.tasks) for program in programs),
        peak_bytes=tuple(
            _add_peaks(peaks, timeline.peak_bytes)
            for peaks, timeline in zip(proved, timelines, strict=True)
        ),
        timelines=tuple(
            show_stages(show_reductions(timeline, each.costs), each.part, cut.pipeline.stages)
            for timeline, each in zip(timelines, ranks, strict=True)
        ),
        since_ns=max(timeline.since_ns for timeline in timelines),
        end_ns=max(timeline.makespan_ns for timeline in timelines),
        taken_s=laps.taken_s,
    )


def _need_no_stages(request: ScheduleRequest) -> None:
    if request.num_stages is not None:
        raise InputError(
            "--stages is for a schedule that leaves their number open",
            where=f"packhorse schedule {request.name}",
            fix="leave it out, or take interleaved, looped-bfs or layered",
        )


def _plan_optimizer(model: Model) -> OptimizerPlan:
    from packhorse.plan.spec import OptimizerPlan
    from packhorse.search.dry_run import find_dtype

    return OptimizerPlan(
        name="adamw",
        states=("exp_avg", "exp_avg_sq"),
        master=find_dtype(model) != "float32",
        clips=True,
    )


def _add_peaks(proved: Mapping[PoolId, int], timed: Mapping[PoolId, int]) -> int:
    """Add up the pools of the device: what is held task by task, or more as lanes run ahead."""
    pools = {*proved, *timed}
    return sum(max(proved.get(pool, 0), timed.get(pool, 0)) for pool in pools)


def _answer(name: str, run: DryRun, written: Sequence[Path]) -> dict[str, object]:
    replicas = run.replicas
    ranks = range(run.fleet.num_ranks)
    return {
        "name": name,
        "model": run.cut.model.name,
        "machine": run.fleet.machine.name,
        "link_bytes_per_s": run.fleet.link.bytes_per_s,
        "link_latency_ns": run.fleet.link.latency_ns,
        "ranks": run.fleet.num_ranks,
        "stages": run.cut.schedule.num_stages,
        "microbatches": run.cut.schedule.num_microbatches,
        "replicas": replicas.count,
        "ranks_of_all": replicas.num_ranks,
        "microbatches_of_all": replicas.num_microbatches,
        "placement": {str(s): list(r) for s, r in sorted(replicas.placement.items())},
        "bounds": list(run.cut.cuts.bounds),
        "recomputes": [share.recomputes for share in run.cut.cuts.shares],
        "tasks": sum(run.num_tasks),
        "step_ns": run.step_ns,
        "bubble": run.bubble,
        "bubble_of_rank": [run.bubble_of(rank) for rank in ranks],
        "tokens_per_s": run.tokens_per_s,
        "budget_bytes": run.fleet.budget_bytes,
        "peak_bytes": list(run.peak_bytes),
        "fullest_rank": run.fullest,
        "taken_s": dict(run.taken_s),
        "files": [str(each) for each in written],
    }
