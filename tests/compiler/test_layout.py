"""Chunks and the flat space: alignment, coverage, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import make_model, make_plan

from packhorse.compiler.chunks import aligned_elements, pack_chunks
from packhorse.compiler.layout import lay_out_chunks
from packhorse.compiler.lower import lower_plan
from packhorse.errors import InputError, MismatchError, RefusedError
from packhorse.plan.spec import Choice, Piece
from packhorse.program.buffers import CHUNK_ALIGN_ELEMENTS, PAGE_BYTES, SLOT_ALIGN_ELEMENTS
from packhorse.units import MIB

BIG = {"hidden": 1024, "vocabulary": 1200}
SIZES = st.sampled_from([(32, 64), (33, 65), (1024, 1200), (1000, 2100)])
CHUNK_BYTES = st.sampled_from([1, 4096, 8192, 100_000, 2 * MIB, 5 * MIB, 64 * MIB])


@st.composite
def cases(draw):
    hidden, vocabulary = draw(SIZES)
    model = make_model(
        num_layers=draw(st.integers(1, 4)),
        hidden=hidden,
        vocabulary=vocabulary,
        tied_head=draw(st.booleans()),
        shared_layers=draw(st.sampled_from([(), (1,), (1, 2)])),
        frozen=draw(st.sampled_from([(), ("embed",), ("layers.1",)])),
    )
    return model, draw(CHUNK_BYTES)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_proposed_chunks_hold_every_parameter_once_and_never_mix(case):
    model, chunk_bytes = case
    placed = dict.fromkeys(model.parameters, 0)
    for chunk in pack_chunks(model, chunk_bytes):
        names = {piece.parameter for piece in chunk.pieces}
        assert {model.parameters[name].group for name in names} == {chunk.group}
        assert {model.parameters[name].trainable for name in names} == {chunk.trainable}
        if any(len(model.parameters[name].blocks) > 1 for name in names):
            assert len(names) == 1
        assert chunk.blocks == tuple(
            sorted({user for name in names for user in model.parameters[name].blocks})
        )
        for piece in chunk.pieces:
            assert piece.start == placed[piece.parameter]
            placed[piece.parameter] = piece.stop
        smallest = max(chunk_bytes // 4, CHUNK_ALIGN_ELEMENTS)
        assert aligned_elements(chunk.pieces) <= smallest
    assert placed == {name: p.num_elements for name, p in model.parameters.items()}


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_flat_space_is_aligned_and_nothing_overlaps(case):
    model, chunk_bytes = case
    layout = lay_out_chunks(make_plan(model, chunk_bytes=chunk_bytes), model)
    assert set(layout.slots) == set(model.parameters)
    end = 0
    for chunk in layout.chunks:
        assert chunk.start >= end
        assert chunk.start % CHUNK_ALIGN_ELEMENTS == 0
        assert chunk.num_elements * 2 % PAGE_BYTES == 0
        end = chunk.start + chunk.num_elements
    end = 0
    for slot in sorted(layout.slots.values(), key=lambda slot: slot.start):
        assert slot.start >= end
        assert slot.start % SLOT_ALIGN_ELEMENTS == 0
        end = slot.stop
        chunks = layout.chunks_of(slot.parameter)
        assert chunks[0].start <= slot.start
        assert slot.stop <= chunks[-1].start + chunks[-1].num_elements
        for left, right in pairwise(chunks):
            assert left.start + left.num_elements == right.start
            assert layout.slots_of(left) == (slot,)
            assert right.id == left.id + 1


def test_a_large_parameter_is_cut_and_its_rest_shares_a_chunk():
    model = make_model(num_layers=1, **BIG)
    pieces = [chunk.pieces for chunk in pack_chunks(model, 3 * MIB)]
    assert pieces[0] == (Piece(parameter="embed.weight", start=0, stop=524_288),)
    assert pieces[1] == (Piece(parameter="embed.weight", start=524_288, stop=1_048_576),)
    assert pieces[2] == (Piece(parameter="embed.weight", start=1_048_576, stop=1_228_800),)


def test_small_chunks_are_merged_over_all_blocks():
    model = make_model(num_layers=5, **BIG)
    small = [c for c in pack_chunks(model, 8 * MIB) if c.group == "no_decay"]
    assert len(small) == 1
    assert small[0].blocks == (1, 2, 3, 4, 5)
    assert len(small[0].pieces) == 10


def test_a_chunk_size_of_zero_is_refused():
    with pytest.raises(InputError, match="chunk_bytes is 0"):
        pack_chunks(make_model(), 0)


def test_states_have_the_dtype_of_their_use():
    model = make_model(dtype="bfloat16")
    layout = lay_out_chunks(make_plan(model, compute_dtype="bfloat16"), model)
    assert layout.dtypes == {
        "param": "bfloat16",
        "grad": "float32",
        "exp_avg": "float32",
        "exp_avg_sq": "float32",
        "master": "float32",
    }


def change_chunk(plan, index, **changes):
    chunks = list(plan.chunks)
    chunks[index] = replace(chunks[index], **changes)
    return replace(plan, chunks=tuple(chunks))


def test_a_plan_of_another_model_names_the_first_difference():
    model = make_model(num_layers=2)
    plan = make_plan(make_model(num_layers=3))
    with pytest.raises(MismatchError, match=r"block 3 is layers\.3 in the plan, head in the model"):
        lower_plan(plan, model, "train_step")


def test_another_shape_is_named():
    plan = make_plan(make_model(length=8))
    with pytest.raises(MismatchError, match="length is 8 in the plan, 16 in the model"):
        lower_plan(plan, make_model(length=16), "train_step")


def test_blocks_that_differ_are_named():
    model = make_model()
    plan = make_plan(model)
    with pytest.raises(MismatchError, match="block 3 is missing in the plan, head in the model"):
        lower_plan(replace(plan, blocks=plan.blocks[:-1]), model, "train_step")
    other = replace(plan, blocks=(plan.blocks[1], plan.blocks[0], *plan.blocks[2:]))
    with pytest.raises(MismatchError, match=r"block 0 is layers\.1 in the plan, embed in"):
        lower_plan(other, model, "train_step")


def test_other_frozen_parameters_are_named():
    plan = make_plan(make_model())
    with pytest.raises(MismatchError, match=r"chunk is trained, but embed\.weight is frozen"):
        lower_plan(plan, make_model(frozen=("embed",)), "train_step")


def test_a_parameter_of_another_group_is_named():
    model = make_model()
    plan = change_chunk(make_plan(model), 0, group="no_decay")
    with pytest.raises(MismatchError, match=r"embed\.weight is in group decay"):
        lower_plan(plan, model, "train_step")


def test_a_parameter_without_a_chunk_is_named():
    model = make_model()
    plan = make_plan(model)
    with pytest.raises(MismatchError, match=r"no chunk of the plan holds parameter head\.weight"):
        lower_plan(replace(plan, chunks=plan.chunks[:-1]), model, "train_step")


def test_an_unknown_parameter_is_named():
    model = make_model()
    plan = change_chunk(make_plan(model), 0, pieces=(Piece(parameter="wte", start=0, stop=1),))
    with pytest.raises(MismatchError, match="parameter wte, which the model does not have"):
        lower_plan(plan, model, "train_step")


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((), "chunk 0 holds nothing"),
        (((64, 2048),), "leaves a gap"),
        (((0, 2048), (0, 2048)), "overlaps"),
        (((0, 4096),), "outside of embed"),
        (((0, 1024),), "1024 elements are no multiple of 524288"),
        (((0, 1024), (1024, 2048)), "nothing else may share"),
    ],
)
def test_pieces_that_do_not_fit_together_are_refused(pieces, message):
    model = make_model()
    made = tuple(Piece(parameter="embed.weight", start=a, stop=b) for a, b in pieces)
    with pytest.raises(RefusedError, match=message) as caught:
        lower_plan(change_chunk(make_plan(model), 0, pieces=made), model, "train_step")
    assert caught.value.where == "plan.chunks[0]"
    assert caught.value.fix


def test_pieces_of_a_parameter_lie_in_neighbouring_chunks():
    model = make_model(num_layers=1, **BIG)
    plan = make_plan(model, chunk_bytes=2 * MIB)
    first, second, third, fourth, *rest = plan.chunks
    swapped = replace(plan, chunks=(first, second, fourth, third, *rest))
    with pytest.raises(RefusedError, match="does not follow the piece before it"):
        lower_plan(swapped, model, "train_step")


def test_a_cut_parameter_must_be_whole():
    model = make_model(num_layers=1, **BIG)
    plan = make_plan(model, chunk_bytes=2 * MIB)
    without = replace(plan, chunks=(*plan.chunks[:2], *plan.chunks[3:]))
    with pytest.raises(RefusedError, match=r"1048576 of the 1228800 elements of embed\.weight"):
        lower_plan(without, model, "train_step")


def test_a_tier_without_a_budget_is_refused():
    model = make_model()
    plan = make_plan(model, optimizer="disk", budget_bytes={"device": 1 << 30})
    with pytest.raises(RefusedError, match="chunk 0 keeps its optimizer in tier disk"):
        lower_plan(plan, model, "train_step")


def test_layers_with_sums_of_ties_per_microbatch_are_refused():
    model, untied = make_model(tied_head=True), make_model()
    lower_plan(make_plan(model, order="layered"), model, "train_step")
    per_step = make_plan(model, order="layered", num_microbatches=2, tied_sum="per_step")
    lower_plan(per_step, model, "train_step")
    lower_plan(make_plan(untied, order="layered", num_microbatches=2), untied, "train_step")
    plan = make_plan(model, order="layered", num_microbatches=2)
    with pytest.raises(RefusedError, match="used by several blocks"):
        lower_plan(plan, model, "train_step")


def test_a_trained_parameter_that_the_loss_ignores_is_refused():
    model = make_model()
    name = "head.weight"
    unused = replace(model.parameters[name], blocks=())
    model = replace(model, parameters={**model.parameters, name: unused})
    with pytest.raises(RefusedError, match=r"head\.weight is to be trained, but the loss"):
        lower_plan(make_plan(model), model, "train_step")


def test_several_workers_are_refused():
    model = make_model()
    plan = make_plan(model)
    plan = replace(plan, numerics=replace(plan.numerics, num_workers=2))
    with pytest.raises(RefusedError, match="one process is one worker"):
        lower_plan(plan, model, "train_step")


def test_a_step_without_micro_batches_is_refused():
    model = make_model()
    with pytest.raises(RefusedError, match="the plan has 0 micro-batches"):
        lower_plan(make_plan(model, num_microbatches=0), model, "train_step")


def test_pinned_tiers_reach_the_buffers():
    model = make_model()
    plan = change_chunk(make_plan(model), 0, optimizer=Choice(value="disk", because="a test"))
    program = lower_plan(plan, model, "train_step")
    assert program.buffers["param/0"].home == "device"
    assert program.buffers["exp_avg/0"].home == "disk"
    assert program.buffers["exp_avg/1"].home == "device"
    assert program.buffers["grad/0"].home is None
