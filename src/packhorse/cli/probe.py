"""`packhorse probe`: how fast are this machine's memory, disk and arithmetic?

Under torchrun: how fast are those of all ranks, and the links between them?
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from packhorse.cli.options import AsJson, BudgetText, MemoryText

if TYPE_CHECKING:
    from rich.console import RenderableType

    from packhorse.cli.screen import Screen, Tell
    from packhorse.machine.budget import Budget
    from packhorse.machine.probe_sustained import WriteLimits
    from packhorse.machine.spec import Link, Machine, Saving, Tier

_DEFAULT_OUT: Final = Path("machine.json")
_DEFAULT_RANKS_OUT: Final = Path("cluster.json")
# Beside writing until steady: measuring takes half a minute, and slow drives and busy cores exist.
_HOST_WAIT: Final = timedelta(minutes=10)
_LEAST_BYTES: Final = 1024**2


def probe(
    budget: BudgetText = None,
    memory: MemoryText = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure although the cache knows this machine.")
    ] = False,
    file_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Measure the disk with a file of about the plan's scratch size instead of 2GiB.",
        ),
    ] = None,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="Write until the drive's rate is steady: minutes.")
    ] = False,
    write_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="With --sustained: the most that is written.")
    ] = "64GiB",
    time_limit: Annotated[
        int, typer.Option(metavar="SECONDS", min=1, help="With --sustained: the longest it writes.")
    ] = 300,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The machine file: machine.json, under torchrun cluster.json."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine; under torchrun all ranks and links."""
    from packhorse.cli.screen import Screen
    from packhorse.cli.seats import find_seat
    from packhorse.machine.budget import parse_budget

    granted = parse_budget(budget)
    limits = _read_limits(write_limit, time_limit) if sustained else None
    file_bytes = None if file_size is None else _read_size("--file-size", file_size)
    request = _Request(
        budget=granted, memory=memory, fresh=fresh, limits=limits, file_bytes=file_bytes
    )
    screen = Screen(as_json=as_json)
    if find_seat() is not None:
        _probe_ranks(request, out or _DEFAULT_RANKS_OUT, screen)
    else:
        _probe_alone(request, out or _DEFAULT_OUT, screen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was typed."""

    budget: Budget
    memory: str | None
    fresh: bool
    limits: WriteLimits | None
    file_bytes: int | None

    def grant_memory(self, machine: Machine) -> Machine:
        """Give a measured machine what `--memory` says: whether it may depends on the device."""
        from packhorse.cli.machines import merge_budgets
        from packhorse.machine.budget import parse_memory, with_budget

        if self.memory is None:
            return machine
        return with_budget(machine, merge_budgets(parse_memory(self.memory, machine), self.budget))


def _probe_ranks(request: _Request, out: Path, screen: Screen) -> None:
    from packhorse.cli.outputs import check_output
    from packhorse.cli.probe_ranks import RanksProbe, probe_ranks, write_cluster_file
    from packhorse.cli.seated import meet_ranks
    from packhorse.machine.probe import probe_machine
    from packhorse.machine.probe_links import DEFAULT_LIMIT_NS

    def measure(threads: int, tell: Tell | None) -> Machine:
        machine = probe_machine(
            budget=request.budget,
            threads=threads,
            fresh=request.fresh,
            sustained=request.limits,
            file_bytes=request.file_bytes,
            progress=tell,
        )
        return request.grant_memory(machine)

    wait = _HOST_WAIT
    if request.limits is not None:
        wait += timedelta(seconds=request.limits.duration_ns / 1e9)
    ranks = RanksProbe(measure=measure, measure_wait=wait, pair_limit_ns=DEFAULT_LIMIT_NS)
    with meet_ranks(as_json=screen.as_json) as (meeting, ends):
        if meeting.rank == 0:
            check_output(out)
        ends.whereabouts.tell("measuring the ranks")
        cluster = probe_ranks(meeting, ranks, screen)
        if meeting.rank == 0:
            write_cluster_file(cluster, out, screen)


def _probe_alone(request: _Request, out: Path, screen: Screen) -> None:
    from packhorse.cli.machines import probe_here
    from packhorse.cli.outputs import check_output, write_output
    from packhorse.machine.files import format_machine
    from packhorse.machine.probe_cache import age_ns

    check_output(out)
    limits = request.limits
    machine = probe_here(
        screen,
        request.budget,
        fresh=request.fresh,
        sustained=limits,
        file_bytes=request.file_bytes,
    )
    machine = request.grant_memory(machine)
    write_output(out, format_machine(machine))
    screen.show(machine_table(machine))
    if limits is not None and all(link.burst_bytes_per_s is None for link in machine.links):
        screen.note(
            "the rate was not steady yet when the limit was reached: raise --write-limit or"
            " --time-limit"
        )
    screen.wrote(out)
    screen.answer(
        {
            "file": str(out),
            "age_ns": age_ns(machine),
            "machine": json.loads(format_machine(machine)),
        }
    )


def machine_table(machine: Machine) -> RenderableType:
    """Render a machine: tiers with budgets, links, rates, and how old the measurement is."""
    from packhorse.machine.probe_cache import age_ns
    from packhorse.report.tables import plain_table
    from packhorse.units import format_bytes, format_count, format_part, format_percent

    table = plain_table(heads=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)

    def add(name: str, lines: Iterable[str]) -> None:
        for at, line in enumerate(lines):
            table.add_row("" if at else name, line)

    age = age_ns(machine)
    measured = machine.source if age is None else f"measured {_say_age(age)} ago"
    threads = f"{machine.num_threads} thread{'' if machine.num_threads == 1 else 's'}"
    add("machine", [f"{machine.name}, {threads}, {measured}"])
    add(
        "tiers",
        [
            f"{tier.name}: {format_part(tier.budget_bytes, tier.total_bytes)} to use"
            + (f", folder {tier.path}" if tier.path else "")
            for tier in machine.tiers
        ],
    )
    add("drives", [line for tier in machine.tiers for line in _say_drives(tier)])
    add("links", [_say_link(link) for link in machine.links])
    best = {
        dtype: max(point.flops_per_s for point in machine.matmul if point.dtype == dtype)
        for dtype in dict.fromkeys(point.dtype for point in machine.matmul)
    }
    no_units = "" if machine.bf16_native else ", no units for it here"
    add(
        "matmul",
        [
            f"{dtype}: {rate / 1e9:,.0f} GFLOP/s at best"
            + (no_units if dtype == "bfloat16" else "")
            for dtype, rate in best.items()
        ],
    )
    add("memory", [f"{format_bytes(machine.memory_bytes_per_s)}/s"])
    add(
        "update",
        [f"{u.tier}: {format_count(u.parameters_per_s)} parameters/s" for u in machine.updates],
    )
    cost = format_percent(machine.heap.map_cost)
    slack = format_percent(machine.heap.keep_slack)
    if machine.saving is not None:
        add("saving", [_say_saving(machine.saving)])
    add("heap", [f"mapping large blocks costs {cost} of compute, keeping them {slack} of memory"])
    return table


def _say_saving(saving: Saving) -> str:
    from packhorse.units import format_bytes, format_ns

    return (
        f"files at {format_bytes(saving.write_bytes_per_s)}/s through the page cache,"
        f" {format_bytes(saving.checksum_bytes_per_s)}/s of checksums,"
        f" {format_ns(saving.sync_ns)} to bring a small change to the disk"
    )


def _say_drives(tier: Tier) -> Iterable[str]:
    """One line per scratch folder: how its bytes move, and its share where there are several."""
    from packhorse.machine.drives import share_units
    from packhorse.units import format_bytes

    units = share_units(tier.drives) if tier.drives else ()
    for drive, own in zip(tier.drives, units, strict=True):
        way = "direct" if drive.direct else "buffered"
        threads = "" if drive.num_threads == 1 else f", {drive.num_threads} threads each way"
        pages = "" if drive.huge_pages else ", small pages"
        share = f", {own}/{sum(units)} of every transfer" if len(units) > 1 else ""
        yield (
            f"{drive.path}: {way}, blocks of {format_bytes(drive.block_bytes)}{threads}{pages},"
            f" measured on {format_bytes(drive.measured_bytes)}{share}"
        )


def _say_link(link: Link) -> str:
    from packhorse.units import format_bytes, format_ns, format_percent

    parts = [f"{format_bytes(link.bytes_per_s)}/s"]
    if link.burst_bytes_per_s is not None:
        parts[0] += f" sustained ({format_bytes(link.burst_bytes_per_s)}/s at first)"
    if link.mixed_bytes_per_s is not None:
        parts.append(f"{format_bytes(link.mixed_bytes_per_s)}/s while the other way is busy")
    parts.append(f"{format_ns(link.latency_ns)} latency")
    if link.core_ns_per_byte is not None:
        share = link.core_ns_per_byte * link.bytes_per_s / 1e9
        parts.append(f"{format_percent(share)} of a core")
    return f"{link.source} -> {link.target}: {', '.join(parts)}"


def _read_limits(write_limit: str, time_limit: int) -> WriteLimits:
    from packhorse.machine.probe_sustained import WriteLimits

    size_bytes = _read_size("--write-limit", write_limit)
    return WriteLimits(size_bytes=size_bytes, duration_ns=time_limit * 10**9)


def _read_size(option: str, text: str) -> int:
    from packhorse.errors import InputError
    from packhorse.units import format_bytes, parse_bytes

    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise InputError(str(error), where=option, fix="write for example 64GiB") from error
    if size_bytes < _LEAST_BYTES:
        raise InputError(
            f"{format_bytes(size_bytes)} is too little to measure a disk with",
            where=option,
            fix=f"give at least {format_bytes(_LEAST_BYTES)}",
        )
    return size_bytes


def _say_age(age: int) -> str:
    from packhorse.units import format_ns

    days = age / 86_400e9
    return f"{days:.0f} days" if days >= 2 else format_ns(age)
