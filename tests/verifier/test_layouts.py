"""Rule `layout`: chunks and slots that would change a number, or hold nothing, are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edits import reject
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.program.program import Program
from packhorse.verifier.rules import verify_program

# `layers.1.proj.weight` has 1,048,576 elements and is cut in two chunks.
MODEL = make_model(num_layers=1, hidden=1024, vocabulary=64)
CUT = "layers.1.proj.weight"
PROGRAM = lower_plan(make_plan(MODEL, chunk_bytes=2 << 20), MODEL, "train_step")
CHUNKS = PROGRAM.layout.chunks
CUT_AT = next(i for i, c in enumerate(CHUNKS) if c.start == PROGRAM.layout.slots[CUT].start)


def _with_chunk(index: int, **fields: Any) -> Program:  # Any: fields of a chunk
    chunks = list(CHUNKS)
    chunks[index] = replace(chunks[index], **fields)
    return replace(PROGRAM, layout=replace(PROGRAM.layout, chunks=tuple(chunks)))


def _with_slot(name: str, **fields: Any) -> Program:  # Any: fields of a slot
    slots = {**PROGRAM.layout.slots, name: replace(PROGRAM.layout.slots[name], **fields)}
    return replace(PROGRAM, layout=replace(PROGRAM.layout, slots=slots))


def test_a_parameter_over_two_chunks_passes() -> None:
    assert len(PROGRAM.layout.chunks_of(CUT)) == 2
    verify_program(PROGRAM, MODEL)


@pytest.mark.parametrize("model", [MODEL, None])
def test_chunks_are_aligned_apart_and_not_empty(model: Any) -> None:  # Any: model or None
    start = CHUNKS[1].start
    reject(_with_chunk(1, start=start + 32), model, "layout", f"element {start + 32}", "524288")
    reject(_with_chunk(1, num_elements=0), model, "layout", "chunk 1 has 0 elements")
    reject(_with_chunk(1, id=0), model, "layout", "chunk 0 is declared twice")
    long = _with_chunk(0, num_elements=CHUNKS[1].start + 1)
    reject(long, model, "layout", "chunk 1 starts", f"ends at {CHUNKS[1].start + 1}")


@pytest.mark.parametrize("model", [MODEL, None])
def test_slots_are_aligned_apart_and_as_long_as_their_shape(model: Any) -> None:  # Any: as above
    slot = PROGRAM.layout.slots["layers.1.proj.bias"]
    reject(_with_slot(slot.parameter, start=slot.start + 1), model, "layout", "no multiple of 32")
    reject(_with_slot(slot.parameter, start=slot.start - 32), model, "layout", "overlap")
    reject(_with_slot(slot.parameter, num_elements=64), model, "layout", "64 elements", "1024")


@pytest.mark.parametrize("model", [MODEL, None])
def test_a_slot_lies_wholly_in_chunks_of_one_group(model: Any) -> None:  # Any: as above
    second = CHUNKS[CUT_AT + 1]
    short = _with_chunk(CUT_AT + 1, num_elements=second.num_elements - 1)
    reject(short, model, "layout", CUT, "only up to")
    gap = _with_chunk(CUT_AT, num_elements=CHUNKS[CUT_AT].num_elements - 16_384)
    reject(gap, model, "layout", CUT, "only up to")
    reject(_with_chunk(CUT_AT + 1, group="other"), model, "layout", CUT, "different groups")
    reject(_with_chunk(CUT_AT + 1, trainable=False), model, "layout", CUT, "frozen")


def test_a_cut_lies_on_a_segment_of_the_norm() -> None:
    slot = PROGRAM.layout.slots[CUT]
    shifted = _with_slot(CUT, start=slot.start + 32, shape=(16, 65534), num_elements=1_048_544)
    reject(shifted, None, "layout", CUT, "after 524256 elements", "16384")


def test_dtypes_are_known() -> None:
    for dtypes, words in (
        ({**PROGRAM.layout.dtypes, "exp_avg": "float31"}, "'float31'"),
        ({"param": "float32"}, "state grad has no dtype"),
    ):
        program = replace(PROGRAM, layout=replace(PROGRAM.layout, dtypes=dtypes))
        reject(program, None, "layout", words)


def test_slots_are_the_parameters_of_the_model() -> None:
    slots = dict(PROGRAM.layout.slots)
    slot = slots.pop("layers.1.proj.bias")
    missing = replace(PROGRAM, layout=replace(PROGRAM.layout, slots=slots))
    reject(missing, MODEL, "layout", "layers.1.proj.bias has no slot")
    renamed = {**slots, "bias": replace(slot, parameter="bias")}
    reject(replace(PROGRAM, layout=replace(PROGRAM.layout, slots=renamed)), MODEL, "layout", "bias")
    reject(
        _with_slot("embed.weight", shape=(1024, 64)), MODEL, "layout", "(1024, 64)", "(64, 1024)"
    )
    frozen = make_model(num_layers=1, hidden=1024, vocabulary=64, frozen=("embed",))
    reject(PROGRAM, frozen, "layout", "embed.weight (frozen", "which is trained")
