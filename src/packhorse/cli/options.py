"""Options that several commands share: one name, one meaning, one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="FILE|NAME",
        help="A machine file, or a known machine such as rtx-4090. Absent: this machine, probed.",
    ),
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIER=SIZE,...",
        help="What each tier may use: device=22GiB,host=48GiB,disk=600GiB; disk may be repeated:"
        " disk=/a/scratch:1TiB,disk=/b/scratch:1TiB.",
    ),
]
MemoryText = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Short for --budget device=SIZE; without a GPU only."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the recipe; may be given repeatedly."
    ),
]
RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="FILE", help="The model.json of the plan. Absent: the one beside it."
    ),
]
NumRanks = Annotated[
    int | None, typer.Option("--ranks", min=1, metavar="R", help="How many ranks compute.")
]
NumMicrobatches = Annotated[
    int | None,
    typer.Option("--microbatches", min=1, metavar="M", help="How many microbatches a step has."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
