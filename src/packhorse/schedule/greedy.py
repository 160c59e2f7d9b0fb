"""List scheduling: each rank, when it is free, takes the most urgent task that is ready.

In: a board, how much each rank may save, and a policy. Out: each rank's order. Always ends, however
small the caps, as long as each rank may save one microbatch of all its stages.

    when a rank is free:
        among the input gradients and forwards that have arrived, of forwards only those for which
            there is room, take the most urgent by the policy
        else, where a weight gradient is left: take it, unless something urgent arrives before
            `patience` of it would be done
        else sleep until something arrives

Room for a forward means: after it, the oldest microbatch that has forwards to come on this rank can
still have all of them (the banker's rule), so ranks with several stages never block each other.
Each stage takes its microbatches first in, first out, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from packhorse.schedule.board import Board
from packhorse.schedule.numbering import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a rank prefers.

    `first` is the kind of task that goes first where both are ready. Among forwards those of later
    stages go first where `deep_first`; among gradients always the oldest microbatch. With `split`
    backwards come in halves.
    """

    split: bool = True
    first: Literal["gradients", "forwards", "oldest"] = "gradients"
    deep_first: bool = True
    patience: float = 1.0


class _Rank:
    """One rank's place in each of its stages: the next microbatch of each kind."""

    def __init__(self, rank: int, stages: Sequence[int], cap_bytes: int) -> None:
        self.rank = rank
        self.stages = tuple(stages)
        self.forwards = dict.fromkeys(stages, 0)
        self.gradients = dict.fromkeys(stages, 0)
        self.weights = dict.fromkeys(stages, 0)
        self.cap_bytes = cap_bytes
        self.saved_bytes = 0
        self.free_ns = 0
        self.order: list[int] = []


