"""Local search: move one task of a rank's order at a time, and keep what does not make it longer.

In: a board, orders of codes, caps, a number of trials. Out: orders that are no longer than those
given, save no more than the caps allow, and keep every need and each stage's first in, first out.

    until nothing is left to gain, or the trials are used up:
        either  pick a gap, and take a task from behind it in front of it
        or      pick a gap, and move the task that it waits for forward on its own rank
        or      move any task by a few places
        keep the change if the makespan, or else the sum of the ranks' ends, is no longer

The random numbers start from a fixed seed: equal inputs give equal orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from packhorse.schedule.board import Board
from packhorse.schedule.numbering import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD

_REACH: Final = 12
_PATIENCE: Final = 1500

Orders = list[list[int]]


def improve_orders(
    board: Board, orders: Sequence[Sequence[int]], cap_bytes: Sequence[int], *, num_trials: int
) -> Orders:
    """Search in the neighbourhood of orders that are right and keep the caps."""
    search = _Search(board, [list(order) for order in orders], cap_bytes)
    search.run(num_trials)
    return search.orders


def bound_makespan(board: Board) -> int:
    """Give a time that no order on this board can beat, in ns."""
    heads_ns, at_ns = dict[int, int](), 0
    for stage, rank in enumerate(board.ranks):
        at_ns += board.lags_ns[stage]
        heads_ns.setdefault(rank, at_ns)
        at_ns += board.stages[stage].forward_ns
    busy_ns = dict.fromkeys(range(board.num_ranks), 0)
    for stage, rank in enumerate(board.ranks):
        cost = board.stages[stage]
        busy_ns[rank] += board.num_microbatches * (cost.forward_ns + cost.backward_ns)
    return max(heads_ns[rank] + busy_ns[rank] for rank in heads_ns)


def split_backwards(board: Board, orders: Sequence[Sequence[int]]) -> Orders:
    """Replace each whole backward by its two halves, one behind the other."""
    rows = board.num_stages * board.num_microbatches
    return [
        [
            part
            for code in order
            for part in (
                (code + (INPUT_GRAD - BACKWARD) * rows, code + (WEIGHT_GRAD - BACKWARD) * rows)
                if code // rows == BACKWARD
                else (code,)
            )
        ]
        for order in orders
    ]


def join_backwards(board: Board, orders: Sequence[Sequence[int]]) -> Orders:
    """Make halves that stand side by side whole again, wherever that costs no time."""
    rows = board.num_stages * board.num_microbatches
    best = [list(order) for order in orders]
    makespan_ns = board.time(best)
    for order in best:
        at = len(order) - 2
        while at >= 0:
            half, other = order[at], order[at + 1]
            if half // rows == INPUT_GRAD and other == half + rows:
                order[at : at + 2] = [half - (INPUT_GRAD - BACKWARD) * rows]
                if board.time(best) != makespan_ns:
                    order[at : at + 1] = [half, other]
            at -= 1
    return best


class _Search:
    def __init__(self, board: Board, orders: Orders, cap_bytes: Sequence[int]) -> None:
        self.board = board
        self.orders = orders
        self.cap_bytes = cap_bytes
        self.random = Random(0)
        self.rows = board.num_stages * board.num_microbatches
        self.durations_ns = board.durations_ns
        self.saved_bytes = [cost.saved_bytes for cost in board.stages]

    def run(self, num_trials: int) -> None:
        least_ns = bound_makespan(self.board)
        ends_ns = self.board.ends_of(self.orders)
        assert ends_ns is not None
        score = self._score(ends_ns)
        waited = 0
        for _ in range(num_trials):
            if score[0] <= least_ns or waited > _PATIENCE:
                return
            waited += 1
            picked = self._pick(ends_ns)
            if picked is None:
                continue
            rank, source, target = picked
            order = self.orders[rank]
            if not self._may_move(order, source, target):
                continue
            order.insert(target, order.pop(source))
            if not self._fits(rank):
                order.insert(source, order.pop(target))
                continue
            new_ends_ns = self.board.ends_of(self.orders)
            new_score = None if new_ends_ns is None else self._score(new_ends_ns)
            if new_ends_ns is None or new_score is None or new_score > score:
                order.insert(source, order.pop(target))
                continue
            if new_score < score:
                waited = 0
            ends_ns, score = new_ends_ns, new_score

    def _score(self, ends_ns: Sequence[int]) -> tuple[int, int]:
        last = [ends_ns[order[-1]] for order in self.orders if order]
        return max(last), sum(last)

    def _pick(self, ends_ns: Sequence[int]) -> tuple[int, int, int] | None:
        """Pick a rank, the place of a task there, and where it goes."""
        rank = self.random.randrange(len(self.orders))
        order = self.orders[rank]
        if len(order) < 2:
            return None
        dice = self.random.random()
        if dice < 0.2:
            source = self.random.randrange(len(order))
            reach = self.random.randint(1, _REACH)
            target = source + (reach if self.random.random() < 0.5 else -reach)
            return rank, source, min(max(target, 0), len(order) - 1)
        gap = self._pick_gap(order, ends_ns)
        if gap is None:
            return None
        if dice < 0.7:
            return rank, min(gap + self.random.randint(1, _REACH), len(order) - 1), gap
        return self._hurry(order[gap])

    def _pick_gap(self, order: Sequence[int], ends_ns: Sequence[int]) -> int | None:
        """Pick a task of a rank that waits for something that is not there yet."""
        count = self.board.num_microbatches
        gaps: list[int] = []
        free_ns = 0
        for at, code in enumerate(order):
            end_ns = ends_ns[code]
            if end_ns - self.durations_ns[code // count] > free_ns:
                gaps.append(at)
            free_ns = end_ns
        return self.random.choice(gaps) if gaps else None

    def _hurry(self, code: int) -> tuple[int, int, int] | None:
        """Move what a task waits for a few places forward."""
        count, stages = self.board.num_microbatches, self.board.num_stages
        row, microbatch = divmod(code, count)
        kind, stage = divmod(row, stages)
        step = -1 if kind == FORWARD else 1
        if not 0 <= stage + step < stages or kind == WEIGHT_GRAD:
            return None
        rank = self.board.ranks[stage + step]
        order = self.orders[rank]
        wanted = [
            (each * stages + stage + step) * count + microbatch
            for each in ((FORWARD,) if kind == FORWARD else (BACKWARD, INPUT_GRAD))
        ]
        source = next(at for at, each in enumerate(order) if each in wanted)
        target = source - self.random.randint(1, _REACH // 2)
        return None if target < 0 else (rank, source, target)

    def _may_move(self, order: Sequence[int], source: int, target: int) -> bool:
        if source == target:
            return False
        moved = order[source]
        if target < source:
            return not any(self._precedes(order[at], moved) for at in range(target, source))
        return not any(self._precedes(moved, order[at]) for at in range(source + 1, target + 1))

    def _precedes(self, one: int, other: int) -> bool:
        """Whether one task must come before another of the same rank."""
        count, stages = self.board.num_microbatches, self.board.num_stages
        row, microbatch = divmod(one, count)
        other_row, other_microbatch = divmod(other, count)
        if row % stages != other_row % stages:
            return False
        kind, other_kind = row // stages, other_row // stages
        if microbatch == other_microbatch:
            return kind < other_kind
        if microbatch > other_microbatch:
            return False
        if FORWARD in (kind, other_kind):
            return kind == other_kind
        return kind == other_kind or BACKWARD in (kind, other_kind)

    def _fits(self, rank: int) -> bool:
        count, stages = self.board.num_microbatches, self.board.num_stages
        cap_bytes, saved_bytes = self.cap_bytes[rank], 0
        for code in self.orders[rank]:
            kind, stage = divmod(code // count, stages)
            if kind == FORWARD:
                saved_bytes += self.saved_bytes[stage]
                if saved_bytes > cap_bytes:
                    return False
            elif kind != INPUT_GRAD:
                saved_bytes -= self.saved_bytes[stage]
        return True
