"""What can be chosen: settings of a plan, and for each one the moves that save memory.

In: candidates (a model and its profile at one micro-batch shape), the machine, the pins. Out:
`Setting`s, each with a fastest start (everything resident, everything kept) and a list of `Move`s;
a state of the search is the set of moves taken, and `build_plan` turns it into a `Plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from packhorse.compiler.chunks import ProposedChunk, pack_chunks
from packhorse.errors import RecipeError
from packhorse.machine.spec import Machine, TierName
from packhorse.model.spec import Model
from packhorse.plan.pins import Pins, State
from packhorse.plan.spec import (
    IN_DEVICE,
    NO_OFFLOAD,
    NO_STRIDE,
    ActivationChoice,
    BlockPlan,
    Choice,
    ChunkPlan,
    HeapMode,
    Numerics,
    OptimizerPlan,
    Order,
    PipelinePlan,
    Plan,
    TiedSum,
)
from packhorse.profile.spec import Profile

UNLIMITED_BYTES: Final = 1 << 60
STATES: Final[tuple[State, ...]] = ("parameters", "gradients", "optimizer")
AWAY: Final[tuple[TierName, ...]] = ("host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model traced at one micro-batch size and loss-chunk setting, and what its bodies cost."""

    model: Model
    profile: Profile
    loss_chunk_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The numerics that the search does not choose; see `Numerics`."""

    compute_dtype: str
    tied_sum: TiedSum
    attention: Literal["causal", "eager", "native"]
    num_threads: int
    device: str
    num_workers: int
    instructions: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One way to save device memory.

    A state of a chunk goes to `tier`, a block recomputes, or what it saves goes to `tier`.
    """

    kind: State | Literal["recompute", "offload"]
    index: int
    tier: TierName

    @property
    def subject(self) -> tuple[str, int]:
        """What it decides about: of several moves with one subject at most one is taken."""
        kind = "activations" if self.kind in ("recompute", "offload") else self.kind
        return kind, self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is fixed while moves are chosen.

    `tiers` and `activations` are where the search starts; what is pinned is in them and has no
    move. `pinned` names (kind, index) of the pinned ones. Blocks may move what they save to the
    tier `offload` unless that is `device`.
    """

    candidate: Candidate
    num_microbatches: int
    order: Order
    boundaries: TierName
    offload: TierName
    heap: HeapMode
    heap_slack: float
    chunk_bytes: int
    chunks: tuple[ProposedChunk, ...]
    tiers: Mapping[State, tuple[TierName, ...]]
    activations: tuple[ActivationChoice, ...]
    pinned: frozenset[tuple[str, int]]
    moves: tuple[Move, ...]

    @property
    def model(self) -> Model:
        """The traced model of the candidate."""
        return self.candidate.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a plan is searched for, the same for all settings.

    `resumable` says whether whoever runs the plan can go on from steps that it keeps. With
    `pipeline` the candidates are one rank's parts of a model that several share.
    """

    machine: Machine
    optimizer: OptimizerPlan
    arithmetic: Arithmetic
    pins: Pins
    global_batch_rows: int
    resumable: bool = True
    pipeline: PipelinePlan | None = None

    @property
    def usual_order(self) -> Order:
        """The order of micro-batches where none is chosen."""
        return self.pins.order or "depth_first" if self.pipeline is None else "scheduled"


Reason = Callable[[str, int, str], str]
"""Gives the because of a choice: (kind, index of the chunk or block, value)."""


