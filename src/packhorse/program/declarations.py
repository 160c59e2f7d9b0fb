"""What a program declares before its tasks, as lines: pools, buffers, dtypes, chunks, slots.

In: a declaration, or its line. Out: its words, or the declaration. Each `format_` function and its
`parse_` function are inverse to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from packhorse.program.buffers import (
    Buffer,
    BufferId,
    Chunk,
    ChunkId,
    Pool,
    PoolId,
    Slot,
    TierName,
)
from packhorse.program.lines import Line, escape_name, unescape_name
from packhorse.units import format_exact_bytes

TIERS: Final[Mapping[str, TierName]] = {tier: tier for tier in get_args(TierName)}
HOMES: Final[Mapping[str, TierName | None]] = {**TIERS, "none": None}
TRAINED: Final[Mapping[str, bool]] = {"trained": True, "frozen": False}


def format_pool(pool: Pool) -> tuple[str, ...]:
    """Write `chunks  device  1GiB`."""
    return escape_name(pool.id), pool.tier, format_exact_bytes(pool.capacity_bytes)


def parse_pool(line: Line) -> Pool:
    """Read a pool."""
    name = unescape_name(line.word("the pool's name"))
    tier = line.as_choice(line.word("the pool's tier"), "the tier", TIERS)
    capacity_bytes = line.as_bytes(line.word("the pool's capacity"), "the capacity")
    line.finish()
    return Pool(id=PoolId(name), tier=tier, capacity_bytes=capacity_bytes)


def format_buffer(buffer: Buffer) -> tuple[str, ...]:
    """Write `param/3  2MiB  home=disk  device=chunks  disk=scratch`."""
    pools = (f"{tier}={escape_name(pool)}" for tier, pool in buffer.pools.items())
    size = format_exact_bytes(buffer.size_bytes)
    return escape_name(buffer.id), size, f"home={buffer.home or 'none'}", *pools


def parse_buffer(line: Line) -> Buffer:
    """Read a buffer."""
    name = unescape_name(line.word("the buffer's name"))
    size_bytes = line.as_bytes(line.word("the buffer's size"), "the size")
    home = line.choice("home", HOMES)
    pools: dict[TierName, PoolId] = {}
    for key in list(line.fields):
        if key in TIERS:
            pools[TIERS[key]] = PoolId(unescape_name(line.field(key)))
    line.known = list(TIERS)
    line.finish()
    return Buffer(id=BufferId(name), size_bytes=size_bytes, pools=pools, home=home)


def format_dtype(state: str, dtype: str) -> tuple[str, ...]:
    """Write `exp_avg  float32`."""
    return escape_name(state), escape_name(dtype)


def parse_dtype(line: Line) -> tuple[str, str]:
    """Read a state's name and its dtype."""
    state = unescape_name(line.word("the state's name"))
    dtype = unescape_name(line.word("the state's dtype"))
    line.finish()
    return state, dtype


def format_chunk(chunk: Chunk) -> tuple[str, ...]:
    """Write `3  start=1572864  elements=524288  group=decay  trained`."""
    return (
        str(chunk.id),
        f"start={chunk.start}",
        f"elements={chunk.num_elements}",
        f"group={escape_name(chunk.group)}",
        "trained" if chunk.trainable else "frozen",
    )


def parse_chunk(line: Line) -> Chunk:
    """Read a chunk."""
    number = line.as_integer(line.word("the chunk's number"), "the chunk's number")
    start = line.integer("start")
    num_elements = line.integer("elements")
    group = unescape_name(line.field("group"))
    trainable = line.as_choice(line.word("'trained' or 'frozen'"), "the last word", TRAINED)
    line.finish()
    return Chunk(
        id=ChunkId(number),
        start=start,
        num_elements=num_elements,
        group=group,
        trainable=trainable,
    )


def format_slot(slot: Slot) -> tuple[str, ...]:
    """Write `model.embed.weight  start=0  elements=4096  shape=64x64`."""
    shape = "x".join(map(str, slot.shape)) or "scalar"
    elements = f"elements={slot.num_elements}"
    return escape_name(slot.parameter), f"start={slot.start}", elements, f"shape={shape}"


def parse_slot(line: Line) -> Slot:
    """Read a slot."""
    parameter = unescape_name(line.word("the parameter's name"))
    start = line.integer("start")
    num_elements = line.integer("elements")
    shape = line.field("shape")
    sides = () if shape == "scalar" else tuple(shape.split("x"))
    line.finish()
    return Slot(
        parameter=parameter,
        start=start,
        shape=tuple(line.as_integer(side, "a side of the shape") for side in sides),
        num_elements=num_elements,
    )
