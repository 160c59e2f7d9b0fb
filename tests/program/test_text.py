"""The text of a program: exact round trips, and errors that name line and nearest word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import FileFormatError
from packhorse.program.buffers import Buffer, Chunk, Layout, Pool, Slot
from packhorse.program.digest import digest_program
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Emit,
    Export,
    Feed,
    Forward,
    Free,
    GradNorm,
    Import,
    InputGrad,
    Recompute,
    SegmentNorm,
    Update,
    WeightGrad,
)
from packhorse.program.text import format_program, format_task, parse_program

NAMES = st.text(max_size=8) | st.sampled_from(
    ["param/3", "value/h2@0", "a b", "x=1,y", "%41", "''"]
)
COUNTS = st.integers(0, 2**53)
TIERS = st.sampled_from(["device", "host", "disk"])
LISTS = st.lists(NAMES, max_size=3).map(tuple)
ACCESSES = {"reads": LISTS, "writes": LISTS}
BLOCKS = {"block": COUNTS, "microbatch": COUNTS, **ACCESSES, "workspace_bytes": COUNTS}
TASKS = st.one_of(
    st.builds(Feed, microbatch=COUNTS, writes=LISTS),
    st.builds(Forward, **BLOCKS),
    st.builds(Recompute, **BLOCKS),
    st.builds(Backward, **BLOCKS),
    st.builds(InputGrad, **BLOCKS),
    st.builds(WeightGrad, **BLOCKS),
    st.builds(SegmentNorm, chunk=COUNTS, **ACCESSES, workspace_bytes=COUNTS),
    st.builds(GradNorm, **ACCESSES),
    st.builds(Update, chunk=COUNTS, where=TIERS, **ACCESSES, workspace_bytes=COUNTS),
    st.builds(Copy, buffer=NAMES, source=TIERS, target=TIERS),
    st.builds(Free, buffer=NAMES, tier=TIERS),
    st.builds(Emit, buffer=NAMES),
    st.builds(Import, buffer=NAMES),
    st.builds(Export, buffer=NAMES),
)
BUFFERS = st.builds(
    Buffer,
    id=NAMES,
    size_bytes=COUNTS,
    pools=st.dictionaries(TIERS, NAMES, max_size=3),
    home=st.none() | TIERS,
)
SLOTS = st.builds(
    Slot,
    parameter=NAMES,
    start=COUNTS,
    shape=st.lists(COUNTS, max_size=3).map(tuple),
    num_elements=COUNTS,
)
LAYOUTS = st.builds(
    Layout,
    chunks=st.lists(
        st.builds(
            Chunk,
            id=COUNTS,
            start=COUNTS,
            num_elements=COUNTS,
            group=NAMES,
            trainable=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    slots=st.lists(SLOTS, max_size=3).map(lambda slots: {slot.parameter: slot for slot in slots}),
    dtypes=st.dictionaries(NAMES, NAMES, max_size=3),
)
PROGRAMS = st.builds(
    Program,
    kind=st.sampled_from(["train_step", "evaluate", "load", "save"]),
    model=NAMES,
    rank=COUNTS,
    num_microbatches=COUNTS,
    pools=st.lists(st.builds(Pool, id=NAMES, tier=TIERS, capacity_bytes=COUNTS), max_size=3).map(
        tuple
    ),
    workspace_pool=NAMES,
    buffers=st.lists(BUFFERS, max_size=4).map(lambda all_: {buffer.id: buffer for buffer in all_}),
    layout=LAYOUTS,
    tasks=st.lists(TASKS, max_size=6).map(tuple),
)

SMALL = Program(
    kind="train_step",
    model="5f0c",
    rank=0,
    num_microbatches=1,
    pools=(Pool(id="chunks", tier="device", capacity_bytes=1 << 30),),
    workspace_pool="chunks",
    buffers={
        "param/3": Buffer(
            id="param/3",
            size_bytes=2 << 20,
            pools={"device": "chunks", "disk": "scratch"},
            home="disk",
        ),
        "norm": Buffer(id="norm", size_bytes=8, pools={"device": "chunks"}, home=None),
    },
    layout=Layout(
        chunks=(Chunk(id=3, start=0, num_elements=524288, group="decay", trainable=True),),
        slots={"w": Slot(parameter="w", start=0, shape=(512, 1024), num_elements=524288)},
        dtypes={"param": "float32"},
    ),
    tasks=(
        Copy(buffer="param/3", source="disk", target="device"),
        Forward(
            block=3,
            microbatch=0,
            reads=("param/3", "value/h2@0"),
            writes=("value/h3@0", "saved/3@0"),
            workspace_bytes=3 << 19,
        ),
        Update(
            chunk=3,
            where="device",
            reads=("param/3", "norm"),
            writes=("param/3",),
            workspace_bytes=0,
        ),
        GradNorm(reads=(), writes=("norm",)),
        Free(buffer="param/3", tier="device"),
        Emit(buffer="norm"),
    ),
)
TEXT = """\
packhorse/program 1