def make_setting(
    problem: Problem,
    candidate: Candidate,
    *,
    heap: HeapMode,
    chunk_bytes: int,
    order: Order | None = None,
    boundaries: TierName = "device",
    offload: TierName = "device",
) -> Setting:
    """Make a setting with its fastest start and its moves.

    Raises:
        RecipeError: pins contradict each other or name nothing.
    """
    model, pins = candidate.model, problem.pins
    order = order or problem.usual_order
    chunks = pack_chunks(model, chunk_bytes)
    num_microbatches = problem.global_batch_rows // model.rows
    pinned: set[tuple[str, int]] = set()
    moves: list[Move] = []
    tiers: dict[State, tuple[TierName, ...]] = {}
    away = find_away_tiers(problem.machine)
    for state in STATES:
        start: list[TierName] = []
        for index, chunk in enumerate(chunks):
            tier = pins.tier_of(state, chunk.pieces)
            movable = _can_move(problem, chunk, state, num_microbatches, order)
            if tier is not None and movable:
                pinned.add((state, index))
            elif movable:
                moves += [Move(kind=state, index=index, tier=name) for name in away]
            start.append(tier if tier is not None and movable else "device")
        tiers[state] = tuple(start)
    activations: list[ActivationChoice] = []
    for index, block in enumerate(model.blocks):
        choice = pins.activation_of(block.name)
        if not block.has_backward:
            choice = "keep"
        elif choice is not None:
            pinned.add(("recompute", index))
        elif model.body_of(block.id).saved_bytes and (
            index + 1 < len(model.blocks) or order == "scheduled"
        ):
            # The last block's backward follows its forward, but for what a schedule says: there is
            # nothing to save.
            moves.append(Move(kind="recompute", index=index, tier="device"))
            if offload != "device":
                moves.append(Move(kind="offload", index=index, tier=offload))
        activations.append(choice or "keep")
    return Setting(
        candidate=candidate,
        num_microbatches=num_microbatches,
        order=order,
        boundaries=boundaries,
        offload=offload,
        heap=heap,
        heap_slack=problem.machine.heap.keep_slack if heap == "keep" else 0.0,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        tiers=tiers,
        activations=tuple(activations),
        pinned=frozenset(pinned),
        moves=tuple(moves),
    )


def find_away_tiers(machine: Machine) -> tuple[TierName, ...]:
    """The tiers beside the device that can be reached from it and back, and may be used."""
    found: list[TierName] = []
    for name in AWAY:
        tier = machine.tier(name)
        linked = machine.link("device", name) is not None and machine.link(name, "device")
        if tier is not None and tier.budget_bytes > 0 and linked:
            found.append(name)
    return tuple(found)


def find_offload_tier(problem: Problem) -> TierName:
    """The tier for what blocks save: what is pinned, the host, or the disk; `device` for none.

    Raises:
        RecipeError: one is pinned that the machine does not have, or an offload without any.
    """
    there = find_away_tiers(problem.machine)
    pinned = problem.pins.offload
    offloads = any(choice == "offload" for _, choice in problem.pins.activations)
    if pinned not in (None, *there) or (offloads and not there):
        place = f"to the tier {pinned}, which" if pinned else "elsewhere, but"
        missing = "does not have" if pinned else "has neither host nor disk"
        raise RecipeError(
            f"saved values are pinned {place} {problem.machine.name} {missing}",
            where="recipe: plan.offload" if pinned else "recipe: plan.activations",
            fix=f"pin to {' or '.join(there)}, or grant that tier a budget"
            if there
            else "leave it out, or grant a budget for host or disk",
        )
    if pinned is not None:
        return pinned
    return there[0] if there else "device"


