"""`packhorse init`: a commented recipe for a model and some data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, cast

import typer

from packhorse.cli.options import AsJson
from packhorse.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from packhorse.cli.samples import Sample
    from packhorse.trainer.model_sources import ModelSource

_DEFAULT_OUT: Final = Path("recipe.yaml")
_MOST_TOKENS: Final = 4096
_TEXT_TOKENS: Final = 1024
_MULTIPLE: Final = 64
_SHARE: Final = 0.95


def write_recipe(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a config.json or a Hub id.")
    ],
    data: Annotated[
        list[str], typer.Argument(metavar="DATA", help="Files, folders or globs to learn from.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The recipe.")] = _DEFAULT_OUT,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented recipe for a model and data."""
    from packhorse.cli.outputs import write_output
    from packhorse.cli.recipe_draft import Draft, draft_recipe
    from packhorse.cli.samples import take_sample
    from packhorse.cli.screen import Screen
    from packhorse.trainer.model_sources import find_model
    from packhorse.trainer.recipe_files import parse_recipe
    from packhorse.trainer.recipe_keys import DECIDED

    screen = Screen(as_json=as_json)
    if out.exists() and not force:
        raise InputError(
            "there is a file of that name already",
            where=str(out),
            fix="name another one with --out, or add --force",
        )
    source = find_model(model)
    with screen.progress("looking at the data") as progress:
        progress("first rows", 0, None)
        sample = take_sample(data, source.folder)
    limit = _read_limit(source.config)
    max_length, because = suggest_length(sample, limit)
    text = draft_recipe(
        Draft(
            model=model,
            data=tuple(data),
            output_dir=f"runs/{source.name}",
            formats=sample.formats,
            max_length=max_length,
            because=because,
            num_sampled=None if sample.flows else len(sample.lengths),
            random_weights=source.weights is None,
        )
    )
    # What is written is read back first: a recipe of ours is never refused by ourselves.
    parse_recipe(text, where=str(out))
    write_output(out, text)
    screen.show(_summarise(source, sample, max_length, because), _list_decided())
    screen.wrote(out)
    screen.answer(
        {
            "file": str(out),
            "formats": list(sample.formats),
            "max_length": max_length,
            "because": because,
            "decided_by_the_plan": dict(DECIDED),
        }
    )


def suggest_length(sample: Sample, limit: int | None) -> tuple[int, str]:
    """Suggest `max_length`, and say why.

    Args:
        limit: positions that the model has, if known.
    """
    most = min(limit or _MOST_TOKENS, _MOST_TOKENS)
    if sample.flows:
        return min(_TEXT_TOKENS, most), "running text is cut to this length"
    wanted = sample.length_of(_SHARE)
    rounded = max(_MULTIPLE, -(-wanted // _MULTIPLE) * _MULTIPLE)
    longest = sample.lengths[-1] if sample.lengths else 0
    reason = f"{_SHARE * 100:.0f} % of {len(sample.lengths)} rows have at most {wanted} tokens"
    if rounded > most:
        bound = f"the model has {limit} positions" if most == limit else "longer ones need memory"
        return most, f"{reason}, but {bound}"
    return rounded, f"{reason}, the longest has {longest}"


def _read_limit(config: Path) -> int | None:
    content: object = json.loads(config.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        return None
    keys = cast("dict[str, object]", content)  # parsed text: one value is looked at
    limit = keys.get("max_position_embeddings", keys.get("n_positions"))
    return limit if isinstance(limit, int) and limit > 1 else None


def _summarise(
    source: ModelSource, sample: Sample, max_length: int, because: str
) -> RenderableType:
    from packhorse.report.tables import plain_table
    from packhorse.units import format_bytes

    table = plain_table(heads=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("model", source.name + ("" if source.weights else ", random weights"))
    files = f"{sample.num_files} file{'' if sample.num_files == 1 else 's'}"
    size = format_bytes(sample.size_bytes)
    table.add_row("data", f"{files}, {size}, of format {', '.join(sample.formats)}")
    table.add_row("max_length", f"{max_length}: {because}")
    return table


def _list_decided() -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from packhorse.report.tables import plain_table
    from packhorse.trainer.recipe_keys import DECIDED

    pins: dict[str, list[str]] = {}
    for key, pin in DECIDED.items():
        pins.setdefault(pin, []).append(key)
    table = plain_table()
    table.add_column("the plan decides", ratio=1)
    table.add_column("to fix it yourself", ratio=1, style="dim")
    for pin, keys in pins.items():
        table.add_row(", ".join(keys), pin)
    return Group(Text(), table)
