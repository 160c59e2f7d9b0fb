"""Rule `declared`: names mean something.

Every buffer that a task names is declared, with a pool in the tier where the task touches it; each
pool is declared once and lies in that tier; a home is one of the buffer's tiers; workspace lies in
a device pool; no task names a buffer twice among its reads or its writes; updates happen in tiers
of memory. Every later rule relies
on this one.
"""

from __future__ import annotations

from typing import Final

from packhorse.model.spec import Model
from packhorse.program.buffers import BufferId, PoolId, TierName
from packhorse.program.program import Program
from packhorse.program.tasks import Update, reads_of, writes_of
from packhorse.verifier.failures import make_error, suggest

RULE: Final = "declared"


def check_declared(program: Program, model: Model | None) -> None:
    """Check declarations first, then the names in each task."""
    del model
    _check_pools(program)
    _check_buffers(program)
    known: set[tuple[BufferId, TierName]] = {
        (buffer.id, tier) for buffer in program.buffers.values() for tier in buffer.pools
    }
    for index, task in enumerate(program.tasks):
        if isinstance(task, Update) and task.where == "disk":
            what = "happens in the disk tier, where nothing computes"
            raise make_error(program, RULE, index, what, "update the chunk in device or host")
        for keys, verb in ((reads_of(task), "reads"), (writes_of(task), "writes")):
            if not known.issuperset(keys):
                buffer, tier = next(key for key in keys if key not in known)
                raise make_error(program, RULE, index, _explain(program, verb, buffer, tier))
            if len(keys) > 1 and len(set(keys)) < len(keys):
                twice = next(buffer for buffer, tier in keys if keys.count((buffer, tier)) > 1)
                raise make_error(program, RULE, index, f"{verb} {twice} twice in its list")


def _explain(program: Program, verb: str, buffer: BufferId, tier: TierName) -> str:
    if buffer not in program.buffers:
        near = suggest(buffer, tuple(program.buffers))
        return f"{verb} {buffer}, which is not declared{near}"
    tiers = ", ".join(program.buffers[buffer].pools)
    return f"{verb} {buffer} in the {tier} tier, but it may lie only in: {tiers}"


def _check_pools(program: Program) -> None:
    tiers: dict[PoolId, TierName] = {}
    for pool in program.pools:
        if pool.id in tiers:
            raise make_error(program, RULE, None, f"pool {pool.id} is declared twice")
        tiers[pool.id] = pool.tier
    if tiers.get(program.workspace_pool) != "device":
        what = f"workspace lies in pool {program.workspace_pool}, which is no device pool"
        fix = (
            f"the device pools are: {', '.join(p for p, tier in tiers.items() if tier == 'device')}"
        )
        raise make_error(program, RULE, None, what, fix)


def _check_buffers(program: Program) -> None:
    tiers = {pool.id: pool.tier for pool in program.pools}
    for name, buffer in program.buffers.items():
        if name != buffer.id:
            what = f"buffer {buffer.id} is declared under the name {name}"
            raise make_error(program, RULE, None, what)
        if buffer.size_bytes < 0:
            what = f"buffer {name} has {buffer.size_bytes} bytes"
            raise make_error(program, RULE, None, what)
        for tier, pool in buffer.pools.items():
            if tiers.get(pool) != tier:
                found = f"lies in the {tiers[pool]} tier" if pool in tiers else "is not declared"
                what = f"buffer {name} occupies pool {pool} in the {tier} tier, but {pool} {found}"
                raise make_error(program, RULE, None, what)
        if buffer.home is not None and buffer.home not in buffer.pools:
            what = f"buffer {name} has its home in the {buffer.home} tier, where it has no pool"
            raise make_error(program, RULE, None, what)
