"""Global batches of one static shape. In: a cache, an order. Out: tensors for step s, at once.

B rows of T tokens in every batch: T is `max_length`, or the longest row rounded up to a multiple of
8 where that is shorter. Rows are padded on the right, which needs no mask under causal attention:
nothing before the padding sees it, and its labels are -100. The last batch of an epoch is filled up
with rows that are all padding.

With packing, `position_ids` restart at every document (and once more where the padding begins), and
`document_ids` number the documents of a row from 1; 0 is padding. Attention must stay within a
document. transformers reads this off restarting `position_ids` itself, but only if it gets no
attention mask and keeps no key-value cache (`use_cache=False`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np
import torch

from packhorse.data.cache import TokenCache
from packhorse.data.order import RowOrder
from packhorse.data.values import IGNORED_LABEL
from packhorse.errors import DataError

_LENGTH_MULTIPLE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch.

    `inputs`: `input_ids` and `labels`, and with packing `position_ids` and `document_ids`; int64,
    (B, T). `num_items` counts labels as a causal loss does after its shift, in `labels[:, 1:]`
    those that are not -100. `num_rows` and `num_tokens` leave padding out.
    """

    inputs: Mapping[str, torch.Tensor]
    num_items: int
    num_rows: int
    num_tokens: int


class Batches:
    """The batches of a run, each a pure function of its step."""

    def __init__(
        self,
        cache: TokenCache,
        order: RowOrder,
        *,
        global_batch_size: int,
        row_length: int | None = None,
    ) -> None:
        """Bind a cache to an order.

        Args:
            row_length: T; None takes `find_row_length` of the cache.

        Raises:
            DataError: the batch has no row, or rows are longer than `row_length`.
        """
        if global_batch_size < 1:
            raise DataError(f"global_batch_size is {global_batch_size}; it must be at least 1")
        longest = cache.summary.longest_row
        if row_length is not None and row_length < longest:
            raise DataError(f"rows of {row_length} tokens cannot hold the longest one, {longest}")
        self.cache = cache
        self.order = order
        self.global_batch_size = global_batch_size
        self.row_length = find_row_length(cache) if row_length is None else row_length

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the last one may hold rows of padding."""
        return ceil(self.order.num_rows / self.global_batch_size)

    def batch(self, step: int) -> Batch:
        """Build the batch of a step, counted from 0 over all epochs."""
        if step < 0:
            raise IndexError(f"there is no step {step}")
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.global_batch_size
        num_rows = min(self.global_batch_size, self.order.num_rows - first)
        shape = (self.global_batch_size, self.row_length)
        packing = self.cache.manifest.packing
        input_ids = np.full(shape, self.cache.manifest.pad_id, np.int64)
        labels = np.full(shape, IGNORED_LABEL, np.int64)
        position_ids = np.tile(np.arange(self.row_length, dtype=np.int64), (shape[0], 1))
        document_ids = np.zeros(shape, np.int64)
        num_tokens = 0
        for index in range(num_rows):
            row = self.cache.row(self.order.row(epoch=epoch, position=first + index))
            length = len(row.tokens)
            num_tokens += length
            input_ids[index, :length] = row.tokens
            labels[index, :length] = np.where(row.labelled, row.tokens, IGNORED_LABEL)
            if packing:
                for start in row.document_starts:
                    document_ids[index, start:length] += 1
                for start in (*row.document_starts, length):
                    position_ids[index, start:] = np.arange(self.row_length - start)
        self.cache.release()
        arrays = {"input_ids": input_ids, "labels": labels}
        if packing:
            arrays |= {"position_ids": position_ids, "document_ids": document_ids}
        return Batch(
            # torch.tensor copies: the tensors own ordinary storage.
            inputs={name: torch.tensor(array) for name, array in arrays.items()},
            num_items=int(np.count_nonzero(labels[:, 1:] != IGNORED_LABEL)),
            num_rows=num_rows,
            num_tokens=num_tokens,
        )


def find_row_length(cache: TokenCache) -> int:
    """Find the T that holds all rows of a cache without paying for an unused `max_length`."""
    rounded = ceil(cache.summary.longest_row / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    return min(rounded, cache.manifest.max_length)


def count_steps(
    steps_per_epoch: int, *, num_train_epochs: float, max_steps: int | None = None
) -> int:
    """Count the optimizer steps of a run; `max_steps`, where given, decides alone.

    Raises:
        DataError: there is no step to take.
    """
    if max_steps is not None:
        if max_steps < 1:
            raise DataError(f"max_steps is {max_steps}; it must be at least 1")
        return max_steps
    if not 0 < num_train_epochs < float("inf"):
        raise DataError(f"num_train_epochs is {num_train_epochs}; it must be above 0")
    return ceil(num_train_epochs * steps_per_epoch)
