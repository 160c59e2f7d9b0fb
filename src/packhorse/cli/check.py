"""`packhorse check`: is this file right? A line on what was checked, or the broken rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, assert_never

import typer

from packhorse.cli.options import AsJson, ModelPath, NumMicrobatches, NumRanks
from packhorse.errors import FileFormatError, InputError

if TYPE_CHECKING:
    from packhorse.cli.kinds import FileKind
    from packhorse.model.spec import Model
    from packhorse.timeline.spec import Timeline

_RUN_FILES: Final = (
    "recipe.yaml",
    "machine.json",
    "model.json",
    "profile.json",
    "run.json",
    "plan.json",
    "timeline-predicted.json",
    "timeline-measured.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a file is, what was checked, and what a person should know beside that."""

    what: str
    checked: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict[str, object])


def check_file(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Any file of ours, a checkpoint, a run folder, or a schedule: file.py:function.",
        ),
    ],
    model: ModelPath = None,
    ranks: NumRanks = None,
    microbatches: NumMicrobatches = None,
    as_json: AsJson = False,
) -> None:
    """Check any file of ours, by its kind."""
    from rich.padding import Padding
    from rich.text import Text

    from packhorse.cli.kinds import detect_kind
    from packhorse.cli.screen import Screen
    from packhorse.report.tables import plain_table

    screen = Screen(as_json=as_json)
    if _names_schedule(path):
        kind, verdict = "schedule", _judge_schedule(path, ranks, microbatches)
    elif ranks is not None or microbatches is not None:
        raise InputError(
            "--ranks and --microbatches are for schedules",
            where=str(path),
            fix="leave them out, or name a schedule: file.py:function",
        )
    else:
        kind = detect_kind(path)
        verdict = judge_file(path, kind, model)
    for warning in verdict.warnings:
        screen.warn(warning)
    items = plain_table(heads=False)
    items.add_column(no_wrap=True)
    items.add_column(ratio=1)
    for each in verdict.checked:
        items.add_row("-", Text(each))
    screen.show(
        Text.assemble(("ok", "bold green"), f"  {path}: {verdict.what}"),
        Padding(items, (0, 0, 0, 4)),
    )
    screen.answer(
        {
            "file": str(path),
            "kind": kind,
            "ok": True,
            "what": verdict.what,
            "checked": list(verdict.checked),
            "warnings": list(verdict.warnings),
            **verdict.facts,
        }
    )


def judge_file(path: Path, kind: FileKind, model: Path | None) -> Verdict:
    """Check a file of a known kind.

    Raises:
        InputError: the file, or what it refers to, is wrong.
        RefusedError: a rule rejects it.
    """
    match kind:
        case "plan":
            return _judge_plan(path, model)
        case "rank plans":
            return _judge_rank_plans(path, model)
        case "program":
            return _judge_program(path, model)
        case "machine":
            return _judge_machine(path)
        case "cluster":
            return _judge_cluster(path)
        case "timeline":
            return _judge_timeline(path)
        case "recipe":
            return _judge_recipe(path)
        case "model":
            return _judge_model(path)
        case "profile":
            return _judge_profile(path)
        case "run":
            return _judge_estimate(path)
        case "token cache":
            return _judge_cache(path)
        case "checkpoint":
            return _judge_checkpoint(path)
        case "run folder":
            return _judge_run(path)
    assert_never(kind)


def _names_schedule(path: Path) -> bool:
    from packhorse.schedule.finding import names_function

    return path.suffix == ".csv" or names_function(str(path))


