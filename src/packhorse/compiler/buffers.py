"""The table of buffers and the pools they lie in.

In: plan, model and layout. Out: a `Buffer` per name with its size, the pools where it may lie and
its home. States with a home are always in a program's table, used or not: they take their place in
every program; of the others it has those that its tasks touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import Final

from packhorse.compiler.layout import find_chunks
from packhorse.compiler.passes.updates import (
    find_norm_exchange,
    place_updates,
    takes_norm_to_host,
    updated_states,
)
from packhorse.errors import DoesNotFitError
from packhorse.model.parts import whole_of
from packhorse.model.spec import ITEM_BYTES, Model, Parameter, Value
from packhorse.plan.spec import ChunkPlan, Plan
from packhorse.program.buffers import (
    LOSSES,
    NORM,
    NORM_SEGMENT_ELEMENTS,
    Buffer,
    BufferId,
    Chunk,
    Layout,
    Pool,
    PoolId,
    TierName,
    norm_id,
    packed_norms_id,
    saved_id,
    stash_id,
    state_id,
    tied_grad_id,
    tied_sum_id,
    value_grad_id,
    value_id,
)
from packhorse.units import format_bytes

DEVICE: Final = PoolId("device")
CHUNKS: Final = PoolId("chunks")
HEAP: Final = PoolId("heap")
NORM_BYTES: Final = 8


def state_pool(plan: Plan) -> PoolId:
    """The pool of the device tier where states of chunks lie."""
    return CHUNKS if plan.heap.value == "keep" else DEVICE


def heap_pool(plan: Plan) -> PoolId:
    """The pool of the device tier where everything else and workspace lie."""
    return HEAP if plan.heap.value == "keep" else DEVICE


def name_states(plan: Plan, layout: Layout) -> Mapping[BufferId, Buffer]:
    """Name every state that has a home: chunk by chunk, parameters first."""
    found: dict[BufferId, Buffer] = {}
    tiers = plan.update_tiers
    for chunk, planned, updated in zip(layout.chunks, plan.chunks, tiers, strict=True):
        states = updated_states(plan.optimizer) if chunk.trainable else ("param",)
        for state in states:
            home = planned.parameters.value if state == "param" else planned.optimizer.value
            buffer = Buffer(
                id=state_id(state, chunk.id),
                size_bytes=_state_bytes(layout, state, chunk),
                pools=_pools(plan, home, updated),
                home=home,
            )
            found[buffer.id] = buffer
    return found


def name_gradients(plan: Plan, layout: Layout) -> Mapping[BufferId, Buffer]:
    """Name the gradient of every trained chunk."""
    triples: Iterable[tuple[Chunk, ChunkPlan, TierName]] = zip(
        layout.chunks, plan.chunks, plan.update_tiers, strict=True
    )
    found = (
        Buffer(
            id=state_id("grad", chunk.id),
            size_bytes=_state_bytes(layout, "grad", chunk),
            pools=_pools(plan, planned.gradients.value, updated),
            home=None,
        )
        for chunk, planned, updated in triples
        if chunk.trainable
    )
    return {buffer.id: buffer for buffer in found}


def name_transients(
    plan: Plan, model: Model, layout: Layout, *, num_microbatches: int
) -> Mapping[BufferId, Buffer]:
    """Name whatever else may live inside a step: norms, tied sums, losses, values of all kinds."""
    found = (
        *_norms(plan, model, layout),
        *_tied_sums(plan, model, layout),
        _transient(plan, LOSSES, num_microbatches * _loss_bytes(model)),
        *(
            buffer
            for index in range(num_microbatches)
            for buffer in _activations(plan, model, index)
        ),
    )
    return {buffer.id: buffer for buffer in found}


def find_rests(
    plan: Plan, model: Model, layout: Layout, *, num_microbatches: int
) -> Mapping[BufferId, TierName]:
    """The tier where gradients, values between blocks and saved values wait between their uses.

    States with a home wait there.
    """
    gradients: dict[BufferId, TierName] = {
        state_id("grad", chunk.id): planned.gradients.value
        for chunk, planned in zip(layout.chunks, plan.chunks, strict=True)
        if chunk.trainable
    }
    values: dict[BufferId, TierName] = {
        value_id(value.id, index): plan.boundaries.value
        for value in model.values.values()
        for index in range(num_microbatches)
    }
    saved: dict[BufferId, TierName] = {
        saved_id(block.id, index): plan.offload.value
        for block in model.blocks
        for index in range(num_microbatches)
    }
    return {**gradients, **values, **saved}


def size_pools(plan: Plan, heap_bytes: int, slot_bytes: int = 0) -> tuple[Pool, ...]:
    """Share the budgets out over the pools.

    A kept heap gets `heap_bytes`, its live peak, as capacity; its slack is set aside and chunks
    get the rest. `slot_bytes` of the disk are set aside for slots of finished steps.

    Raises:
        DoesNotFitError: nothing is left for the chunks, or slots need more than the whole disk.
    """
    if slot_bytes > plan.budget_bytes.get("disk", 0):
        raise DoesNotFitError(
            f"tier disk needs {format_bytes(slot_bytes)} for slots of finished steps alone and has"
            f" {format_bytes(plan.budget_bytes.get('disk', 0))}",
            fix="grant a larger disk, or pin durable: off",
        )
    usable = plan.budget_bytes["device"] - plan.base_bytes
    others = [
        Pool(
            id=PoolId(tier),
            tier=tier,
            capacity_bytes=capacity - slot_bytes if tier == "disk" else capacity,
        )
        for tier, capacity in sorted(plan.budget_bytes.items())
        if tier != "device"
    ]
    if plan.heap.value == "map":
        return (_device_pool(plan, DEVICE, usable, heap_bytes=0), *others)
    held = ceil(heap_bytes * (1 + plan.heap_slack))
    return (
        _device_pool(plan, CHUNKS, usable - held, heap_bytes=held),
        Pool(id=HEAP, tier="device", capacity_bytes=heap_bytes),
        *others,
    )


def _device_pool(plan: Plan, pool: PoolId, capacity_bytes: int, *, heap_bytes: int) -> Pool:
    if capacity_bytes <= 0:
        need = plan.base_bytes + heap_bytes
        raise DoesNotFitError(
            f"tier device needs more than {format_bytes(need)} and has "
            f"{format_bytes(plan.budget_bytes['device'])}",
            where=f"the process itself holds {format_bytes(plan.base_bytes)}, "
            f"its heap {format_bytes(heap_bytes)}",
            fix=f"grant more than {format_bytes(need)}, or make another plan",
        )
    return Pool(id=pool, tier="device", capacity_bytes=capacity_bytes)


def _pools(plan: Plan, *tiers: TierName) -> Mapping[TierName, PoolId]:
    pools: dict[TierName, PoolId] = {"device": state_pool(plan)}
    pools.update((tier, PoolId(tier)) for tier in tiers if tier != "device")
    return pools


def _state_bytes(layout: Layout, state: str, chunk: Chunk) -> int:
    return chunk.num_elements * ITEM_BYTES[layout.dtypes[state]]


def _loss_bytes(model: Model) -> int:
    whole = whole_of(model)
    return whole.values[whole.loss].size_bytes


def _norms(plan: Plan, model: Model, layout: Layout) -> Iterable[Buffer]:
    segments = {chunk.id: 0 for chunk in layout.chunks}
    for name, chunks in find_chunks(layout).items():
        slot = layout.slots[name]
        for chunk in chunks:
            start = max(slot.start, chunk.start)
            stop = min(slot.stop, chunk.start + chunk.num_elements)
            segments[chunk.id] += ceil((stop - start) / NORM_SEGMENT_ELEMENTS)
    for chunk, count in segments.items():
        yield _transient(plan, norm_id(chunk), count * NORM_BYTES)
    for rank, count in find_norm_exchange(model).counting.items():
        yield _transient(plan, packed_norms_id(rank), count * NORM_BYTES)
    norm = _transient(plan, NORM, NORM_BYTES)
    if takes_norm_to_host(plan.optimizer, place_updates(plan), layout):
        norm = replace(norm, pools={**norm.pools, "host": PoolId("host")})
    yield norm


def _activations(plan: Plan, model: Model, microbatch: int) -> Iterable[Buffer]:
    tier = plan.boundaries.value
    for value in model.values.values():
        made = _transient(plan, value_id(value.id, microbatch), value.size_bytes)
        if tier != "device" and _is_boundary(model, value):
            made = replace(made, pools={**made.pools, tier: PoolId(tier)})
        yield made
        yield _transient(plan, value_grad_id(value.id, microbatch), value.size_bytes)
    if model.loss not in model.values:
        yield _transient(plan, value_id(model.loss, microbatch), _loss_bytes(model))
    # The last block's backward follows its forward, but for that of a part.
    last = None if model.part else len(model.blocks) - 1
    for block, planned in zip(model.blocks, plan.blocks, strict=True):
        saved_bytes = model.bodies[block.body].saved_bytes
        saved = _transient(plan, saved_id(block.id, microbatch), saved_bytes)
        if planned.activations.value == "offload" and saved_bytes and block.id != last:
            away = plan.offload.value
            saved = replace(saved, pools={**saved.pools, away: PoolId(away)})
        yield saved
        halves = model.bodies[block.body].halves
        if halves is not None and halves.stash_bytes:
            yield _transient(plan, stash_id(block.id, microbatch), halves.stash_bytes)
    for parameter in _tied_parameters(model):
        size_bytes = parameter.num_elements * ITEM_BYTES[parameter.dtype]
        yield _transient(plan, tied_grad_id(parameter.name, microbatch), size_bytes)


def _tied_sums(plan: Plan, model: Model, layout: Layout) -> Iterable[Buffer]:
    for parameter in _tied_parameters(model):
        size_bytes = parameter.num_elements * ITEM_BYTES[layout.dtypes["grad"]]
        for block in parameter.blocks:
            yield _transient(plan, tied_sum_id(parameter.name, block), size_bytes)


def _tied_parameters(model: Model) -> list[Parameter]:
    # By their users on all ranks.
    whole = whole_of(model).parameters
    return [whole[name] for name in model.parameters if len(whole[name].blocks) > 1]


def _is_boundary(model: Model, value: Value) -> bool:
    made = whole_of(model).values[value.id]
    return made.producer is not None and value.id != model.loss


def _transient(plan: Plan, buffer: BufferId, size_bytes: int) -> Buffer:
    return Buffer(id=buffer, size_bytes=size_bytes, pools={"device": heap_pool(plan)}, home=None)
