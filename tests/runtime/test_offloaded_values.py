"""What blocks save goes to host or disk and comes back: no number changes.

Every run is in audit mode: what is freed is filled with NaN, and all bytes are counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from subjects import find_subject
from torch import Tensor

from bench.planned import (
    Subject,
    Ways,
    make_plan,
    open_engine,
    train_by_plan,
)
from bench.reference import Curve, find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_optimizer_words, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.errors import AuditError
from packhorse.graph.code import SavedLayout
from packhorse.machine.process_memory import resident_bytes
from packhorse.optim.optimizers import AdamW
from packhorse.program.buffers import BufferId
from packhorse.program.program import Program
from packhorse.program.tasks import Copy
from packhorse.runtime.disk_places import find_places, find_turns
from packhorse.runtime.saved_values import (
    SpareMemory,
    _Mapped,
    map_parts,
    own_tensors,
    put_together,
    take_apart,
)
from packhorse.storage.extents import align_up
from packhorse.storage.mapping import PAGE_BYTES
from packhorse.units import KIB, MIB
from packhorse.verifier.rules import verify_program

ALL = Ways(activations=("offload",), tied_sum="per_step")
MIXED = Ways(
    parameters=("disk", "device"),
    optimizer=("disk",),
    activations=("offload", "keep", "recompute"),
    heap="map",
    prefetch=2,
    tied_sum="per_step",
)
WORDS = AdamW(lr=3e-3)


@cache
def plain_curve(name: str, count: int, optimizer: str) -> Curve:
    return train_plainly(
        build_model(ZOO[name]),
        make_optimizer_words(optimizer, ZOO[name], "all"),
        make_steps(ZOO[name], num_steps=3, num_microbatches=count),
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("ways", [ALL, MIXED], ids=["all", "mixed"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "weave"])
def test_offloaded_values_come_back_as_they_were(
    name: str, count: int, ways: Ways, tier, optimizer, tmp_path: Path
) -> None:
    curve = train_by_plan(
        find_subject(name, "all", optimizer),
        replace(ways, offload=tier, tied_sum="per_microbatch"),
        make_steps(ZOO[name], num_steps=3, num_microbatches=count),
        max_grad_norm=1.0,
        scratch=tmp_path,
    )
    assert find_differences(plain_curve(name, count, optimizer), curve) == ()


def test_a_layout_is_restored_over_other_bytes_and_views_of_others_stay() -> None:
    base, own = torch.arange(24.0), torch.arange(60, dtype=torch.bfloat16)
    mask = torch.tensor([True, False, True])
    payload = (
        own.view(5, 12)[1:, 2::3],
        base.view(4, 6).t(),
        mask,
        own.view(12, 5).t()[2],
        mask[:1].expand(4),
    )
    layout = SavedLayout(places=(0, None, 1, 0, 1), sizes_bytes=(120, 3))
    parts = take_apart(BufferId("saved/0@0"), payload, layout)
    assert [part.numel() for part in parts] == [120, 3]
    copies = [part.clone() for part in parts]
    restored = put_together(payload, layout, copies)
    for before, after, place in zip(payload, restored, layout.places, strict=True):
        assert (after.dtype, after.shape, after.stride()) == (
            before.dtype,
            before.shape,
            before.stride(),
        )
        assert after.storage_offset() == before.storage_offset()
        assert torch.equal(after, before)
        shared = after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        assert shared == (place is None)
    assert restored[0].untyped_storage().data_ptr() == restored[3].untyped_storage().data_ptr()
    assert own_tensors(payload, layout) == tuple(payload[at] for at in (0, 2, 3, 4))
    wrong = SavedLayout(places=layout.places, sizes_bytes=(120, 4))
    with pytest.raises(AuditError, match=r"storages of \(120, 3\) bytes"):
        take_apart(BufferId("saved/0@0"), payload, wrong)


@pytest.mark.parametrize("name", ["llama", "gpt2", "weave"])
def test_the_trace_knows_the_storages_of_what_is_saved(name: str) -> None:
    for code in find_subject(name).traced.code.values():
        assert sum(code.saved.sizes_bytes) == code.costs.saved_bytes


def lower_step(subject: Subject, ways: Ways, count: int) -> Program:
    model = subject.traced.model
    plan = make_plan(model, WORDS, ways, num_microbatches=count, clips=True)
    return lower_plan(plan, model, "train_step")


def test_micro_batches_that_never_meet_take_turns_on_the_disk() -> None:
    subject = find_subject("llama")
    turns = find_turns([lower_step(subject, ALL, 4)])
    names = {name for name in turns if name.startswith("saved/1@")}
    assert names == {"saved/1@1", "saved/1@2", "saved/1@3"}
    assert {turns[name] for name in names} == {"saved/1@0"}
    assert find_turns([lower_step(subject, replace(ALL, order="layered"), 4)]) == {}
    both = [
        lower_step(subject, replace(ALL, order=order), 4) for order in ("layered", "depth_first")
    ]
    assert find_turns(both) == {}


@pytest.mark.parametrize("order", ["depth_first", "layered"])
def test_the_file_is_as_large_as_the_disk_is_full(order, tmp_path: Path) -> None:
    subject, ways = find_subject("qwen3"), replace(ALL, order=order)
    program = lower_step(subject, ways, 4)
    full_bytes = verify_program(program, subject.traced.model).peak_bytes["disk"]
    places = find_places(subject.traced, [program])
    num_parts = sum(
        len(layout.sizes_bytes) for name, layout in places.saved.items() if name not in places.turns
    )
    with open_engine(
        subject, ways, num_microbatches=4, max_grad_norm=1.0, scratch=tmp_path
    ) as engine:
        assert full_bytes <= engine.scratch_bytes <= full_bytes + 4096 * num_parts
        (feeds,) = make_steps(ZOO["qwen3"], num_steps=1, num_microbatches=4)
        step = engine.train_step(feeds, step=1, learning_rate=WORDS.lr)
    moved_bytes = sum(
        program.buffers[task.buffer].size_bytes
        for task in program.tasks
        if isinstance(task, Copy) and task.target == "disk"
    )
    # Whole pages move.
    num_moved = sum(len(layout.sizes_bytes) for layout in places.saved.values())
    for seen_bytes in (step.disk_written_bytes, step.disk_read_bytes):
        assert moved_bytes <= seen_bytes <= moved_bytes + 4096 * num_moved


def test_what_comes_back_from_the_disk_lies_where_the_disk_reads_to() -> None:
    sizes = (3 * PAGE_BYTES * 16 + 5, 100, 0, 64 * KIB)
    whole, parts = map_parts(SavedLayout(places=(0, 1, 2, 3), sizes_bytes=sizes), SpareMemory())
    assert tuple(part.untyped_storage().nbytes() for part in parts) == sizes
    starts = [part.data_ptr() - whole.data_ptr() for part in parts if part.numel()]
    assert starts == [0, align_up(sizes[0]), align_up(sizes[0]) + PAGE_BYTES]
    assert whole.data_ptr() % PAGE_BYTES == 0
    assert whole.numel() == starts[-1] + 64 * KIB
    tensor = torch.empty(0, dtype=torch.float32).set_(parts[3].untyped_storage(), 0, (16 * KIB,))
    parts[3].fill_(3)
    del whole, parts  # the tensor over them holds its bytes
    assert (tensor.view(torch.uint8) == 3).all()


LAYOUT = SavedLayout(places=(0, 1, 2), sizes_bytes=(16 * MIB, 5, 8 * MIB))


def map_filled(spare: SpareMemory) -> list[Tensor]:
    """The parts of a value, with pages; nothing else lies over them."""
    whole, parts = map_parts(LAYOUT, spare, spare.take(LAYOUT))
    whole.fill_(1)
    return list(parts)


def drop_parts(spare: SpareMemory) -> list[int]:
    """Resident bytes that go with the first part, a view over it, and the rest."""
    large, small, other = map_filled(spare)
    held = [resident_bytes()]
    view = large[:3]
    del large
    spare.settle()
    held.append(resident_bytes())
    del view
    spare.settle()
    held.append(resident_bytes())
    assert [int(each) for each in (small[0], other[0], other[-1])] == [1, 1, 1]
    del small, other
    held.append(resident_bytes())
    return [held[0] - each for each in held[1:]]


def test_pages_of_a_part_go_with_the_last_tensor_over_it_where_others_stay() -> None:
    spare = SpareMemory()
    drop_parts(spare)  # code of libraries that runs for the first time is resident from then on
    first, view, rest = drop_parts(spare)
    assert abs(first) < MIB
    assert abs(view - 16 * MIB) < MIB
    assert abs(rest - 24 * MIB) < MIB
    assert spare.take(LAYOUT) is None


def test_an_empty_storage_does_not_keep_memory_from_the_next() -> None:
    layout = SavedLayout(places=(0, 1), sizes_bytes=(MIB, 0))
    spare = SpareMemory()
    whole, parts = map_parts(layout, spare)
    spare.settle()
    del whole, parts
    assert spare.take(layout) is not None


@pytest.mark.parametrize(("heap", "keeps"), [("keep", True), ("map", False)])
def test_memory_is_kept_while_an_engine_lives_and_no_chunk_takes_it(
    heap, keeps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, ways = find_subject("llama"), replace(ALL, heap=heap)
    layouts = find_places(subject.traced, [lower_step(subject, ways, 4)]).saved.values()
    with open_engine(
        subject, ways, num_microbatches=4, max_grad_norm=1.0, scratch=tmp_path
    ) as engine:
        (feeds,) = make_steps(ZOO["llama"], num_steps=1, num_microbatches=4)
        spare = engine._spare
        monkeypatch.setattr(engine._heap, "_drop_spare", lambda: None)  # as with room to spare
        engine.train_step(feeds, step=1, learning_rate=WORDS.lr)
        engine.settle()
        kept = [memory for layout in layouts if (memory := spare.take(layout)) is not None]
        assert bool(kept) == keeps
        for memory in kept[:1]:
            spare.end(_Mapped(memory, SavedLayout(places=(0,), sizes_bytes=(len(memory),))), 0)
    assert [spare.take(layout) for layout in layouts] == [None] * len(layouts)


def test_memory_of_a_value_that_is_gone_serves_the_next_of_its_size() -> None:
    spare = SpareMemory()
    parts = map_filled(spare)
    address = parts[0].data_ptr()
    before = resident_bytes()
    parts.clear()
    spare.settle()
    assert abs(resident_bytes() - before) < MIB
    other = SavedLayout(places=(0,), sizes_bytes=(16 * MIB,))
    assert spare.take(other) is None
    parts = map_filled(spare)
    assert parts[0].data_ptr() == address
    parts.clear()
    spare.drop()
    assert abs(before - resident_bytes() - 24 * MIB) < MIB
    spare.close()
    map_filled(spare).clear()
    assert spare.take(LAYOUT) is None
