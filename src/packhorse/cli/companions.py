"""Files that lie beside a plan: model, machine and profile that it was made with, and its run.

In: the path of a plan.json. Out: paths and contents of its companions. `plan.json` has `model.json`
beside it, `big.json` has `big.model.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packhorse.errors import InputError
from packhorse.plan.files import PLAN_NAME

if TYPE_CHECKING:
    from packhorse.model.spec import Model

Companion = Literal["model", "machine", "profile", "run"]


def companion_path(plan: Path, companion: Companion) -> Path:
    """Name a companion of a plan."""
    if plan.name == PLAN_NAME:
        return plan.with_name(f"{companion}.json")
    return plan.with_name(f"{plan.stem}.{companion}.json")


def plan_path(path: Path) -> Path:
    """Name the plan that a path means: the file itself, or the plan.json of a run folder."""
    return path / PLAN_NAME if path.is_dir() else path


def read_plan_model(plan: Path, model: Path | None) -> Model:
    """Read the model of a plan.

    Args:
        plan: the plan's path.
        model: the model's path where a person named one.

    Raises:
        InputError: there is none beside the plan.
        FileFormatError: it cannot be read.
    """
    from packhorse.model.files import read_model

    path = model or companion_path(plan, "model")
    if model is None and not path.exists():
        raise InputError(
            f"the plan's model is needed, and there is no {path.name} beside the plan",
            where=str(path),
            fix="make the plan again with `packhorse plan RECIPE`, or name the file: --model FILE",
        )
    return read_model(path)
