"""Why each choice was made, in words with numbers.

In: the state that was chosen and its sketch. Out: the because of every choice. A move that was
taken says what it frees and costs; one that was not says what it would have cost; where there is
nothing to choose, the reason says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from packhorse.machine.spec import TierName
from packhorse.plan.spec import SCHEDULED
from packhorse.search.evaluation import Evaluation, lies_away
from packhorse.search.sketch import Sketch
from packhorse.search.space import Problem
from packhorse.units import format_bytes, format_ns, format_part, format_percent

LEAST_SHARE: Final = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """The words for one chosen state; `left_bytes` is what the device budget has left."""

    problem: Problem
    evaluation: Evaluation
    sketch: Sketch
    left_bytes: int
    budget_bytes: int

    def of(self, kind: str, index: int, value: str) -> str:
        """The because of a choice; see `space.Reason`."""
        match kind:
            case "microbatch_rows" | "loss_chunk_tokens" | "chunk_bytes":
                if kind in self.problem.pins.names:
                    return "pinned"
                return self._scalar(kind)
            case "order":
                return "pinned" if "order" in self.problem.pins.names else self._order(value)
            case "boundaries":
                if "boundaries" in self.problem.pins.names:
                    return "pinned"
                return self._boundaries(value)
            case "prefetch":
                return "pinned" if "prefetch" in self.problem.pins.names else self._prefetch()
            case "heap":
                return "pinned" if "heap" in self.problem.pins.names else self._heap(value)
            case "recompute":
                return self._activations(index, value)
            case "offload":
                if kind in self.problem.pins.names:
                    return "pinned"
                return f"the nearest tier beside the device is {value}"
            case _:
                return self._tier(kind, index, value)

    def _scalar(self, kind: str) -> str:
        setting = self.evaluation.setting
        step = format_ns(self.evaluation.step_ns)
        if kind == "microbatch_rows":
            count = setting.num_microbatches
            times = "one micro-batch" if count == 1 else f"{count} micro-batches"
            if self.problem.pipeline is not None:
                return f"{times} of it: with its schedule the fastest cut that fits all ranks"
            return f"{times} of it: the fastest cut that fits, {step} a step"
        if kind == "loss_chunk_tokens":
            if setting.candidate.loss_chunk_tokens is None:
                return f"logits exist whole: the fastest that fits, {step} a step"
            return f"logits are made in parts, to fit: {step} a step"
        return f"{len(setting.chunks)} chunks, the longest {self._longest()}"

    def _prefetch(self) -> str:
        step = format_ns(self.evaluation.step_ns)
        if not lies_away(self.evaluation):
            return "nothing is brought into the device"
        if not self.evaluation.prefetch:
            return f"lanes run ahead by themselves as far as memory allows: {step} a step"
        reason = f"reads come before the compute tasks that would hold them up: {step} a step"
        unhurried_ns = self.evaluation.unhurried_ns
        if unhurried_ns is None:
            return reason
        gain = format_ns(unhurried_ns - self.evaluation.step_ns)
        return f"{reason}, {gain} less than with each at its use"

    def _longest(self) -> str:
        sizes = [
            sum(piece.stop - piece.start for piece in chunk.pieces)
            for chunk in self.evaluation.setting.chunks
        ]
        return format_bytes(4 * max(sizes, default=0))

    def _heap(self, value: str) -> str:
        heap = self.problem.machine.heap
        if value == "keep":
            return (
                f"mapping would cost {format_percent(heap.map_cost)} of compute and save the "
                f"{format_percent(heap.keep_slack)} by which a kept heap outgrows its live bytes"
            )
        return (
            f"what is freed serves chunks at once; costs {format_percent(heap.map_cost)} of "
            "compute, and keeping would leave less room than that buys"
        )

    def _order(self, value: str) -> str:
        setting = self.evaluation.setting
        count = setting.num_microbatches
        step = format_ns(self.evaluation.step_ns)
        if value == "scheduled":
            return SCHEDULED.because
        if value == "layered":
            return (
                f"what a block needs is brought once for all {count} micro-batches: {step} a step"
            )
        if count == 1:
            return "one micro-batch: both orders are the same"
        if not lies_away(self.evaluation):
            return "nothing lies away, so nothing would be brought less often"
        tied = setting.model.summed_parameters
        if tied and self.problem.arithmetic.tied_sum == "per_microbatch":
            return f"{tied[0]} is tied: layers need tied_sum: per_step, which changes numbers"
        return f"the fastest that fits, {step} a step: layers hold all micro-batches at once"

    def _boundaries(self, value: str) -> str:
        if value != "device":
            step = format_ns(self.evaluation.step_ns)
            return (
                f"values on the {value} between their forward and backward make room for what "
                f"would take longer to move: {step} a step"
            )
        if not lies_away(self.evaluation):
            return "everything fits: none has to leave"
        return "moving values would cost more than their room saves"

    def _activations(self, index: int, value: str) -> str:
        setting = self.evaluation.setting
        block = setting.model.blocks[index]
        if ("recompute", index) in setting.pinned:
            return "pinned"
        offload = setting.offload
        kind = "offload" if value == "offload" else "recompute"
        column = self._column(kind, index, offload if kind == "offload" else "device")
        if column is None:
            if not block.has_backward:
                return "nothing runs backward here"
            if not setting.model.body_of(block.id).saved_bytes:
                return "saves nothing for its backward"
            return "its backward follows its forward, so keeping costs no memory"
        doing = f"moving it to {offload}" if kind == "offload" else "recomputing"
        return self._move(column, doing, value)

    def _tier(self, kind: str, index: int, value: str) -> str:
        setting = self.evaluation.setting
        chunk = setting.chunks[index]
        if (kind, index) in setting.pinned:
            return "pinned"
        if kind != "parameters" and not chunk.trainable:
            return "frozen: there is none"
        columns = [
            column
            for column, move in enumerate(setting.moves)
            if (move.kind, move.index) == (kind, index)
        ]
        if not columns:
            if kind == "gradients" and not self.problem.optimizer.clips:
                return "used up where it arises: no clipping, one micro-batch"
            if kind == "optimizer" and not self.problem.optimizer.states:
                return "there is none"
            return "the only tier there is"
        taken = next((c for c in columns if self.evaluation.taken[c]), None)
        column = columns[0] if taken is None else taken
        tier: TierName = setting.moves[column].tier
        away = f"keeping it on {tier}"
        return self._move(column, away, value)

    def _move(self, column: int, doing: str, value: str) -> str:
        cost_ns = float(self.sketch.cost_ns[column])
        saved = float(np.maximum(self.sketch.saved_bytes[:, :, column], 0).max())
        share = cost_ns / max(self.evaluation.step_ns, 1)
        part = format_percent(share) if share >= LEAST_SHARE else "under 0.1 %"
        price = f"{format_ns(cost_ns)} of work a step ({part})"
        if self.evaluation.taken[column]:
            return (
                f"{doing} frees {format_bytes(saved)} and costs {price}; "
                f"{format_part(self.left_bytes, self.budget_bytes)} are left"
            )
        if not any(self.evaluation.taken):
            return f"fits: {format_bytes(self.left_bytes)} are left; {doing} would cost {price}"
        return f"{value}: {doing} would free {format_bytes(saved)} and cost {price}"

    def _column(self, kind: str, index: int, tier: TierName) -> int | None:
        for column, move in enumerate(self.evaluation.setting.moves):
            if (move.kind, move.index, move.tier) == (kind, index, tier):
                return column
        return None
