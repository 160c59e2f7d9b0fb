"""The flat space of parameters: where each chunk and each parameter lies.

In: a plan's chunks and a model. Out: a `Layout`.
Always: chunks start at multiples of CHUNK_ALIGN_ELEMENTS and have whole pages in every state;
slots start at multiples of SLOT_ALIGN_ELEMENTS; a parameter that several chunks share lies in one
run over neighbouring chunks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Final

from packhorse.errors import MismatchError, RefusedError
from packhorse.model.spec import Model, Parameter, ParameterName
from packhorse.plan.spec import ChunkPlan, Piece, Plan
from packhorse.program.buffers import (
    CHUNK_ALIGN_ELEMENTS,
    PAGE_BYTES,
    SLOT_ALIGN_ELEMENTS,
    Chunk,
    ChunkId,
    Layout,
    Slot,
)

MIN_ITEM_BYTES: Final = 2  # the narrowest state is bf16
CHUNK_LENGTH_UNIT: Final = PAGE_BYTES // MIN_ITEM_BYTES
FULL_PRECISION: Final = "float32"


def lay_out_chunks(plan: Plan, model: Model) -> Layout:
    """Place every parameter of a model as the plan's chunks say.

    Raises:
        MismatchError: a parameter is unknown, missing, or of another group or trainability.
        RefusedError: a piece is out of order, leaves a gap or is not aligned.
    """
    chunks: list[Chunk] = []
    slots: dict[str, Slot] = {}
    placed: dict[str, int] = {}
    start = 0
    for index, planned in enumerate(plan.chunks):
        chunk = _place_chunk(index, planned, start=start, model=model, slots=slots, placed=placed)
        chunks.append(chunk)
        start = _round_up(chunk.start + chunk.num_elements, CHUNK_ALIGN_ELEMENTS)
    _check_coverage(model, placed)
    states = dict.fromkeys(("grad", *plan.optimizer.states), FULL_PRECISION)
    if plan.optimizer.master:
        states["master"] = FULL_PRECISION
    return Layout(
        chunks=tuple(chunks),
        slots=slots,
        dtypes={"param": plan.numerics.compute_dtype, **states},
    )


def find_chunks(layout: Layout) -> Mapping[str, tuple[Chunk, ...]]:
    """The chunks that hold each parameter, in order; those of a layout follow each other."""
    starts = [chunk.start for chunk in layout.chunks]
    return {
        name: layout.chunks[bisect_right(starts, slot.start) - 1 : bisect_left(starts, slot.stop)]
        for name, slot in layout.slots.items()
    }


def _place_chunk(
    index: int,
    planned: ChunkPlan,
    *,
    start: int,
    model: Model,
    slots: dict[str, Slot],
    placed: dict[str, int],
) -> Chunk:
    # Fills `slots` and `placed` (elements of each parameter placed so far).
    where = f"plan.chunks[{index}]"
    if not planned.pieces:
        raise RefusedError(
            f"chunk {index} holds nothing", where=where, fix="remove it, or give it a parameter"
        )
    end = start
    for position, piece in enumerate(planned.pieces):
        parameter = _find_parameter(model, piece, planned, where)
        end = _round_up(end, SLOT_ALIGN_ELEMENTS)
        _check_piece(piece, parameter, placed.get(piece.parameter, 0), where)
        is_last = piece.stop == parameter.num_elements
        if piece.start > 0:
            _check_continues(piece, position, end, slots[piece.parameter], where)
        else:
            slots[piece.parameter] = Slot(
                parameter=piece.parameter,
                start=end,
                shape=parameter.shape,
                num_elements=parameter.num_elements,
            )
        if not is_last:
            _check_full(piece, position, len(planned.pieces), where)
        placed[piece.parameter] = piece.stop
        end += piece.stop - piece.start
    return Chunk(
        id=ChunkId(index),
        start=start,
        num_elements=_round_up(end - start, CHUNK_LENGTH_UNIT),
        group=planned.group,
        trainable=planned.trainable,
    )


def _find_parameter(model: Model, piece: Piece, planned: ChunkPlan, where: str) -> Parameter:
    parameter = model.parameters.get(ParameterName(piece.parameter))
    if parameter is None:
        raise MismatchError(
            f"the plan names parameter {piece.parameter}, which the model does not have",
            where=where,
            fix="make the plan again for this model",
        )
    if parameter.group != planned.group:
        raise MismatchError(
            f"the chunk is for optimizer group {planned.group}, "
            f"but {piece.parameter} is in group {parameter.group}",
            where=where,
            fix="a chunk never mixes groups: move the parameter, or make the plan again",
        )
    if parameter.trainable != planned.trainable:
        words = {True: "trained", False: "frozen"}
        raise MismatchError(
            f"the chunk is {words[planned.trainable]}, "
            f"but {piece.parameter} is {words[parameter.trainable]}",
            where=where,
            fix="frozen and trained parameters never share a chunk: make the plan again",
        )
    return parameter


def _check_piece(piece: Piece, parameter: Parameter, expected: int, where: str) -> None:
    if piece.start != expected:
        problem = "overlaps what was" if piece.start < expected else "leaves a gap after what was"
        raise RefusedError(
            f"piece [{piece.start}, {piece.stop}) of {piece.parameter} {problem} "
            f"placed before: the next element is {expected}",
            where=where,
            fix=f"let the piece start at {expected}",
        )
    if not piece.start < piece.stop <= parameter.num_elements:
        raise RefusedError(
            f"piece [{piece.start}, {piece.stop}) is empty or outside of {piece.parameter}, "
            f"which has {parameter.num_elements} elements",
            where=where,
            fix="correct the piece, or make the plan again",
        )


def _check_continues(piece: Piece, position: int, end: int, slot: Slot, where: str) -> None:
    if position > 0 or end != slot.start + piece.start:
        raise RefusedError(
            f"piece [{piece.start}, {piece.stop}) of {piece.parameter} does not follow "
            "the piece before it: a parameter lies in one run over neighbouring chunks",
            where=where,
            fix="put the pieces of a parameter first in neighbouring chunks",
        )


def _check_full(piece: Piece, position: int, num_pieces: int, where: str) -> None:
    if num_pieces > 1 or position > 0:
        raise RefusedError(
            f"{piece.parameter} continues in the next chunk, so nothing else may share this one",
            where=where,
            fix="move the other pieces to another chunk",
        )
    size = piece.stop - piece.start
    if size % CHUNK_ALIGN_ELEMENTS:
        raise RefusedError(
            f"piece [{piece.start}, {piece.stop}) of {piece.parameter} continues in the next "
            f"chunk, but its {size} elements are no multiple of {CHUNK_ALIGN_ELEMENTS}",
            where=where,
            fix=f"cut the parameter at a multiple of {CHUNK_ALIGN_ELEMENTS} elements",
        )


def _check_coverage(model: Model, placed: dict[str, int]) -> None:
    for name, parameter in model.parameters.items():
        done = placed.get(name)
        if done is None:
            raise MismatchError(
                f"no chunk of the plan holds parameter {name}",
                where="plan.chunks",
                fix="make the plan again for this model",
            )
        if done != parameter.num_elements:
            raise RefusedError(
                f"the plan's chunks hold {done} of the {parameter.num_elements} elements of {name}",
                where="plan.chunks",
                fix="add a piece for the rest, or make the plan again",
            )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
