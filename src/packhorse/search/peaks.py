"""What fills each tier at its fullest moment.

In: a plan, its model and a program of it. Out: bytes by cause for each tier, adding up to the
budget that the tier needs; and the task at which the device is fullest.

Causes follow from the names of buffers: `param` is parameters; `grad` and `wgrad` gradients;
other states of chunks optimizer; `value`, `dvalue` and `saved` activations. What the last block
saves and works in is mostly logits and is called so. `heap` is what a kept heap holds beyond its
live bytes, `base` what the process holds beside the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packhorse.machine.spec import TierName
from packhorse.model.spec import Model
from packhorse.plan.spec import Plan
from packhorse.program.buffers import BufferId, PoolId
from packhorse.program.program import Program
from packhorse.program.tasks import (
    BlockTask,
    Free,
    Task,
    workspace_of,
    writes_of,
)
from packhorse.search.evaluation import need_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The fullest moment of one pool: the task, what is there, and the task's workspace."""

    index: int
    task: Task | None
    buffers: tuple[BufferId, ...]
    workspace_bytes: int
    used_bytes: int


def find_peaks(program: Program) -> Mapping[PoolId, Peak]:
    """Replay a program and stop at the fullest moment of each pool."""
    best: dict[PoolId, Peak] = {}
    for pool in program.pools:
        held: dict[tuple[BufferId, TierName], int] = {}
        for buffer in program.buffers.values():
            home = buffer.home
            if home is not None and program.finds(buffer) and buffer.pools[home] == pool.id:
                held[buffer.id, home] = buffer.size_bytes
        best[pool.id] = _find_peak(program, pool.id, held)
    return best


def _find_peak(program: Program, pool: PoolId, held: dict[tuple[BufferId, TierName], int]) -> Peak:
    used = sum(held.values())
    peak = Peak(
        index=0,
        task=None,
        buffers=tuple(buffer for buffer, _ in held),
        workspace_bytes=0,
        used_bytes=used,
    )
    for index, task in enumerate(program.tasks):
        if isinstance(task, Free):
            used -= held.pop((task.buffer, task.tier), 0)
            continue
        for buffer, tier in writes_of(task):
            declared = program.buffers[buffer]
            if declared.pools[tier] == pool and (buffer, tier) not in held:
                held[buffer, tier] = declared.size_bytes
                used += declared.size_bytes
        workspace = workspace_of(task) if pool == program.workspace_pool else 0
        if used + workspace > peak.used_bytes:
            peak = Peak(
                index=index,
                task=task,
                buffers=tuple(buffer for buffer, _ in held),
                workspace_bytes=workspace,
                used_bytes=used + workspace,
            )
    return peak


def explain_peaks(
    plan: Plan, model: Model, program: Program
) -> Mapping[TierName, Mapping[str, int]]:
    """Bytes by cause of each tier; each sum is the budget that the tier needs."""
    tiers: dict[TierName, dict[str, int]] = {"device": {}}
    if plan.base_bytes:
        tiers["device"]["base"] = plan.base_bytes
    peaks = find_peaks(program)
    last = len(model.blocks) - 1
    for pool in program.pools:
        peak = peaks[pool.id]
        causes = tiers.setdefault(pool.tier, {})
        for buffer in peak.buffers:
            cause = cause_of(buffer, last)
            causes[cause] = causes.get(cause, 0) + program.buffers[buffer].size_bytes
        if peak.workspace_bytes:
            is_last = isinstance(peak.task, BlockTask) and peak.task.block == last
            cause = "logits" if is_last else "workspace"
            causes[cause] = causes.get(cause, 0) + peak.workspace_bytes
    rest = need_of(plan, program)["device"] - sum(tiers["device"].values())
    if rest:
        tiers["device"]["heap"] = rest
    return {tier: causes for tier, causes in tiers.items() if causes}


def cause_of(buffer: BufferId, last_block: int) -> str:
    """What a buffer is for; see the module."""
    kind, _, rest = buffer.partition("/")
    match kind:
        case "param":
            return "parameters"
        case "grad" | "wgrad":
            return "gradients"
        case "saved" | "stash" if rest.partition("@")[0] == str(last_block):
            return "logits"
        case "value" | "dvalue" | "saved" | "stash":
            return "activations"
        case "norm":
            return "buffers"
        case _:
            return "optimizer"


def fullest_task(program: Program) -> Task | None:
    """The task at which the device's pool with workspace is fullest."""
    return find_peaks(program)[program.workspace_pool].task
