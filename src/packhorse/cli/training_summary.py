"""How a run went, at its end: losses, time, peaks against the plan, where the model is.

In: what was planned and what was seen. Out: a rich table, lines to copy, or a JSON document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packhorse.machine.process_memory import largest_resident_bytes
from packhorse.units import (
    format_bytes,
    format_count,
    format_ns,
    format_part,
    format_percent,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from packhorse.cli.planning import Planned
    from packhorse.cli.training_screen import Summary

_LABEL_WIDTH: Final = 5


def render_summary(
    planned: Planned, summary: Summary, *, baseline_bytes: int | None = None
) -> RenderableType:
    """Render losses, time and peaks, predicted beside measured.

    Args:
        baseline_bytes: what the process held once its libraries were loaded, if measured.
    """
    from packhorse.report.tables import plain_table

    table = plain_table(heads=False)
    table.add_column(style="bold", no_wrap=True, min_width=_LABEL_WIDTH)
    table.add_column(ratio=1)

    def add(name: str, lines: Iterable[str]) -> None:
        for at, line in enumerate(lines):
            table.add_row("" if at else name, line)

    add("loss", _say_losses(summary))
    add("time", _say_time(planned, summary))
    add("peak", _say_peaks(planned, summary, baseline_bytes))
    return table


def say_where(folder: Path) -> str:
    """Say where the model is, how to load it, and what to look at next; each on a line."""
    lines = (
        str(folder),
        f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})",
        f"packhorse compare {folder}",
    )
    heads = ("model", "load", "next")
    return "".join(
        f"{head:<{_LABEL_WIDTH}}  {line}\n" for head, line in zip(heads, lines, strict=True)
    )


def _say_losses(summary: Summary) -> Iterable[str]:
    if summary.first_loss and summary.last_loss:
        (first, before), (last, after) = summary.first_loss, summary.last_loss
        ends = f"{before:.4f} in step {first} -> {after:.4f} in step {last}"
        if summary.tenth_losses is None:
            yield ends + ("" if first == last else " (single batches: noisy)")
        else:
            early, late = summary.tenth_losses
            yield (
                f"{early:.4f} -> {late:.4f}, means of the first and the last"
                f" {summary.num_in_tenth} steps"
            )
            yield f"single steps: {ends}"
    if summary.eval_losses:
        yield "evaluation: " + " -> ".join(
            f"{loss:.4f} after step {step}" for step, loss in _ends(summary.eval_losses)
        )


def _ends(values: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return values if len(values) < 3 else (values[0], values[-1])


def _say_time(planned: Planned, summary: Summary) -> Iterable[str]:
    if summary.result is not None:
        rate = format_count(summary.tokens_per_second)
        yield f"{format_ns(summary.result.wall_s * 1e9)} in all, {rate} tokens/s in the steps"
    step_ns = median_ns(summary)
    if step_ns is not None:
        line = f"a step: {format_ns(step_ns)}"
        if planned.plan.prediction is not None:
            promised = planned.plan.prediction.step_ns
            line += f", predicted {format_ns(promised)} ({_error(promised, step_ns)})"
        yield line


def median_ns(summary: Summary) -> int | None:
    """The median step; the first one still warms up and is left out where there are others."""
    steps = sorted(summary.step_s[1:] or summary.step_s)
    return round(steps[len(steps) // 2] * 1e9) if steps else None


def _say_peaks(planned: Planned, summary: Summary, baseline_bytes: int | None) -> Iterable[str]:
    for tier, (used, promised, budget) in _peaks(planned, summary).items():
        line = f"{tier}: {format_part(used, budget) if budget else format_bytes(used)}"
        if promised:
            line += f", predicted {format_bytes(promised)} ({_error(promised, used)})"
        yield line
    yield _say_process(planned, baseline_bytes)
    if planned.joint is not None:
        yield "these are of rank 0: `packhorse compare` shows every rank's"


def _say_process(planned: Planned, baseline_bytes: int | None) -> str:
    """What the kernel counts, and why it is more than the budget."""
    line = f"process: {format_bytes(largest_resident_bytes())} of memory at its largest"
    libraries = "" if baseline_bytes is None else f" ({format_bytes(baseline_bytes)})"
    if planned.machine.device != "cpu":
        return f"{line}, Python, torch and other libraries{libraries} included"
    return (
        f"{line}: what the device's budget counts, and Python, torch and other"
        f" libraries{libraries}, which no budget counts"
    )


def _peaks(planned: Planned, summary: Summary) -> Mapping[str, tuple[int, int, int]]:
    """Give (measured, predicted, budget) bytes by tier; base and slots count on both sides."""
    prediction = planned.plan.prediction
    found: dict[str, tuple[int, int, int]] = {}
    for tier, budget in planned.plan.budget_bytes.items():
        causes: Mapping[str, int] = {}
        if prediction is not None:
            causes = prediction.peak_bytes.get(tier, {})
        promised = sum(causes.values())
        # Slots of kept steps are there from the beginning; no ledger of a step holds them.
        used = summary.peak_bytes.get(tier, 0) + causes.get("slots", 0)
        if used:
            found[tier] = used, promised, budget
    return found


def _error(promised: int, measured: int) -> str:
    share = (promised - measured) / measured if measured else 0.0
    return f"{'+' if share >= 0.0005 else ''}{format_percent(share)}"


def summary_as_dict(planned: Planned, summary: Summary) -> dict[str, object]:
    """Give a summary as what `json.dumps` takes."""
    prediction = planned.plan.prediction
    return {
        "output_dir": str(planned.prepared.recipe.run_folder),
        "steps": summary.result.num_steps if summary.result else None,
        "first_loss": summary.first_loss[1] if summary.first_loss else None,
        "loss": summary.last_loss[1] if summary.last_loss else None,
        "tenth_losses": list(summary.tenth_losses) if summary.tenth_losses else None,
        "eval_losses": [
            {"step": step, "eval_loss": loss if math.isfinite(loss) else None}
            for step, loss in summary.eval_losses
        ],
        "wall_s": summary.result.wall_s if summary.result else None,
        "tokens_per_second": summary.tokens_per_second,
        "step_ns": median_ns(summary),
        "predicted_step_ns": prediction.step_ns if prediction else None,
        "peak_bytes": {tier: used for tier, (used, _, _) in _peaks(planned, summary).items()},
        "predicted_peak_bytes": {
            tier: promised for tier, (_, promised, _) in _peaks(planned, summary).items()
        },
        "resident_bytes": largest_resident_bytes(),
    }
