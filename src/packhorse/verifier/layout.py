"""Rule `layout`: the flat space of parameters is cut so that no cut changes a number.

Chunks stand in order, start aligned and do not overlap. Slots start aligned, do not overlap, are as
long as their shape, and lie wholly in chunks of one group, all trained or all frozen; a slot that
chunks cut is cut at multiples of NORM_SEGMENT_ELEMENTS from its start. With a model: one slot for
each parameter, of its shape, in chunks of its group.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Final

from packhorse.model.spec import ITEM_BYTES, Model, Parameter, ParameterName
from packhorse.program.buffers import (
    CHUNK_ALIGN_ELEMENTS,
    NORM_SEGMENT_ELEMENTS,
    SLOT_ALIGN_ELEMENTS,
    Chunk,
    Slot,
)
from packhorse.program.program import Program
from packhorse.verifier.failures import make_error

RULE: Final = "layout"


def check_layout(program: Program, model: Model | None) -> None:
    """Check chunks, then slots, then both against the model."""
    _check_chunks(program)
    slots = sorted(program.layout.slots.values(), key=lambda slot: slot.start)
    for before, slot in pairwise(slots):
        if slot.start < before.stop:
            what = f"the slots of {before.parameter} and {slot.parameter} overlap: {before.stop}"
            raise make_error(program, RULE, None, f"{what} > {slot.start}")
    first = 0
    chunks = program.layout.chunks
    for slot in slots:
        while (
            first < len(chunks) and chunks[first].start + chunks[first].num_elements <= slot.start
        ):
            first += 1
        last = first
        while last < len(chunks) and chunks[last].start < slot.stop:
            last += 1
        _check_slot(program, slot, chunks[first:last])
        if model is not None:
            _check_parameter(program, model, slot, chunks[first:last])
    for state in ("param", "grad") if program.kind == "train_step" else ("param",):
        if state not in program.layout.dtypes:
            raise make_error(program, RULE, None, f"state {state} has no dtype")
    for state, dtype in program.layout.dtypes.items():
        if dtype not in ITEM_BYTES:
            raise make_error(program, RULE, None, f"state {state} has the unknown dtype {dtype!r}")
    if model is not None:
        for name in model.parameters:
            if name not in program.layout.slots:
                raise make_error(program, RULE, None, f"parameter {name} has no slot")


def _check_chunks(program: Program) -> None:
    stop = 0
    seen: set[int] = set()
    for chunk in program.layout.chunks:
        if chunk.id in seen:
            raise make_error(program, RULE, None, f"chunk {chunk.id} is declared twice")
        seen.add(chunk.id)
        if chunk.start % CHUNK_ALIGN_ELEMENTS:
            what = f"chunk {chunk.id} starts at element {chunk.start}, no multiple of"
            raise make_error(program, RULE, None, f"{what} {CHUNK_ALIGN_ELEMENTS}")
        if chunk.num_elements <= 0:
            what = f"chunk {chunk.id} has {chunk.num_elements} elements"
            raise make_error(program, RULE, None, what)
        if chunk.start < stop:
            what = f"chunk {chunk.id} starts at element {chunk.start}, before the one before it"
            raise make_error(program, RULE, None, f"{what} ends at {stop}")
        stop = chunk.start + chunk.num_elements


def _check_slot(program: Program, slot: Slot, chunks: tuple[Chunk, ...]) -> None:
    name = slot.parameter
    if slot.start % SLOT_ALIGN_ELEMENTS:
        what = f"the slot of {name} starts at element {slot.start}, no multiple of"
        raise make_error(program, RULE, None, f"{what} {SLOT_ALIGN_ELEMENTS}")
    if slot.num_elements != prod(slot.shape):
        what = f"the slot of {name} has {slot.num_elements} elements, its shape {slot.shape}"
        raise make_error(program, RULE, None, f"{what} has {prod(slot.shape)}")
    covered = slot.start
    for chunk in chunks:
        if chunk.start > covered:
            break
        if chunk.start > slot.start and (chunk.start - slot.start) % NORM_SEGMENT_ELEMENTS:
            what = f"chunk {chunk.id} cuts {name} after {chunk.start - slot.start} elements, no"
            what = f"{what} multiple of the norm's segments of {NORM_SEGMENT_ELEMENTS}"
            raise make_error(program, RULE, None, what)
        if (chunk.group, chunk.trainable) != (chunks[0].group, chunks[0].trainable):
            what = f"{name} lies in chunks {chunks[0].id} and {chunk.id} of different groups"
            raise make_error(program, RULE, None, f"{what}, or one of them frozen")
        covered = chunk.start + chunk.num_elements
    if covered < slot.stop:
        what = f"{name} ends at element {slot.stop}, but chunks hold it only up to {covered}"
        raise make_error(program, RULE, None, what)


def _check_parameter(program: Program, model: Model, slot: Slot, chunks: tuple[Chunk, ...]) -> None:
    parameter = model.parameters.get(ParameterName(slot.parameter))
    if parameter is None:
        what = f"the slot {slot.parameter} is no parameter of the model"
        raise make_error(program, RULE, None, what)
    if slot.shape != parameter.shape:
        what = f"the slot of {slot.parameter} has shape {slot.shape}, the model {parameter.shape}"
        raise make_error(program, RULE, None, what)
    for chunk in chunks:
        if (chunk.group, chunk.trainable) != (parameter.group, parameter.trainable):
            what = f"{_describe(parameter)} lies in chunk {chunk.id} of group {chunk.group!r},"
            state = "trained" if chunk.trainable else "frozen"
            raise make_error(program, RULE, None, f"{what} which is {state}")


def _describe(parameter: Parameter) -> str:
    state = "trained" if parameter.trainable else "frozen"
    return f"{parameter.name} ({state}, group {parameter.group!r})"