def _judge_schedule(path: Path, ranks: int | None, microbatches: int | None) -> Verdict:
    from packhorse.cli.schedule_reading import ScheduleRequest, take_schedule
    from packhorse.schedule.proof import RULES

    request = ScheduleRequest(name=str(path), num_ranks=ranks, num_microbatches=microbatches)
    schedule, _ = take_schedule(request)
    return Verdict(
        what=f"a schedule of {schedule.num_tasks} tasks: {schedule.num_ranks} ranks,"
        f" {schedule.num_stages} stages, {schedule.num_microbatches} microbatches",
        checked=(
            f"rules {', '.join(RULES)}",
            "no circle of waiting ranks, also where a send ends only when its receive has begun",
        ),
        facts={
            "rules": list(RULES),
            "tasks": schedule.num_tasks,
            "ranks": schedule.num_ranks,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
        },
    )


def _judge_plan(path: Path, model_path: Path | None) -> Verdict:
    from packhorse.cli.companions import read_plan_model
    from packhorse.compiler.durability import list_kinds
    from packhorse.compiler.lower import lower_plan
    from packhorse.plan.files import read_plan
    from packhorse.plan.identity import check_plan
    from packhorse.verifier.rules import verify_program

    plan = read_plan(path)
    model = read_plan_model(path, model_path)
    check_plan(plan, model)
    kinds = list_kinds(plan, trains=bool(model.num_trainable))
    tasks: dict[str, int] = {}
    for kind in kinds:
        program = lower_plan(plan, model, kind)
        verify_program(program, model)
        tasks[kind] = len(program.tasks)
    return Verdict(
        what=f"a plan of {plan.model_name} for {plan.machine}: {len(plan.blocks)} blocks,"
        f" {len(plan.chunks)} chunks",
        checked=(
            "format",
            "belongs to its model",
            *(f"{kind} program of {count} tasks: every rule" for kind, count in tasks.items()),
        ),
        facts={"tasks": tasks, "rules": list(_rule_names())},
    )


def _judge_rank_plans(path: Path, model_path: Path | None) -> Verdict:
    from packhorse.cli.companions import read_plan_model
    from packhorse.compiler.ranks import cut_stages, lower_ranks
    from packhorse.plan.identity import check_plan
    from packhorse.plan.rank_files import read_rank_plans
    from packhorse.verifier.joint import verify_ranks

    plans = read_rank_plans(path)
    parts = cut_stages(plans.pipeline, read_plan_model(path, model_path))
    for plan, part in zip(plans.ranks, parts, strict=True):
        check_plan(plan, part)
    tasks: dict[str, int] = {}
    for kind, programs in lower_ranks(plans.ranks, parts).items():
        verify_ranks(programs, parts)
        tasks[kind] = sum(len(program.tasks) for program in programs)
    schedule = plans.pipeline.schedule
    return Verdict(
        what=f"plans of {plans.ranks[0].model_name} for {len(plans.ranks)} ranks:"
        f" {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches",
        checked=(
            "format",
            "each rank's plan belongs to its part of the model",
            *(f"{kind} programs of {n} tasks: every rule, together" for kind, n in tasks.items()),
        ),
        facts={"ranks": len(plans.ranks), "tasks": tasks, "rules": list(_rule_names())},
    )


def _judge_program(path: Path, model_path: Path | None) -> Verdict:
    from packhorse.cli.kinds import read_text
    from packhorse.model.files import read_model
    from packhorse.program.text import parse_program
    from packhorse.verifier.rules import verify_program

    try:
        program = parse_program(read_text(path))
    except FileFormatError as error:
        # The parser knows lines, not files.
        raise FileFormatError(error.what, where=f"{path}: {error.where}", fix=error.fix) from error
    model: Model | None = None
    beside = path.with_name("model.json")
    if model_path is not None:
        model = read_model(model_path)
    elif beside.is_file() and (found := read_model(beside)).fingerprint == program.model:
        model = found
    proof = verify_program(program, model)
    against = f"against {model.name}" if model else "without its model: what needs one is unchecked"
    return Verdict(
        what=f"a {program.kind} program of {len(program.tasks)} tasks",
        checked=("format", f"rules {', '.join(_rule_names())} ({against})"),
        warnings=() if model else ("name its model for all rules: --model FILE",),
        facts={
            "digest": proof.digest,
            "tasks": len(program.tasks),
            "rules": list(_rule_names()),
            "with_model": model is not None,
            "peak_bytes": dict(proof.peak_bytes),
        },
    )


