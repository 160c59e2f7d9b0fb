"""Where chunks with optimizer states in the host are updated: there, or in turns with the device.

In: a plan, its model, profile and machine. Out: the plan with `update` of each chunk and a
`stride` k: every k-th of those chunks visits the device, the host updates the others meanwhile.

Deep Optimizer States (Maurya et al., Middleware 2024) balances the two legs. Per parameter, with B
the rate of a link in fp32 values, U_g and U_c the rates of updates in device and host:

    device leg    3/B + 1/U_g      parameter and two moments in, while those before go out
    host leg      1/U_c            new parameters return on the copy lane, beside it
    (k - 1) host legs = 1 device leg:      k = 1 + (3/B + 1/U_g) / (1/U_c)

The k of the balance is seldom whole, and a pipeline of copies has to fill and to drain, so the time
of every k is bounded instead, and the least is taken:

    in, update, out of the visiting chunks: each waits for its own lane and for its chunk
    bound(k) = max(the last chunk out, all updates in the host one after another)

What the model leaves out (memory that holds copies back, gradients on the same links, updates that
overlap with the backward) is in the simulator: it has the last word on that k and its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from packhorse.compiler.lower import lower_plan
from packhorse.errors import DoesNotFitError
from packhorse.machine.spec import Machine
from packhorse.model.spec import ITEM_BYTES, Model
from packhorse.plan.pins import Pins
from packhorse.plan.spec import Choice, ChunkPlan, OptimizerPlan, Plan
from packhorse.profile.spec import Profile
from packhorse.search.evaluation import count_modelled, need_of
from packhorse.simulator.costs import ADAMW_MOVED_BYTES, SCALE_PASSES, TaskCosts
from packhorse.simulator.engine import simulate_run
from packhorse.units import format_ns

STATE_BYTES: Final = 4
"""Of masters and moments, a parameter."""

FURTHEST_STRIDE: Final = 16
"""Beyond it the device takes so little that a stride says the same as the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLegs:
    """What the update of one parameter takes, in ns, by lane."""

    host_ns: float
    in_ns: float
    device_ns: float
    out_ns: float

    @property
    def balance(self) -> float:
        """The stride at which both legs take as long; see the module."""
        return 1 + (max(self.in_ns, self.out_ns) + self.device_ns) / self.host_ns

    def bound_ns(self, sizes: Sequence[int], stride: int) -> float:
        """The least time of all updates at a stride.

        Args:
            sizes: parameters of each chunk, in the order of the updates.
            stride: as of a plan.
        """
        arrived_ns = updated_ns = left_ns = host_ns = 0.0
        for number, size in enumerate(sizes, 1):
            if not stride or number % stride:
                host_ns += size * self.host_ns
                continue
            arrived_ns += size * self.in_ns
            updated_ns = max(arrived_ns, updated_ns) + size * self.device_ns
            left_ns = max(updated_ns, left_ns) + size * self.out_ns
        return max(left_ns, host_ns)


def find_legs(machine: Machine, optimizer: OptimizerPlan, item_bytes: int = 4) -> UpdateLegs | None:
    """Give the legs of an update; None when device and host do not both update here.

    Args:
        item_bytes: bytes of a parameter as blocks compute with it.
    """
    rates = {update.tier: update.parameters_per_s for update in machine.updates}
    inward, outward = machine.link("host", "device"), machine.link("device", "host")
    tier = machine.tier("host")
    if inward is None or outward is None or tier is None or not tier.budget_bytes:
        return None
    if "host" not in rates or "device" not in rates:
        return None
    copied_bytes = STATE_BYTES * (len(optimizer.states) + optimizer.master) + item_bytes
    # As the cost model has it: rates are those of a plain fp32 AdamW, in bytes of memory moved.
    touched_bytes = 2 * copied_bytes + STATE_BYTES
    if optimizer.clips:
        touched_bytes += STATE_BYTES * (1 + SCALE_PASSES)
    share = touched_bytes / ADAMW_MOVED_BYTES
    return UpdateLegs(
        host_ns=share * 1e9 / rates["host"],
        in_ns=copied_bytes * 1e9 / inward.bytes_per_s,
        device_ns=share * 1e9 / rates["device"],
        out_ns=copied_bytes * 1e9 / outward.bytes_per_s,
    )


def model_stride(legs: UpdateLegs, sizes: Sequence[int]) -> int:
    """Give the stride whose bound is least; the longest of equals, which moves the fewest bytes."""
    strides = [0, *range(min(len(sizes), FURTHEST_STRIDE), 0, -1)]
    return min(strides, key=lambda stride: legs.bound_ns(sizes, stride))


def place_updates(
    plan: Plan, model: Model, profile: Profile, machine: Machine, *, pins: Pins
) -> Plan:
    """Choose where the chunks with states in the host are updated, but for what is pinned.

    The plan is left as it is where there is no host tier, nothing lies there, or nothing fits.
    """
    legs = find_legs(machine, plan.optimizer, ITEM_BYTES[plan.numerics.compute_dtype])
    if legs is None:
        return plan
    wanted = plan if pins.update else _offer_host(plan)
    sizes = [_size_of(chunk) for chunk in wanted.chunks if _may_be_hosted(chunk)]
    if not sizes:
        return plan
    if pins.stride is not None:
        return wanted
    modelled = model_stride(legs, sizes)
    near = {0, 1, modelled, max(modelled - 1, 1), modelled + 1}
    step_ns = {
        stride: found
        for stride in sorted(near)
        if (found := _simulate(_with_stride(wanted, stride, ""), model, profile, machine))
    }
    if not step_ns:
        return plan
    best = min(step_ns, key=lambda stride: (step_ns[stride], stride))
    return _with_stride(wanted, best, _explain(legs, best, step_ns))


def _offer_host(plan: Plan) -> Plan:
    because = "its states lie in the host: updated there unless it is its turn to visit the device"
    hosted = Choice(value="host", because=because)
    chunks = tuple(
        replace(chunk, update=hosted)
        if chunk.trainable and chunk.optimizer.value == "host"
        else chunk
        for chunk in plan.chunks
    )
    return replace(plan, chunks=chunks)


def _may_be_hosted(chunk: ChunkPlan) -> bool:
    return chunk.trainable and chunk.update.value == "host"


def _size_of(chunk: ChunkPlan) -> int:
    return sum(piece.stop - piece.start for piece in chunk.pieces)


def _with_stride(plan: Plan, stride: int, because: str) -> Plan:
    return replace(plan, stride=Choice(value=stride, because=because))


def _simulate(plan: Plan, model: Model, profile: Profile, machine: Machine) -> int | None:
    # None when the step does not fit the plan's budgets at this stride.
    count = count_modelled(plan.order.value, plan.numerics.num_microbatches)
    short = replace(plan, numerics=replace(plan.numerics, num_microbatches=count))
    try:
        program = lower_plan(short, model, "train_step")
    except DoesNotFitError:
        return None
    needs = need_of(plan, program)
    if any(need > plan.budget_bytes.get(tier, 0) for tier, need in needs.items()):
        return None
    costs = TaskCosts(
        machine=machine, profile=profile, model=model, program=program, heap=plan.heap.value
    )
    return simulate_run(program, costs=costs).step_ns


def _explain(legs: UpdateLegs, best: int, step_ns: Mapping[int, int]) -> str:
    others = [f"{format_ns(ns)} with {stride}" for stride, ns in step_ns.items() if stride != best]
    return (
        f"the legs of device and host balance at {legs.balance:.2f}; a step takes"
        f" {format_ns(step_ns[best])}"
        + (f", {', '.join(others)}" if others else ", and no other stride fits")
    )