class _Listing:
    def __init__(self, board: Board, cap_bytes: Sequence[int], policy: Policy) -> None:
        self.board = board
        self.policy = policy
        self.durations_ns = board.durations_ns
        self.saved_bytes = [cost.saved_bytes for cost in board.stages]
        self.ranks = [
            _Rank(rank, board.stages_of(rank), cap_bytes[rank]) for rank in range(board.num_ranks)
        ]
        # When the value of a stage has left it, by stage and microbatch.
        self.forward_ends: list[list[int]] = [[] for _ in board.ranks]
        self.gradient_ends: list[list[int]] = [[] for _ in board.ranks]
        self.events: list[tuple[int, int, int]] = []
        self.tickets = count()

    def run(self) -> list[list[int]]:
        for rank in self.ranks:
            self._wake(0, rank.rank)
        while self.events:
            now_ns, _, number = heappop(self.events)
            rank = self.ranks[number]
            if now_ns >= rank.free_ns:
                self._decide(rank, now_ns)
        return [rank.order for rank in self.ranks]

    def _wake(self, at_ns: int, rank: int) -> None:
        heappush(self.events, (at_ns, next(self.tickets), rank))

    def _decide(self, rank: _Rank, now_ns: int) -> None:
        ready: list[tuple[tuple[int, ...], int, int]] = []
        soonest_ns: int | None = None
        for kind, stage, microbatch, arrival_ns in self._list_arrivals(rank):
            if arrival_ns <= now_ns:
                ready.append((self._urgency(kind, stage, microbatch), kind, stage))
            elif soonest_ns is None or arrival_ns < soonest_ns:
                soonest_ns = arrival_ns
        if ready:
            _, kind, stage = min(ready)
            self._start(rank, kind, stage, now_ns)
            return
        stage = self._oldest_weights(rank)
        if stage is not None:
            weight_ns = self.durations_ns[WEIGHT_GRAD * self.board.num_stages + stage]
            if soonest_ns is None or soonest_ns - now_ns >= self.policy.patience * weight_ns:
                self._start(rank, WEIGHT_GRAD, stage, now_ns)
                return
        if soonest_ns is not None:
            self._wake(soonest_ns, rank.rank)

    def _list_arrivals(self, rank: _Rank) -> list[tuple[int, int, int, int]]:
        found: list[tuple[int, int, int, int]] = []
        last = self.board.num_stages - 1
        gradient = INPUT_GRAD if self.policy.split else BACKWARD
        for stage in rank.stages:
            microbatch = rank.gradients[stage]
            if microbatch < rank.forwards[stage]:
                arrival_ns = (
                    0
                    if stage == last
                    else self._arrival(self.gradient_ends[stage + 1], microbatch, gradient, stage)
                )
                if arrival_ns is not None:
                    found.append((gradient, stage, microbatch, arrival_ns))
            microbatch = rank.forwards[stage]
            if microbatch < self.board.num_microbatches and self._has_room(rank, stage):
                arrival_ns = (
                    0
                    if stage == 0
                    else self._arrival(self.forward_ends[stage - 1], microbatch, FORWARD, stage)
                )
                if arrival_ns is not None:
                    found.append((FORWARD, stage, microbatch, arrival_ns))
        return found

    def _arrival(
        self, ends_ns: Sequence[int], microbatch: int, kind: int, stage: int
    ) -> int | None:
        if microbatch >= len(ends_ns):
            return None
        return ends_ns[microbatch] + self.board.lags_ns[kind * self.board.num_stages + stage]

    def _has_room(self, rank: _Rank, stage: int) -> bool:
        oldest = min(rank.forwards.values())
        kept_bytes = sum(
            self.saved_bytes[each] for each in rank.stages if rank.forwards[each] == oldest
        )
        if rank.forwards[stage] != oldest:
            kept_bytes += self.saved_bytes[stage]
        return rank.saved_bytes + kept_bytes <= rank.cap_bytes

    def _urgency(self, kind: int, stage: int, microbatch: int) -> tuple[int, ...]:
        policy = self.policy
        late = int((kind == FORWARD) == (policy.first == "gradients"))
        depth = -stage if kind != FORWARD or policy.deep_first else stage
        if policy.first == "oldest":
            return microbatch, depth
        if kind == FORWARD:
            return late, depth, microbatch
        return late, microbatch, depth

    def _oldest_weights(self, rank: _Rank) -> int | None:
        left = [stage for stage in rank.stages if rank.weights[stage] < rank.gradients[stage]]
        if not self.policy.split or not left:
            return None
        return min(left, key=lambda stage: (rank.weights[stage], -stage))

    def _start(self, rank: _Rank, kind: int, stage: int, now_ns: int) -> None:
        board = self.board
        row = kind * board.num_stages + stage
        end_ns = rank.free_ns = now_ns + self.durations_ns[row]
        if kind == FORWARD:
            microbatch = rank.forwards[stage]
            rank.forwards[stage] += 1
            rank.saved_bytes += self.saved_bytes[stage]
            self.forward_ends[stage].append(end_ns)
            self._tell(FORWARD, stage + 1, rank.rank, end_ns)
        elif kind == WEIGHT_GRAD:
            microbatch = rank.weights[stage]
            rank.weights[stage] += 1
        else:
            microbatch = rank.gradients[stage]
            rank.gradients[stage] += 1
            self.gradient_ends[stage].append(end_ns)
            self._tell(kind, stage - 1, rank.rank, end_ns)
        if kind in (BACKWARD, WEIGHT_GRAD):
            rank.saved_bytes -= self.saved_bytes[stage]
        rank.order.append(row * board.num_microbatches + microbatch)
        self._wake(end_ns, rank.rank)

    def _tell(self, kind: int, stage: int, rank: int, end_ns: int) -> None:
        # Whoever computes the neighbouring stage looks again when the value arrives.
        board = self.board
        if 0 <= stage < board.num_stages and board.ranks[stage] != rank:
            lag_ns = board.lags_ns[kind * board.num_stages + stage]
            self._wake(end_ns + lag_ns, board.ranks[stage])


def list_orders(board: Board, cap_bytes: Sequence[int], policy: Policy) -> list[list[int]]:
    """Order the tasks of every rank, as codes of the board.

    Raises:
        ValueError: a rank may not even save one microbatch of its stages.
    """
    for rank in range(board.num_ranks):
        least_bytes = sum(board.stages[stage].saved_bytes for stage in board.stages_of(rank))
        if cap_bytes[rank] < least_bytes:
            raise ValueError(f"rank {rank} needs {least_bytes} bytes for one microbatch")
    return _Listing(board, cap_bytes, policy).run()
