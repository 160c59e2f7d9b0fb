"""From cuts to what a schedule is timed with: the cost of every stage on its own rank.

In: a model on its ranks, a schedule and where it is cut. Out: `Costs` whose parts are the stages,
with what each cut's messages take and what each rank's microbatches may hold. A stage whose rank
recomputes saves its blocks' inputs, and its second forward is part of its input gradient, which
goes first. What messages take of the cores is part of what is computed beside them.
"""

from __future__ import annotations

from packhorse.profile.analytic import estimate_split_ns
from packhorse.schedule.costs import Cost, Costs, Crossing
from packhorse.schedule.spec import Schedule
from packhorse.search.block_times import BlockTime
from packhorse.search.stage_loads import Loads
from packhorse.search.stages import Cutter, StageCuts


def cost_stages(cutter: Cutter, schedule: Schedule, cuts: StageCuts) -> Costs:
    """Give the costs of a cut model under the schedule that it was cut for."""
    loads = cutter.load(schedule)
    return Costs(
        parts=tuple(_cost_stage(cutter, loads, cuts, stage) for stage in range(loads.num_stages)),
        cap_bytes=tuple(max(share.room_bytes, 0) for share in cuts.shares),
        crossings=tuple(
            Crossing(
                forward_ns=int(message.forward_ns[cut]), gradient_ns=int(message.gradient_ns[cut])
            )
            for message, cut in zip(loads.messages, cuts.bounds[1:-1], strict=True)
        ),
    )


def _cost_stage(cutter: Cutter, loads: Loads, cuts: StageCuts, stage: int) -> Cost:
    rank = cuts.rank_of[stage]
    first, stop = cuts.bounds[stage], cuts.bounds[stage + 1]
    times = cutter.times[rank][first:stop]
    recomputes = cuts.shares[rank].recomputes
    again = [recomputes and each.recomputes for each in times]
    if stage + 1 == loads.num_stages and loads.holds_last_once:
        again[-1] = False
    forward_ns, gradient_ns = _count_core_ns(loads, cuts, stage)
    tables = loads.stretches
    saved_bytes = (tables.remade_bytes if recomputes else tables.kept_bytes)[first, stop]
    return Cost(
        forward_ns=forward_ns + sum(map(_first_ns, times, again)),
        input_grad_ns=gradient_ns + sum(map(_back_ns, times, again)),
        weight_grad_ns=sum(each.weight_grad_ns for each in times),
        saved_bytes=int(saved_bytes),
        split_ns=sum(estimate_split_ns(each.input_grad_ns, each.weight_grad_ns) for each in times),
    )


def _count_core_ns(loads: Loads, cuts: StageCuts, stage: int) -> tuple[int, int]:
    """Count what the messages at both ends of a stage take of its rank's cores, there and back."""
    ends = [(at, cuts.bounds[at + 1]) for at in (stage - 1, stage)]
    found = [(loads.messages[at], cut) for at, cut in ends if 0 <= at < len(loads.messages)]
    return (
        sum(int(message.forward_core_ns[cut]) for message, cut in found),
        sum(int(message.gradient_core_ns[cut]) for message, cut in found),
    )


def _first_ns(time: BlockTime, again: bool) -> int:
    return time.discard_ns if again else time.forward_ns


def _back_ns(time: BlockTime, again: bool) -> int:
    return time.input_grad_ns + (time.forward_ns if again else 0)
