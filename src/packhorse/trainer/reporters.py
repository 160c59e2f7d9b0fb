"""Other places for metrics: TensorBoard, Weights & Biases, Trackio.

In: the names of `report_to`. Out: reporters that take each line of metrics.jsonl. Their packages
are loaded only when they are named; a missing one is refused before the first step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from packhorse.errors import InputError
from packhorse.trainer.recipe import Recipe, Reporter

Metrics = Mapping[str, float | int | None]


class MetricsReporter(Protocol):
    """Takes metrics by step."""

    def report(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step."""
        ...

    def close(self) -> None:
        """Hand over what is still held back."""
        ...


class TensorboardReporter:
    """Writes event files below the run's logs."""

    def __init__(self, recipe: Recipe) -> None:
        board = _load("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = board.SummaryWriter(str(recipe.run_folder / "logs"))  # untyped

    def report(self, step: int, metrics: Metrics) -> None:
        """See MetricsReporter."""
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See MetricsReporter."""
        self._writer.close()


class TrackingReporter:
    """Sends metrics to wandb, or to trackio, which has the same calls."""

    def __init__(self, recipe: Recipe, package: str) -> None:
        self._package: Any = _load(package, package)  # untyped
        folder: Path = recipe.run_folder
        self._package.init(
            project="packhorse", name=folder.name, config=recipe.model_dump(mode="json")
        )

    def report(self, step: int, metrics: Metrics) -> None:
        """See MetricsReporter."""
        sent = {name: value for name, value in metrics.items() if value is not None}
        self._package.log(sent, step=step)

    def close(self) -> None:
        """See MetricsReporter."""
        self._package.finish()


_MAKERS: Final[Mapping[Reporter, Callable[[Recipe], MetricsReporter]]] = {
    "tensorboard": TensorboardReporter,
    "wandb": lambda recipe: TrackingReporter(recipe, "wandb"),
    "trackio": lambda recipe: TrackingReporter(recipe, "trackio"),
}


def open_reporters(recipe: Recipe) -> tuple[MetricsReporter, ...]:
    """Open what `report_to` names.

    Raises:
        InputError: a package is not installed.
    """
    return tuple(_MAKERS[name](recipe) for name in recipe.report_to)


def _load(module: str, package: str) -> Any:  # Any: these packages are untyped
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"report_to: {package} needs a package that is not installed: pip install {package}",
            where="recipe: report_to",
        ) from error
