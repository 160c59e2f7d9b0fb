"""Traced models of the zoo, traced once for all tests of a process, and pairwise products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, product

from bench.planned import Subject, trace_subject
from bench.zoo import (
    ZOO,
    OptimizerName,
    Training,
    batch_of,
    build_model,
    make_optimizer_words,
    make_steps,
)
from packhorse.graph.export import Exported, export_module


@cache
def _exported(name: str, frozen: bool, rows: int) -> Exported:
    entry = ZOO[name]
    batch = batch_of(make_steps(entry, num_steps=1, num_microbatches=1, rows=rows))
    return export_module(build_model(entry, "frozen" if frozen else "all"), batch)


@cache
def find_subject(
    name: str,
    training: Training = "all",
    optimizer: OptimizerName = "adamw",
    *,
    rows: int = 2,
    chunk_tokens: int | None = None,
) -> Subject:
    """A traced model of the zoo."""
    entry = ZOO[name]
    return trace_subject(
        build_model(entry, training),
        batch_of(make_steps(entry, num_steps=1, num_microbatches=1, rows=rows)),
        make_optimizer_words(optimizer, entry, training),
        exported=_exported(name, training == "frozen", rows),
        chunk_tokens=chunk_tokens,
    )


def choose_pairwise(factors: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """A few rows of the product that contain every pair of values of every two factors.

    Greedy: each row is the one of the whole product that covers the most pairs still open.
    """
    rows = list(product(*factors))
    places = list(combinations(range(len(factors)), 2))
    pairs_of = [{(i, row[i], j, row[j]) for i, j in places} for row in rows]
    still_open = set().union(*pairs_of)
    chosen: list[tuple[str, ...]] = []
    while still_open:
        best = max(range(len(rows)), key=lambda index: len(pairs_of[index] & still_open))
        chosen.append(rows[best])
        still_open -= pairs_of[best]
    return sorted(chosen)
