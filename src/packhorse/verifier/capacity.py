"""Rule `capacity`: no pool ever holds more than its capacity.

While a task runs, its pools carry what lay there before, what the task creates (reserved before
it starts), and its workspace; what it frees is given back after it. The same sum of sizes that the
executor reserves by, so a program that passes can neither exceed a budget nor deadlock.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from packhorse.program.buffers import PoolId
from packhorse.units import format_bytes
from packhorse.verifier.failures import make_error
from packhorse.verifier.replay import Replay

RULE: Final = "capacity"
NUM_CAUSES: Final = 6


def check_start(replay: Replay) -> None:
    """Check what lies in the pools before the first task."""
    for pool, used_bytes in replay.used_bytes.items():
        have_bytes = replay.capacity_bytes[pool]
        if used_bytes > have_bytes:
            raise make_error(
                replay.program,
                RULE,
                None,
                f"pool {pool} holds {_exact(used_bytes)} before the first"
                f" task and has {_exact(have_bytes)}: {_list_causes(replay, pool, began=False)}",
                fix="move a state's home to another tier, or give the tier a larger budget",
            )


def check_capacity(replay: Replay) -> None:
    """Check the pools while the task at `replay.index` runs."""
    peak_bytes, capacity_bytes = replay.peak_bytes, replay.capacity_bytes
    if peak_bytes is replay.used_bytes:
        return
    for pool, need_bytes in peak_bytes.items():
        if need_bytes > capacity_bytes[pool]:
            have_bytes = capacity_bytes[pool]
            causes = _list_causes(replay, pool, began=True)
            raise make_error(
                replay.program,
                RULE,
                replay.index,
                f"needs {_exact(need_bytes)} in pool {pool}, which has"
                f" {_exact(have_bytes)}, {_exact(need_bytes - have_bytes)} too little: {causes}",
                fix="free or move a buffer before it, or give the tier a larger budget",
            )


def _exact(num_bytes: int) -> str:
    return (
        f"{num_bytes} bytes ({format_bytes(num_bytes)})"
        if num_bytes >= 1024
        else f"{num_bytes} bytes"
    )


def _list_causes(replay: Replay, pool: PoolId, *, began: bool) -> str:
    # What the task itself brings comes first, then the largest of what lies there.
    brought: Counter[str] = Counter()
    if began:
        for place in replay.grows:
            if replay.pool_at(place) == pool:
                buffer = replay.buffer_at(place)
                brought[f"{buffer.id} (new)"] = buffer.size_bytes
        if pool == replay.program.workspace_pool and replay.workspace_bytes:
            brought["workspace"] = replay.workspace_bytes
    held: Counter[str] = Counter()
    for place in sorted(replay.there, key=lambda each: each % len(replay.buffers)):
        if replay.pool_at(place) == pool:
            buffer = replay.buffer_at(place)
            held[buffer.id] = buffer.size_bytes
    shown = brought.most_common(NUM_CAUSES)
    shown += held.most_common(NUM_CAUSES - len(shown))
    words = [f"{name} {format_bytes(size)}" for name, size in shown]
    num_others = len(brought) + len(held) - len(shown)
    if num_others:
        rest_bytes = brought.total() + held.total() - sum(size for _, size in shown)
        words.append(f"{num_others} others {format_bytes(rest_bytes)}")
    return ", ".join(words)
