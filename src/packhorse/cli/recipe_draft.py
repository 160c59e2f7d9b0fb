"""The text of a recipe that `packhorse init` writes: few keys, each with a comment.

In: what was found out about model and data. Out: YAML text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_COLUMN: Final = 44
_ENOUGH_ROWS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What is known of a recipe before a person has read it.

    `num_sampled` is None for running text, which becomes many rows whatever its files are.
    """

    model: str
    data: tuple[str, ...]
    output_dir: str
    formats: tuple[str, ...]
    max_length: int
    because: str
    num_sampled: int | None
    random_weights: bool


def draft_recipe(draft: Draft) -> str:
    """Write the text of a recipe."""
    data_format = draft.formats[0] if len(draft.formats) == 1 else "auto"
    is_chat = bool(set(draft.formats) - {"text", "tokens"})
    begins = "random weights: only a config" if draft.random_weights else "where training starts"
    lines = [
        "# What to train, on what. `packhorse schema` has all keys; what is absent has a default.",
        "#",
        "#   packhorse data  RECIPE    what the rows become",
        "#   packhorse plan  RECIPE    does it fit, how long does it take",
        "#   packhorse train RECIPE",
        "kind: packhorse/recipe",
        "version: 1",
        "",
        _line("model_name_or_path", _scalar(draft.model), begins),
        _line("train_data", _list(draft.data), "files, folders, globs"),
        _eval_line(draft.num_sampled),
        _line("data_format", data_format, "auto recognises it by its fields, file by file"),
        _line("max_length", str(draft.max_length), draft.because),
    ]
    if is_chat:
        lines.append(_line("assistant_only_loss", "true", "learn only what the assistant says"))
    lines += [
        "",
        _line("global_batch_size", "32", "rows in a step; the plan cuts it"),
        _line("num_train_epochs", "1", "or max_steps"),
        _line("learning_rate", "1.0e-5", "1e-5 to 5e-5 for all weights of a trained model"),
        _line("lr_scheduler_type", "cosine", "constant | linear | cosine"),
        _line("warmup_steps", "0.03", "below 1: a share of all steps"),
        _line("weight_decay", "0.0", "biases and norms never decay"),
        _line("max_grad_norm", "1.0", "null: no clipping, which saves memory"),
        _line("bf16", "auto", "where the device has units for it"),
        _line("freeze", "[]", "patterns of parameters that stay as they are"),
        _line("seed", "42", "of row order and dropout"),
        "",
        _line("output_dir", _scalar(draft.output_dir), "the run folder; the model ends there"),
        _line("save_steps", "200", "steps between checkpoints"),
        _line("save_total_limit", "2", "checkpoints that are kept"),
        _line("eval_steps", "200", "steps between evaluations"),
        "",
        "# How much of each tier may be used. Absent: what is free, less a margin.",
        "# budget: {device: 8GiB, disk: [{path: scratch, size: 100GiB}]}",
        "",
        "# Choices that you fix yourself; `packhorse explain` shows them all with reasons.",
        "# plan: {recompute: all}",
        "",
    ]
    return "\n".join(lines)


def _eval_line(num_rows: int | None) -> str:
    if num_rows is not None and num_rows < _ENOUGH_ROWS:
        # A share of so few rows would be none, or too few to tell anything.
        return _line("# eval_split", "0.1", f"only {num_rows} rows: better a file, eval_data")
    return _line("eval_split", "0.01", "held out for evaluation; or eval_data")


def _line(key: str, value: str, comment: str) -> str:
    return f"{key}: {value}".ljust(_COLUMN) + f"  # {comment}"


def _scalar(text: str) -> str:
    import yaml

    return yaml.safe_dump(text, width=10_000).removesuffix("\n...\n").strip()


def _list(texts: tuple[str, ...]) -> str:
    import yaml

    return yaml.safe_dump(list(texts), default_flow_style=True, width=10_000).strip()