def _rule_names() -> tuple[str, ...]:
    from packhorse.verifier.rules import RULES

    return tuple(dict.fromkeys(rule.name for rule in RULES))


def _judge_machine(path: Path) -> Verdict:
    from packhorse.machine.files import read_machine
    from packhorse.units import format_bytes

    machine = read_machine(path)
    tiers = ", ".join(f"{tier.name} {format_bytes(tier.budget_bytes)}" for tier in machine.tiers)
    return Verdict(
        what=f"the machine {machine.name} ({machine.source}): {tiers}",
        checked=("format", "tiers, links and rates fit together"),
    )


def _judge_cluster(path: Path) -> Verdict:
    from packhorse.machine.cluster_files import read_cluster
    from packhorse.units import format_bytes

    cluster = read_cluster(path)
    num_hosts = len(set(cluster.hosts))
    num_pairs = cluster.num_ranks * (cluster.num_ranks - 1)
    device_bytes = sum(
        tier.budget_bytes
        for machine in cluster.ranks
        for tier in machine.tiers
        if tier.name == "device"
    )
    missing = num_pairs - len(cluster.links)
    return Verdict(
        what=f"the cluster {cluster.name}: {cluster.num_ranks} ranks on {num_hosts}"
        f" host{'' if num_hosts == 1 else 's'}, device {format_bytes(device_bytes)} in all",
        checked=(
            "format",
            "each machine's tiers, links and rates fit together",
            f"{len(cluster.links)} links between ranks",
        ),
        warnings=(
            (f"{missing} of the {num_pairs} ways from rank to rank have no link",)
            if missing
            else ()
        ),
        facts={"ranks": cluster.num_ranks, "hosts": num_hosts, "links": len(cluster.links)},
    )


def _judge_timeline(path: Path) -> Verdict:
    from packhorse.timeline.files import read_timeline
    from packhorse.units import format_ns

    timeline = read_timeline(path)
    _check_spans(timeline, path)
    return Verdict(
        what=f"a {timeline.source} timeline of {len(timeline.spans)} tasks,"
        f" {format_ns(timeline.step_ns)}",
        checked=("format", "tasks of a lane follow one another", "memory follows time"),
    )


def _check_spans(timeline: Timeline, path: Path) -> None:
    free_at_ns: dict[str, int] = {}
    for at, span in enumerate(timeline.spans):
        place = f"{path}: spans[{at}], {span.name}"
        if not 0 <= span.start_ns <= span.end_ns:
            raise FileFormatError(
                f"a span lasts from {span.start_ns} to {span.end_ns} ns",
                where=place,
                fix="write the timeline anew",
            )
        if span.start_ns < free_at_ns.get(span.lane, 0):
            raise FileFormatError(
                f"the lane {span.lane} is busy until {free_at_ns[span.lane]} ns, and a span starts"
                f" at {span.start_ns} ns",
                where=place,
                fix="write the timeline anew",
            )
        free_at_ns[span.lane] = span.end_ns
    for pool, points in timeline.memory.items():
        before_ns = 0
        for at, point in enumerate(points):
            if point.at_ns < before_ns or point.used_bytes < 0:
                raise FileFormatError(
                    f"{point.used_bytes} bytes at {point.at_ns} ns, after {before_ns} ns",
                    where=f"{path}: memory.{pool}[{at}]",
                    fix="write the timeline anew",
                )
            before_ns = point.at_ns


