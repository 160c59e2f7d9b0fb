"""Which parameters share a chunk: the proposal that the search fills with tiers.

In: a model and the wanted size of a chunk. Out: chunks in execution order of their first user.
Always: every parameter is covered exactly once and in order, a chunk never mixes groups nor
frozen with trained, and a parameter that several blocks use shares its chunks with no other.

    for each group, trained and frozen apart:
        for each block: fill chunks up to the wanted size, cut what is larger
        merge the chunks that are very small (norm weights, biases) over all blocks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.errors import InputError
from packhorse.model.parts import whole_of
from packhorse.model.spec import BlockId, Model, Parameter, ParameterName
from packhorse.plan.spec import Piece
from packhorse.program.buffers import CHUNK_ALIGN_ELEMENTS, SLOT_ALIGN_ELEMENTS
from packhorse.units import MIB

STATE_ITEM_BYTES: Final = 4
SMALL_CHUNK_BYTES: Final = MIB
SMALL_CHUNK_SHARE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedChunk:
    """A chunk before tiers are chosen; `blocks` are all users of its parameters, in order."""

    pieces: tuple[Piece, ...]
    group: str
    trainable: bool
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    # One chunk while it is packed; a fixed one (tied, or with a cut parameter) is never merged.
    pieces: tuple[Piece, ...]
    group: str
    trainable: bool
    fixed: bool


def pack_chunks(model: Model, chunk_bytes: int) -> tuple[ProposedChunk, ...]:
    """Chunk the parameters of a model by the block that uses them first.

    Args:
        model: the traced model.
        chunk_bytes: most bytes of one float32 state of a chunk. A parameter larger than this is
            cut in pieces of a multiple of CHUNK_ALIGN_ELEMENTS elements, at least one of them.

    Raises:
        InputError: `chunk_bytes` is not positive.
    """
    if chunk_bytes <= 0:
        raise InputError(
            f"chunk_bytes is {chunk_bytes}; a chunk needs at least one byte",
            where="plan.chunk_bytes",
            fix="give a size such as 64MiB, or leave it out",
        )
    limit = max(chunk_bytes // STATE_ITEM_BYTES, 1)
    runs: list[_Run] = []
    for members in _by_block(model):
        runs += _fill(members, limit, own=_is_summed(model, members[0]))
    return tuple(_propose(model, run) for run in _merge_small(runs, limit))


def aligned_elements(pieces: Iterable[Piece]) -> int:
    """Length in elements of pieces laid one after another, each at an aligned offset."""
    end = 0
    for piece in pieces:
        end = _round_up(end, SLOT_ALIGN_ELEMENTS) + piece.stop - piece.start
    return end


def _by_block(model: Model) -> list[list[Parameter]]:
    # Lists of parameters that may share chunks, in execution order of the first user. Parameters
    # without users come last.
    found: dict[tuple[int, str, bool, str], list[Parameter]] = {}
    last = len(model.blocks)
    order: list[Parameter] = []
    seen: set[str] = set()
    for block in model.blocks:
        for name in block.parameters:
            if name not in seen:
                seen.add(name)
                order.append(model.parameters[name])
    order += [p for name, p in model.parameters.items() if name not in seen]
    for parameter in order:
        first = parameter.blocks[0] if parameter.blocks else last
        own = parameter.name if _is_summed(model, parameter) else ""
        key = (first, parameter.group, parameter.trainable, own)
        found.setdefault(key, []).append(parameter)
    return list(found.values())


def _fill(members: Sequence[Parameter], limit: int, *, own: bool) -> list[_Run]:
    # `own`: the chunks of one parameter, which they share with no other.
    runs: list[tuple[Piece, ...]] = []
    current: tuple[Piece, ...] = ()
    for parameter in members:
        pieces = _cut(parameter, limit)
        if len(pieces) > 1:
            runs += [current] if current else []
            runs += [(piece,) for piece in pieces[:-1]]
            current = (pieces[-1],)
        elif current and aligned_elements((*current, *pieces)) > limit:
            runs.append(current)
            current = pieces
        else:
            current = (*current, *pieces)
    runs += [current] if current else []
    first = members[0]
    whole = {parameter.name: parameter.num_elements for parameter in members}
    return [
        _Run(
            pieces=pieces,
            group=first.group,
            trainable=first.trainable,
            fixed=own or any(p.stop - p.start < whole[ParameterName(p.parameter)] for p in pieces),
        )
        for pieces in runs
    ]


def _is_summed(model: Model, parameter: Parameter) -> bool:
    # Whether several blocks use it, on this rank or any.
    return len(whole_of(model).parameters[parameter.name].blocks) > 1


def _cut(parameter: Parameter, limit: int) -> tuple[Piece, ...]:
    size = parameter.num_elements
    step = max(limit // CHUNK_ALIGN_ELEMENTS, 1) * CHUNK_ALIGN_ELEMENTS
    if size <= limit or size <= step:
        return (Piece(parameter=parameter.name, start=0, stop=size),)
    return tuple(
        Piece(parameter=parameter.name, start=start, stop=min(start + step, size))
        for start in range(0, size, step)
    )


def _merge_small(runs: Sequence[_Run], limit: int) -> list[_Run]:
    # Chunks much smaller than the wanted size cost a transfer each and save nothing.
    small = min(SMALL_CHUNK_BYTES // STATE_ITEM_BYTES, limit // SMALL_CHUNK_SHARE)
    merged: list[_Run] = []
    open_at: dict[tuple[str, bool], int] = {}
    for run in runs:
        if run.fixed or aligned_elements(run.pieces) >= small:
            merged.append(run)
            continue
        key = (run.group, run.trainable)
        if key in open_at:
            host = merged[open_at[key]]
            pieces = (*host.pieces, *run.pieces)
            if aligned_elements(pieces) <= limit:
                merged[open_at[key]] = _Run(
                    pieces=pieces, group=run.group, trainable=run.trainable, fixed=False
                )
                continue
        open_at[key] = len(merged)
        merged.append(run)
    return merged


def _propose(model: Model, run: _Run) -> ProposedChunk:
    users = {
        user
        for piece in run.pieces
        for user in model.parameters[ParameterName(piece.parameter)].blocks
    }
    return ProposedChunk(
        pieces=run.pieces,
        group=run.group,
        trainable=run.trainable,
        blocks=tuple(sorted(users)),
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
