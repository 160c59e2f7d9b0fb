"""`packhorse doctor`: what is installed, what limits apply here, and what to do about them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Final

import typer

from packhorse.cli.options import AsJson

# Long enough for clocks that tick a hundred times a second.
_LOOK_S: Final = 0.5
_STYLES: Final[Mapping[str, str]] = {
    "ok": "green",
    "note": "cyan",
    "warning": "yellow",
    "error": "bold red",
}


def report_health(
    scratch: Annotated[
        str, typer.Option(metavar="FOLDER", help="The scratch folder to look at.")
    ] = "scratch",
    as_json: AsJson = False,
) -> None:
    """Show versions and limits, and what to do about them."""
    from rich.text import Text

    from packhorse.cli.screen import Screen
    from packhorse.machine.contention import read_core_clocks
    from packhorse.machine.doctor import examine_machine
    from packhorse.report.tables import plain_table

    screen = Screen(as_json=as_json)
    before = read_core_clocks()
    time.sleep(_LOOK_S)
    findings = examine_machine(scratch, looks=(before, read_core_clocks()))
    table = plain_table(heads=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for finding in findings:
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.what))
        if finding.fix:
            table.add_row("", Text(f"-> {finding.fix}", style="dim"))
    screen.show(table)
    counts = {level: sum(f.level == level for f in findings) for level in ("error", "warning")}
    screen.show(Text(f"{_count(counts['error'], 'error')}, {_count(counts['warning'], 'warning')}"))
    screen.answer(
        {
            "findings": [
                {"level": each.level, "what": each.what, "fix": each.fix} for each in findings
            ],
            "errors": counts["error"],
            "warnings": counts["warning"],
        }
    )


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
