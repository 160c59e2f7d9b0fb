"""`packhorse data`: what do my rows become? Counts, and rows with their labels marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.options import AsJson, RecipePath, Settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from packhorse.data.display import ShownToken
    from packhorse.data.preparation import PreparedData
    from packhorse.trainer.run_data import RunData


def show_data(
    recipe: RecipePath,
    settings: Settings = None,
    show: Annotated[
        int, typer.Option(min=0, metavar="N", help="Show N rows, what is learnt marked.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Tokenise the data and count what became of it."""
    from packhorse.cli.screen import Screen
    from packhorse.data.display import mark_labels, show_row
    from packhorse.trainer.batch_cut import cut_batch
    from packhorse.trainer.model_sources import find_model
    from packhorse.trainer.modules import build_module, find_vocabulary
    from packhorse.trainer.recipe_files import load_recipe
    from packhorse.trainer.run_data import prepare_run_data

    screen = Screen(as_json=as_json)
    loaded = load_recipe(recipe, settings or ())
    for warning in loaded.warnings:
        screen.warn(warning)
    source = find_model(loaded.recipe.model_name_or_path)
    with screen.progress("data") as progress:
        progress("loading libraries", 0, None)
        data = prepare_run_data(
            loaded.recipe,
            source,
            vocab_size=find_vocabulary(build_module(source)),
            global_rows=cut_batch(loaded.recipe).global_rows,
            progress=progress,
        )
    screen.show(_counts_table(data))
    cache = data.prepared[0].cache
    coloured = screen.out.is_terminal and not screen.out.no_color
    rows = [show_row(cache, index, data.tokenizer) for index in range(min(show, cache.num_rows))]
    for index, row in enumerate(rows):
        screen.show(*_render_row(index, str(cache.row(index).origin), row, coloured=coloured))
    if rows:
        marked = "is green" if coloured else "stands between [[ and ]]"
        screen.show("", f"What {marked} is learnt.")
    screen.answer(
        {
            "steps": data.num_steps,
            "steps_per_epoch": data.steps_per_epoch,
            "row_length": data.row_length,
            "sets": [{"name": name, **_counts_of(prepared)} for name, prepared in _name_sets(data)],
            "rows": [mark_labels(row) for row in rows],
        }
    )


def _name_sets(data: RunData) -> list[tuple[str, PreparedData]]:
    return list(zip(("training", "evaluation"), data.prepared, strict=False))


def _counts_of(prepared: PreparedData) -> dict[str, object]:
    summary = prepared.summary
    return {
        "cache": str(prepared.cache.folder),
        "made_because": prepared.because,
        "formats": {str(path): row_format for path, row_format in summary.formats},
        "read": summary.num_read,
        "rows": summary.num_rows,
        "documents": summary.num_documents,
        "tokens": summary.num_tokens,
        "label_tokens": summary.num_label_tokens,
        "longest_row": summary.longest_row,
        "truncated": summary.num_truncated,
        "dropped": summary.num_dropped,
        "without_labels": summary.num_without_labels,
        "empty": summary.num_empty,
    }


def _counts_table(data: RunData) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from packhorse.report.tables import plain_table

    table = plain_table()
    table.add_column("", no_wrap=True)
    sets = _name_sets(data)
    for name, _ in sets:
        table.add_column(name, justify="right", no_wrap=True)

    def add(head: str, *values: str) -> None:
        table.add_row(Text(head, style="bold"), *values)

    summaries = [prepared.summary for _, prepared in sets]
    add("format", *(", ".join(dict.fromkeys(f for _, f in s.formats)) for s in summaries))
    add("read", *(f"{s.num_read:,}" for s in summaries))
    add("rows", *(f"{s.num_rows:,}" for s in summaries))
    add("tokens", *(f"{s.num_tokens:,}" for s in summaries))
    add("learnt", *(f"{s.num_label_tokens:,}" for s in summaries))
    add("longest row", *(f"{s.longest_row:,}" for s in summaries))
    add("truncated", *(f"{s.num_truncated:,}" for s in summaries))
    add("dropped, nothing to learn left", *(f"{s.num_dropped:,}" for s in summaries))
    add("without labels", *(f"{s.num_without_labels:,}" for s in summaries))
    add("empty", *(f"{s.num_empty:,}" for s in summaries))
    add("cache", *("made now" if p.because else "found" for _, p in sets))
    steps = (
        f"{data.num_steps:,} steps of {data.train.global_batch_size} rows x {data.row_length}"
        f" tokens, {data.steps_per_epoch:,} in an epoch"
    )
    return Group(table, Text(), Text(steps))


def _render_row(
    index: int, origin: str, row: tuple[ShownToken, ...], *, coloured: bool
) -> list[RenderableType]:
    """Render a row; in colour what is learnt stands out, without colours marks show it."""
    from rich.text import Text

    from packhorse.data.display import mark_labels

    num_learnt = sum(len(token.token_ids) for token in row if token.has_label)
    num_tokens = sum(len(token.token_ids) for token in row)
    head = Text(
        f"\nrow {index}, from {origin}: {num_tokens} tokens, {num_learnt} learnt", style="bold"
    )
    if not coloured:
        return [head, Text(mark_labels(row))]
    text = Text()
    for token in row:
        text.append(token.text, style="green" if token.has_label else "dim")
    return [head, text]
