"""Whether what would leave the device between two uses stays in the valleys of memory.

In: a plan, its model, profile and machine. Out: the plan with its `cache` chosen: `valleys` where
the step that keeps is no slower than the one that does not: it moves fewer bytes, and needs no more
of any tier. The search of moves does not see it: it places what lies still, and this takes what is
left between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from packhorse.compiler.lower import Lowerer
from packhorse.machine.spec import Machine
from packhorse.model.spec import Model
from packhorse.plan.pins import Pins
from packhorse.plan.spec import Choice, Plan
from packhorse.profile.spec import Profile
from packhorse.program.buffers import BufferId
from packhorse.program.program import Program
from packhorse.program.tasks import Copy
from packhorse.search.evaluation import count_modelled
from packhorse.search.prediction import predict_plan
from packhorse.units import format_bytes, format_ns


def choose_cache(
    plan: Plan,
    model: Model,
    profile: Profile,
    machine: Machine,
    *,
    pins: Pins,
    lowerer: Lowerer,
) -> Plan:
    """Give the plan with its cache: pinned, or the quicker one; of equals that which moves less."""
    without = replace(plan, cache=Choice(value="none", because=""))
    keeping = replace(plan, cache=Choice(value="valleys", because=""))
    if pins.cache is not None:
        return replace(plan, cache=Choice(value=pins.cache, because="pinned"))
    before, after = _lower(without, lowerer), _lower(keeping, lowerer)
    saved = Counter(_count_loads(before))
    saved.subtract(_count_loads(after))
    kept = [name for name, count in saved.items() if count > 0]
    if not kept:
        because = "there is no valley that something could stay in between two uses"
        return replace(plan, cache=Choice(value="none", because=because))
    slow = predict_plan(without, model, profile, machine, lowerer=lowerer)
    quick = predict_plan(keeping, model, profile, machine, lowerer=lowerer)
    gain_ns = slow.step_ns - quick.step_ns
    if gain_ns < 0:
        because = f"keeping {_count_chunks(kept)} between uses would be slower"
        return replace(plan, cache=Choice(value="none", because=because))
    size_bytes = sum(before.buffers[name].size_bytes for name in kept)
    because = (
        f"{_count_chunks(kept)}, {format_bytes(size_bytes)}, saves "
        f"{format_bytes(slow.disk_read_bytes - quick.disk_read_bytes)} read and "
        f"{format_bytes(slow.disk_written_bytes - quick.disk_written_bytes)} written per step: "
        + (f"{format_ns(gain_ns)} less" if gain_ns else "the step takes as long")
    )
    return replace(plan, cache=Choice(value="valleys", because=because))


def _lower(plan: Plan, lowerer: Lowerer) -> Program:
    count = count_modelled(plan.order.value, plan.numerics.num_microbatches)
    short = replace(plan, numerics=replace(plan.numerics, num_microbatches=count))
    return lowerer.lower(short, "train_step")


def _count_chunks(kept: Iterable[BufferId]) -> str:
    # A state of a chunk is named by the chunk's number, a value by its own name.
    owners = [name.partition("/")[2] for name in kept]
    chunks = {owner for owner in owners if owner.isdigit()}
    num_values = sum(not owner.isdigit() for owner in owners)
    words = f"{len(chunks)} chunk{'' if len(chunks) == 1 else 's'}"
    return f"{words} and {num_values} values" if num_values else words


def _count_loads(program: Program) -> Counter[BufferId]:
    return Counter(
        task.buffer for task in program.tasks if isinstance(task, Copy) and task.target == "device"
    )
