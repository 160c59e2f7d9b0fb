"""How full each pool gets: the fullest moments of a replay.

In: a finished program. Out: the peak of each of its pools. It checks nothing; a program that breaks
a rule gives a number without meaning.
"""

from __future__ import annotations

from collections.abc import Mapping

from packhorse.compiler.replay import replay_pools
from packhorse.program.buffers import PoolId
from packhorse.program.program import Program


def peak_of(program: Program) -> Mapping[PoolId, int]:
    """The most bytes that each pool of a program holds, workspace counted."""
    holdings = replay_pools(
        program.tasks,
        program.buffers,
        workspace_pool=program.workspace_pool,
        finds=program.finds,
    )
    peaks = holdings.peak_bytes
    return {pool.id: peaks.get(pool.id, 0) for pool in program.pools}
