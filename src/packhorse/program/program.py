"""A program: for one rank, an ordered list of tasks over named buffers, and its proof.

In: what the compiler emits, or a parsed text. Out: a frozen value that verifier, simulator and
runtime read without importing each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packhorse.program.buffers import Buffer, BufferId, Layout, Pool, PoolId
from packhorse.program.tasks import Task

ProgramKind = Literal["train_step", "evaluate", "load", "save", "persist", "restore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank does in a step.

    `kind` says what the program is for: a training step, the evaluation of one batch, filling all
    states from outside, handing all states out, handing out those that steps change in memory (to
    be written behind), or filling those in memory while the rest is on the disk. `workspace_pool`
    is where tasks hold workspace. `model` is the fingerprint of the model it was compiled for.
    """

    kind: ProgramKind
    model: str
    rank: int
    num_microbatches: int
    pools: tuple[Pool, ...]
    workspace_pool: PoolId
    buffers: Mapping[BufferId, Buffer]
    layout: Layout
    tasks: tuple[Task, ...]

    @property
    def fills(self) -> bool:
        """Whether it brings states from outside, so that it runs once."""
        return self.kind in ("load", "restore")

    def finds(self, buffer: Buffer) -> bool:
        """Whether a buffer lies in its home before the first task."""
        match self.kind:
            case "load":
                return False
            case "restore":
                return buffer.home == "disk"
            case _:
                return buffer.home is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofEntry:
    """What the verifier's replay saw at one task.

    `used_bytes` is each pool's ledger after the task; `peak_bytes` while it ran, workspace and
    new buffers counted.
    """

    task: Task
    used_bytes: Mapping[PoolId, int]
    peak_bytes: Mapping[PoolId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The verifier's replay of a program that passed every rule, task by task."""

    digest: str
    entries: tuple[ProofEntry, ...]

    @property
    def peak_bytes(self) -> Mapping[PoolId, int]:
        """The largest use of each pool."""
        peaks: dict[PoolId, int] = {}
        for entry in self.entries:
            for pool, used in entry.peak_bytes.items():
                peaks[pool] = max(peaks.get(pool, 0), used)
        return peaks
