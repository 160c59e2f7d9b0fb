"""Rule `declared`: names mean something.

Every buffer that a task names is declared, with a pool in the tier where the task touches it; each
pool is declared once and lies in that tier; a home is one of the buffer's tiers; workspace lies in
a device pool; no task names a buffer twice among its reads or its writes; updates happen in tiers
of memory. Every later rule relies
on this one.
"""

from __future__ import annotations

from typing import Final

from packhorse.errors import RuleError
from packhorse.model.spec import Model
from packhorse.program.buffers import BufferId, PoolId, TierName
from packhorse.program.program import Program
from packhorse.program.tasks import Update, accesses_of
from packhorse.verifier.failures import make_error, suggest
from packhorse.verifier.touches import TIERS

RULE: Final = "declared"


def check_declared(program: Program, model: Model | None) -> None:
    """Check declarations first, then the names in each task."""
    del model
    _check_pools(program)
    _check_buffers(program)
    known: dict[TierName, set[BufferId]] = {
        tier: {name for name, buffer in program.buffers.items() if tier in buffer.pools}
        for tier in TIERS
    }
    for index, task in enumerate(program.tasks):
        if isinstance(task, Update) and task.where == "disk":
            what = "happens in the disk tier, where nothing computes"
            raise make_error(program, RULE, index, what, "update the chunk in device or host")
        read_tier, read, write_tier, written = accesses_of(task)
        if not known[read_tier].issuperset(read):
            raise _undeclared(program, index, "reads", read, read_tier)
        if len(read) > 1 and len(set(read)) < len(read):
            raise _twice(program, index, "reads", read)
        if not known[write_tier].issuperset(written):
            raise _undeclared(program, index, "writes", written, write_tier)
        if len(written) > 1 and len(set(written)) < len(written):
            raise _twice(program, index, "writes", written)


def _undeclared(
    program: Program, index: int, verb: str, names: tuple[BufferId, ...], tier: TierName
) -> RuleError:
    for name in names:
        if name not in program.buffers:
            near = suggest(name, tuple(program.buffers))
            what = f"{verb} {name}, which is not declared{near}"
            return make_error(program, RULE, index, what)
        if tier not in program.buffers[name].pools:
            tiers = ", ".join(program.buffers[name].pools)
            what = f"{verb} {name} in the {tier} tier, but it may lie only in: {tiers}"
            return make_error(program, RULE, index, what)
    raise AssertionError("one of the names is not declared")


def _twice(program: Program, index: int, verb: str, names: tuple[BufferId, ...]) -> RuleError:
    twice = next(name for name in names if names.count(name) > 1)
    return make_error(program, RULE, index, f"{verb} {twice} twice in its list")


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