def build_plan(
    problem: Problem,
    setting: Setting,
    taken: Sequence[bool],
    *,
    num_microbatches: int | None = None,
    prefetch: int = 0,
    budget_bytes: Mapping[TierName, int] | None = None,
    reason: Reason = lambda kind, index, value: "",  # noqa: ARG005 the signature is `Reason`'s
) -> Plan:
    """Turn a state of the search into a plan without a prediction.

    Args:
        problem: what the plan is for.
        setting: the setting of the state.
        taken: one flag per move.
        num_microbatches: a smaller number than the setting's, to look at a shorter step.
        prefetch: how many compute tasks a copy may come before its use.
        budget_bytes: the budget to write into the plan; unlimited if absent.
        reason: gives the words of each choice.
    """
    tiers = {state: list(setting.tiers[state]) for state in STATES}
    activations = list(setting.activations)
    for move, is_taken in zip(setting.moves, taken, strict=True):
        if not is_taken:
            continue
        if move.kind == "recompute" or move.kind == "offload":
            activations[move.index] = move.kind
        else:
            tiers[move.kind][move.index] = move.tier
    model, arithmetic = setting.model, problem.arithmetic
    loss_chunk = setting.candidate.loss_chunk_tokens

    def choose_tier(state: State, index: int) -> Choice[TierName]:
        tier = tiers[state][index]
        return Choice(value=tier, because=reason(state, index, tier))

    def choose_update(index: int) -> Choice[TierName]:
        tier = problem.pins.tier_of("update", setting.chunks[index].pieces)
        return IN_DEVICE if tier is None else Choice(value=tier, because="pinned")

    stride = problem.pins.stride
    offload: Choice[TierName] = NO_OFFLOAD
    if "offload" in activations:
        tier = find_offload_tier(problem)
        offload = Choice(value=tier, because=reason("offload", 0, tier))
    plan = Plan(
        model=model.fingerprint,
        model_name=model.name,
        machine=problem.machine.name,
        length=model.length,
        budget_bytes=budget_bytes or dict.fromkeys(("device", *AWAY), UNLIMITED_BYTES),
        base_bytes=setting.candidate.profile.base_bytes,
        numerics=Numerics(
            microbatch_rows=Choice(value=model.rows, because=reason("microbatch_rows", 0, "")),
            num_microbatches=num_microbatches or setting.num_microbatches,
            num_workers=arithmetic.num_workers,
            compute_dtype=arithmetic.compute_dtype,
            loss_chunk_tokens=Choice(value=loss_chunk, because=reason("loss_chunk_tokens", 0, "")),
            tied_sum=arithmetic.tied_sum,
            attention=arithmetic.attention,
            num_threads=arithmetic.num_threads,
            device=arithmetic.device,
            instructions=arithmetic.instructions,
        ),
        optimizer=problem.optimizer,
        heap=Choice(value=setting.heap, because=reason("heap", 0, setting.heap)),
        heap_slack=setting.heap_slack,
        chunk_bytes=Choice(value=setting.chunk_bytes, because=reason("chunk_bytes", 0, "")),
        chunks=tuple(
            ChunkPlan(
                pieces=chunk.pieces,
                group=chunk.group,
                trainable=chunk.trainable,
                parameters=choose_tier("parameters", index),
                gradients=choose_tier("gradients", index),
                optimizer=choose_tier("optimizer", index),
                update=choose_update(index),
            )
            for index, chunk in enumerate(setting.chunks)
        ),
        blocks=tuple(
            BlockPlan(
                name=block.name,
                activations=Choice(
                    value=activations[index],
                    because=reason("recompute", index, activations[index]),
                ),
            )
            for index, block in enumerate(model.blocks)
        ),
        pins=problem.pins.names,
        prediction=None,
        order=Choice(value=setting.order, because=reason("order", 0, setting.order)),
        boundaries=Choice(
            value=setting.boundaries, because=reason("boundaries", 0, setting.boundaries)
        ),
        offload=offload,
        stride=NO_STRIDE if stride is None else Choice(value=stride, because="pinned"),
        prefetch=Choice(value=prefetch, because=reason("prefetch", 0, str(prefetch))),
        pipeline=problem.pipeline,
    )
    return plan if budget_bytes is None else replace(plan, budget_bytes=dict(budget_bytes))


def _can_move(
    problem: Problem, chunk: ProposedChunk, state: State, num_microbatches: int, order: Order
) -> bool:
    match state:
        case "parameters":
            return True
        case "gradients":
            # Without clipping, a gradient is used up where it arises if all micro-batches go
            # through its block together, or there is only one.
            waits = num_microbatches > 1 and order != "layered"
            return chunk.trainable and (problem.optimizer.clips or waits)
        case "optimizer":
            return chunk.trainable and bool(problem.optimizer.states or problem.optimizer.master)