program
  kind=train_step model=5f0c rank=0 microbatches=1 workspace=chunks

pools
  chunks  device  1GiB

buffers
  param/3  2MiB  home=disk  device=chunks  disk=scratch
  norm     8     home=none  device=chunks

dtypes
  param  float32

chunks
  3  start=0  elements=524288  group=decay  trained

slots
  w  start=0  elements=524288  shape=512x1024

tasks
  0  CP    param/3             disk>device
  1  F     block=3 mb=0        reads=param/3,value/h2@0  writes=value/h3@0,saved/3@0  work=1536KiB
  2  UPD   chunk=3 at=device   reads=param/3,norm  writes=param/3  work=0
  3  NORM                      writes=norm
  4  FREE  param/3             device
  5  EMIT  norm
end
"""


@given(PROGRAMS)
@settings(max_examples=150)
def test_any_program_survives_its_text(program: Program) -> None:
    text = format_program(program)
    assert text.isascii()
    assert parse_program(text) == program


def test_text_is_what_people_read() -> None:
    assert format_program(SMALL) == TEXT
    assert parse_program(TEXT) == SMALL


def test_order_of_buffers_is_kept() -> None:
    assert list(parse_program(TEXT).buffers) == ["param/3", "norm"]


def test_one_task_is_one_line_without_a_number() -> None:
    assert format_task(SMALL.tasks[4]) == "FREE  param/3             device"


def test_edited_text_may_have_comments_and_wrong_numbers() -> None:
    edited = TEXT.replace("  4  FREE", "\n# drop it\n 99  FREE").replace("  5  EMIT", "     EMIT")
    assert parse_program(edited) == SMALL


def test_digest_tells_programs_apart() -> None:
    assert digest_program(SMALL) == digest_program(parse_program(TEXT))
    changed = replace(SMALL, tasks=SMALL.tasks[::-1])
    assert digest_program(changed) != digest_program(SMALL)
    assert len(digest_program(SMALL)) == 32


@given(st.lists(TASKS, max_size=3), st.lists(TASKS, max_size=3))
def test_digests_are_equal_for_equal_tasks_only(some, others) -> None:
    one, other = replace(SMALL, tasks=tuple(some)), replace(SMALL, tasks=tuple(others))
    assert (digest_program(one) == digest_program(other)) == (some == others)
    again = replace(SMALL, tasks=tuple(replace(task) for task in some))
    assert digest_program(again) == digest_program(one)


def test_a_digest_covers_everything_that_a_program_says() -> None:
    buffers, layout = SMALL.buffers, SMALL.layout
    name, buffer = next(iter(buffers.items()))
    chunk, (parameter, slot) = layout.chunks[0], next(iter(layout.slots.items()))
    changed = [
        replace(SMALL, kind="evaluate"),
        replace(SMALL, model=SMALL.model + "0"),
        replace(SMALL, rank=SMALL.rank + 1),
        replace(SMALL, num_microbatches=SMALL.num_microbatches + 1),
        replace(SMALL, workspace_pool="other"),
        replace(SMALL, pools=(replace(SMALL.pools[0], capacity_bytes=1), *SMALL.pools[1:])),
        replace(SMALL, buffers={**buffers, name: replace(buffer, size_bytes=1)}),
        replace(SMALL, buffers={**buffers, name: replace(buffer, home=None)}),
        replace(SMALL, buffers={**buffers, name: replace(buffer, pools={})}),
        replace(SMALL, layout=replace(layout, dtypes={**layout.dtypes, "param": "bfloat16"})),
        replace(SMALL, layout=replace(layout, chunks=(replace(chunk, start=9),))),
        replace(SMALL, layout=replace(layout, slots={parameter: replace(slot, shape=(9,))})),
    ]
    assert all(program != SMALL for program in changed)
    assert len({digest_program(SMALL), *map(digest_program, changed)}) == len(changed) + 1


def test_names_that_read_alike_when_joined_are_told_apart() -> None:
    lists = [("a,b",), ("a", "b"), ("a','b",), ("a', 'b",), ('a", "b',), ("a\\", "b")]
    programs = [replace(SMALL, tasks=(Feed(microbatch=0, writes=each),)) for each in lists]
    assert len(set(map(digest_program, programs))) == len(lists)


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ("packhorse/program 1", "packhorse/program 2", "line 1", ["packhorse/program 2", "newer"]),
        ("packhorse/program 1", "packhorse/plan 1", "line 1", ["packhorse/plan"]),
        ("packhorse/program 1", "packhorse/program one", "line 1", ["version"]),
        ("packhorse/program 1", "", "line 1", ["an empty line"]),
        ("kind=train_step", "kind=trainstep", "line 4", ["'trainstep'", "nearest: 'train_step'"]),
        ("rank=0", "rank=zero", "line 4", ["rank is 'zero'"]),
        ("rank=0", "rnk=0", "line 4", ["'rank'", "nearest word there is 'rnk'"]),
        ("  kind=", "  kind=load\n  kind=", "program", ["2 lines"]),
        ("1GiB", "1GoB", "line 7", ["'1GoB'"]),
        ("home=disk", "home=dsk", "line 10", ["'dsk'", "nearest: 'disk'"]),
        ("disk=scratch", "dsk=scratch", "line 10", ["'dsk'", "nearest: 'disk'"]),
        ("norm     8", "param/3  8", "line 11", ["'param/3' is declared twice"]),
        ("trained", "trainable", "line 17", ["'trainable'", "nearest: 'trained'"]),
        ("shape=512x1024", "shape=512*1024", "line 20", ["'512*1024'"]),
        ("slots\n", "slot\n", "line 19", ["'slot'", "nearest: 'slots'"]),
        ("EMIT", "EMTI", "line 28", ["'EMTI'", "nearest: 'EMIT'"]),
        ("disk>device", "disk>devise", "line 23", ["'devise'", "nearest: 'device'"]),
        ("disk>device", "disk", "line 23", ["no '>'"]),
        ("reads=param/3,value", "reads=param/3,,value", "line 24", ["empty buffer"]),
        ("work=1536KiB", "wrok=1536KiB", "line 24", ["'work'", "'wrok'"]),
        ("work=1536KiB", "work=1 work=2", "line 24", ["'work' is given twice"]),
        ("block=3 mb=0", "block=3 mb=-1", "line 24", ["mb is '-1'"]),
        ("FREE  param/3             device", "FREE  param/3", "line 27", ["the tier is missing"]),
        ("EMIT  norm", "EMIT  norm now", "line 28", ["'now' is one word too many"]),
        ("at=device", "at=device lr=3", "line 25", ["'lr'"]),
        ("end\n", "", "line 29", ["cut short"]),
        ("end\n", "end\n  1 EMIT norm\n", "line 30", ["goes on after 'end'"]),
    ],
)
def test_damaged_text_is_refused(old: str, new: str, where: str, words: list[str]) -> None:
    assert old in TEXT
    with pytest.raises(FileFormatError) as caught:
        parse_program(TEXT.replace(old, new, 1))
    message = str(caught.value)
    assert where in message
    for word in words:
        assert word in message
    assert len(message.splitlines()) < 30
