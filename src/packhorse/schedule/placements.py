"""Which rank computes each stage: in a loop over the ranks, or there and back in a V.

In: numbers of ranks and stages. Out: a placement, a tuple of one rank for each stage.
"""

from __future__ import annotations

from collections.abc import Mapping


def place_looped(num_ranks: int, num_stages: int) -> Mapping[int, tuple[int, ...]]:
    """Deal the stages out in turn: with as many stages as ranks, each rank has its own."""
    return {stage: (stage % num_ranks,) for stage in range(num_stages)}


def place_vee(num_ranks: int) -> Mapping[int, tuple[int, ...]]:
    """Give each rank two stages, down the ranks and back: the first rank has both ends."""
    there = {stage: (stage,) for stage in range(num_ranks)}
    back = {2 * num_ranks - 1 - rank: (rank,) for rank in reversed(range(num_ranks))}
    return there | back
