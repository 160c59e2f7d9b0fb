"""`packhorse schema`: the JSON schema of recipes, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli.options import AsJson


def print_schema(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it here instead of to stdout.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    from packhorse.cli.outputs import write_output
    from packhorse.cli.screen import Screen
    from packhorse.trainer.recipe_files import format_schema, recipe_schema

    screen = Screen(as_json=as_json)
    if out is None:
        screen.show_text(format_schema())
        screen.answer(recipe_schema())
        return
    write_output(out, format_schema())
    screen.wrote(out)
    screen.answer({"schema": str(out)})
