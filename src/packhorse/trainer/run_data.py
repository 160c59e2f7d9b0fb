"""The data of a run: caches, orders and batches of one shape.

In: a recipe, the model's tokenizer and vocabulary. Out: a `RunData` whose training and evaluation
batches have the same rows and length, so that both run the plan that was made. The training data
alone sets the length: rows to evaluate on are cut to it, and no evaluation changes the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from packhorse.data.batches import Batch, Batches, count_steps, find_row_length
from packhorse.data.cache import TokenCache
from packhorse.data.order import FileOrder, HeldOutOrder, ShuffledOrder, split_rows
from packhorse.data.preparation import PreparedData, prepare_data
from packhorse.data.tokenizer import Tokenizer, load_tokenizer
from packhorse.errors import DataError
from packhorse.machine.probe_cache import default_cache_folder
from packhorse.trainer.model_sources import ModelSource, find_on_hub
from packhorse.trainer.recipe import Recipe

# Called with what is prepared, bytes read, and bytes in all where known.
Progress = Callable[[str, int, int | None], None]

# document_ids are for people and for other attention code; transformers reads restarting positions.
_NOT_FED: Final = ("document_ids",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Batches of a run; `prepared` says how each cache came about, training first."""

    train: Batches
    evaluation: Batches | None
    prepared: tuple[PreparedData, ...]
    tokenizer: Tokenizer | None
    num_steps: int

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.train.row_length

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.train.steps_per_epoch

    @property
    def digest(self) -> str:
        """Hash of everything that training batches depend on, besides seed and batch size."""
        return self.train.cache.manifest.digest


def prepare_run_data(
    recipe: Recipe,
    source: ModelSource,
    *,
    vocab_size: int,
    global_rows: int,
    progress: Progress | None = None,
) -> RunData:
    """Prepare the caches of a recipe and bind batches to them.

    Raises:
        DataError: data is missing or wrong, or there is nothing to learn from.
        StorageError: a cache cannot be written.
    """
    tokenizer = find_tokenizer(recipe, source)

    def prepare(files: tuple[str, ...], what: str, max_length: int) -> PreparedData:
        def tell(done: int, total: int | None) -> None:
            if progress is not None:
                progress(what, done, total)

        return prepare_data(
            files=files,
            tokenizer=tokenizer,
            cache_folder=data_cache_folder(recipe),
            vocab_size=vocab_size,
            max_length=max_length,
            data_format=recipe.data_format,
            packing=recipe.packing,
            assistant_only_loss=recipe.assistant_only_loss,
            progress=tell,
        )

    training = prepare(recipe.train_data, "training data", recipe.max_length)
    length = find_row_length(training.cache)
    prepared = (training,)
    held_out: tuple[TokenCache, FileOrder | HeldOutOrder] | None = None
    if recipe.eval_data:
        evaluation = prepare(recipe.eval_data, "evaluation data", length)
        prepared = (training, evaluation)
        held_out = (evaluation.cache, FileOrder(num_rows=evaluation.cache.num_rows))
        order = ShuffledOrder(num_cache_rows=training.cache.num_rows, seed=recipe.seed)
    elif recipe.eval_split is not None:
        order, rows = split_rows(training.cache.num_rows, share=recipe.eval_split, seed=recipe.seed)
        held_out = (training.cache, rows)
    else:
        order = ShuffledOrder(num_cache_rows=training.cache.num_rows, seed=recipe.seed)
    train = Batches(training.cache, order, global_batch_size=global_rows, row_length=length)
    num_steps = count_steps(
        train.steps_per_epoch,
        num_train_epochs=recipe.num_train_epochs,
        max_steps=recipe.max_steps,
    )
    return RunData(
        train=train,
        evaluation=None
        if held_out is None
        else Batches(*held_out, global_batch_size=global_rows, row_length=length),
        prepared=prepared,
        tokenizer=tokenizer,
        num_steps=num_steps,
    )


def data_cache_folder(recipe: Recipe) -> Path:
    """Name the folder of a recipe's token caches."""
    return default_cache_folder() / "data" if recipe.data_cache is None else Path(recipe.data_cache)


def find_tokenizer(recipe: Recipe, source: ModelSource) -> Tokenizer | None:
    """Load a recipe's tokenizer; None where rows are tokens already and the model has none.

    Raises:
        DataError: the folder holds no tokenizer that loads.
    """
    name = recipe.tokenizer_name_or_path
    if name is None:
        folder = source.folder
    else:
        folder = Path(name) if Path(name).is_dir() else find_on_hub(name)
    try:
        return load_tokenizer(folder)
    except DataError as error:
        if recipe.data_format == "tokens" and name is None:
            return None
        raise DataError(
            error.what,
            where=error.where,
            fix="give tokenizer_name_or_path, the folder of the model's tokenizer",
        ) from error


def model_inputs(batch: Batch) -> Mapping[str, Tensor]:
    """Give what the model's forward takes of a batch."""
    return {name: tensor for name, tensor in batch.inputs.items() if name not in _NOT_FED}


def make_example(data: RunData) -> Mapping[str, Tensor]:
    """Make a batch of the run's shape, all zeros, to trace with."""
    names = ("input_ids", "labels", "position_ids")[: 3 if data.train.cache.manifest.packing else 2]
    shape = (data.train.global_batch_size, data.row_length)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in names}
