"""`packhorse probe`: how fast are this machine's memory, disk and arithmetic?"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from packhorse.cli.options import AsJson, BudgetText, MemoryText

if TYPE_CHECKING:
    from rich.console import RenderableType

    from packhorse.machine.spec import Machine

_DEFAULT_OUT: Final = Path("machine.json")


def probe(
    budget: BudgetText = None,
    memory: MemoryText = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure although the cache knows this machine.")
    ] = False,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="Write until the drive's rate is steady: minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The machine file.")] = _DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """Measure this machine and write machine.json."""
    from packhorse.cli.machines import merge_budgets, probe_here
    from packhorse.cli.outputs import check_output, write_output
    from packhorse.cli.screen import Screen
    from packhorse.machine.budget import parse_budget, parse_memory, with_budget
    from packhorse.machine.files import format_machine
    from packhorse.machine.probe_cache import age_ns

    screen = Screen(as_json=as_json)
    check_output(out)
    granted = parse_budget(budget)
    machine = probe_here(screen, granted, fresh=fresh, sustained=sustained)
    if memory is not None:
        merged = merge_budgets(parse_memory(memory, machine), granted)
        machine = with_budget(machine, merged)
    write_output(out, format_machine(machine))
    screen.show(machine_table(machine))
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
    from packhorse.units import format_bytes, format_count, format_ns, format_percent

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
            f"{tier.name}: {format_bytes(tier.budget_bytes)} to use of"
            f" {format_bytes(tier.total_bytes)}" + (f", folder {tier.path}" if tier.path else "")
            for tier in machine.tiers
        ],
    )
    add(
        "links",
        [
            f"{link.source} -> {link.target}: {format_bytes(link.bytes_per_s)}/s,"
            f" {format_ns(link.latency_ns)} latency"
            for link in machine.links
        ],
    )
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
    add("heap", [f"mapping large blocks costs {cost} of compute, keeping them {slack} of memory"])
    return table


def _say_age(age: int) -> str:
    from packhorse.units import format_ns

    days = age / 86_400e9
    return f"{days:.0f} days" if days >= 2 else format_ns(age)