def _judge_recipe(path: Path) -> Verdict:
    from packhorse.data.sources import find_sources
    from packhorse.trainer.batch_cut import cut_batch
    from packhorse.trainer.model_paths import check_model_path, names_a_path
    from packhorse.trainer.recipe_files import load_recipe
    from packhorse.units import format_bytes

    loaded = load_recipe(path)
    recipe = loaded.recipe
    cut = cut_batch(recipe)
    check_model_path(recipe.model_name_or_path)
    local = names_a_path(recipe.model_name_or_path)
    sources = find_sources((*recipe.train_data, *recipe.eval_data))
    size_bytes = sum(source.size_bytes for source in sources)
    return Verdict(
        what=f"a recipe: {recipe.model_name_or_path}, {cut.global_rows} rows of up to"
        f" {recipe.max_length} tokens a step -> {recipe.output_dir}",
        checked=(
            "keys and values",
            "batch arithmetic",
            "the model is there" if local else "the model is on the Hub: not looked for",
            f"{len(sources)} data files are there ({format_bytes(size_bytes)})",
        ),
        warnings=loaded.warnings,
    )


def _judge_model(path: Path) -> Verdict:
    from packhorse.model.files import read_model
    from packhorse.units import format_count

    model = read_model(path)
    return Verdict(
        what=f"the model {model.name}: {format_count(model.num_parameters)} parameters,"
        f" {len(model.blocks)} blocks, traced for {model.rows} x {model.length} tokens",
        checked=("format", "every block, value and parameter that is named exists"),
    )


def _judge_profile(path: Path) -> Verdict:
    from packhorse.profile.files import read_profile

    profile = read_profile(path)
    return Verdict(
        what=f"a profile ({profile.source}) of {len(profile.bodies)} distinct blocks at"
        f" {profile.rows} x {profile.length} tokens",
        checked=("format",),
    )


def _judge_estimate(path: Path) -> Verdict:
    from packhorse.report.run_files import read_run
    from packhorse.units import format_ns

    run = read_run(path)
    return Verdict(
        what=f"the estimate of a run of {run.num_steps} steps, {format_ns(run.total_ns)}",
        checked=("format",),
    )


def _judge_cache(path: Path) -> Verdict:
    from packhorse.data.cache import open_cache
    from packhorse.units import format_count

    cache = open_cache(path if path.is_dir() else path.parent)
    return Verdict(
        what=f"a token cache of {format_count(cache.num_rows)} rows,"
        f" {format_count(cache.summary.num_tokens)} tokens",
        checked=("every file has the size and digest that the manifest gives",),
    )


def _judge_checkpoint(path: Path) -> Verdict:
    from packhorse.checkpoint.folders import verify_checkpoint
    from packhorse.units import format_bytes

    manifest = verify_checkpoint(path, resumable=False)
    size_bytes = sum(entry.size_bytes for entry in manifest.files)
    kind = "the model alone" if manifest.model_only else "a run can resume from it"
    return Verdict(
        what=f"a checkpoint after step {manifest.run.step}, {kind}",
        checked=(f"all {len(manifest.files)} files are whole ({format_bytes(size_bytes)})",),
        facts={"step": manifest.run.step, "resumable": not manifest.model_only},
    )


def _judge_run(path: Path) -> Verdict:
    from packhorse.checkpoint.folders import find_checkpoints, find_leftovers
    from packhorse.cli.kinds import detect_kind

    checked: list[str] = []
    warnings: list[str] = []
    present = [path / name for name in _RUN_FILES if (path / name).is_file()]
    of_ranks = sorted(path.glob("timeline-*-rank-*.json"))
    for file in (*present, *of_ranks, *find_checkpoints(path)):
        verdict = judge_file(file, detect_kind(file), None)
        checked.append(f"{file.name}: {verdict.what}")
        warnings += verdict.warnings
    leftovers = find_leftovers(path)
    if leftovers:
        warnings.append(f"{len(leftovers)} unfinished saves lie here: `packhorse clean {path}`")
    return Verdict(what="a run folder", checked=tuple(checked), warnings=tuple(warnings))
