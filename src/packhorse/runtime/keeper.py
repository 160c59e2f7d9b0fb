"""Keeps finished steps: what lies in memory is written behind, then everything is committed.

In: a disk tier with slots, the memory of chunks, a way to run programs. Out: kept steps, and all
states back in their homes from a kept one, those on the disk without a byte moved.

The caller does not wait for a step that is kept. What lies in memory is written by a program that
is issued behind the step, on the lane that computes: the next step begins to compute when that is
written. The commit takes its turn on the lane that writes to the disk: it begins when all of the
step is complete, and what later steps write comes after it. So a record never speaks of a step
whose last writes are on their way, and no write of a later step is among its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from packhorse.program.buffers import BufferId, Chunk, ChunkId, split_state
from packhorse.program.program import ProgramKind
from packhorse.runtime.disk import DiskTier
from packhorse.runtime.executor import Executor
from packhorse.runtime.memory.chunks import ChunkMemory
from packhorse.storage.record import Json

ChunkWork = Callable[[BufferId], None]


class StepKeeper:
    """Keeps the steps of one engine; used between its programs only.

    Args:
        kinds: programs that there are: `persist` and `restore` where a state lies in memory.
        run: runs a program by its kind, with the work of its Imports or Exports; it does not wait
            for `persist`.
        executor: what the commits follow.
        adopt: takes over the states that lie on the disk already.
    """

    def __init__(
        self,
        disk: DiskTier,
        memory: ChunkMemory,
        chunks: Mapping[ChunkId, Chunk],
        *,
        kinds: Collection[ProgramKind],
        run: Callable[[ProgramKind, ChunkWork], None],
        executor: Executor,
        adopt: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._memory = memory
        self._chunks = chunks
        self._kinds = kinds
        self._run = run
        self._executor = executor
        # By step, the number of its commit among the tasks of the executor; the last ones.
        self._commits: dict[int, int] = {}
        # Set by the lane on which commits are.
        self._begun: int | None = None
        self._adopt = adopt

    @property
    def is_on(self) -> bool:
        """Whether steps are kept."""
        return self._disk.keeps

    @property
    def is_reopened(self) -> bool:
        """Whether the scratch file holds the states of the step that is resumed; see `restore`."""
        return self._disk.is_reopened

    @property
    def kept_step(self) -> int | None:
        """The newest step that is on the disk."""
        return self._disk.recorded_step

    def keep(self, step: int, state: Json) -> None:
        """Begin to keep the state after `step`; it is on the disk before a state is written anew.

        All of the step was issued; its last tasks may still be on their way.

        Raises:
            StorageError: the disk is full or fails; the step that was kept before still stands.
        """
        if "persist" in self._kinds:
            # Its writes are not on the lane of the commits: the last one must have begun.
            self.await_commit(max(self._commits, default=0))
            self._run("persist", self._write)

        def commit() -> None:
            self._disk.commit(step, state)
            self._begun = step

        self._commits = {at: n for at, n in self._commits.items() if at == self._begun}
        self._commits[step] = self._executor.follow(
            "disk_write", commit, f"the commit of step {step}"
        )

    def has_kept(self, step: int) -> bool:
        """Whether `step` is kept, or will be without anything more to be done."""
        return step in self._commits or step == self.newest_step

    @property
    def newest_step(self) -> int | None:
        """The newest step that was complete and whose commit has begun."""
        return self.kept_step if self._begun is None else self._begun

    def await_commit(self, step: int) -> None:
        """Block until the commit of a step has begun, which is when the step is complete."""
        if step in self._commits:
            self._executor.wait_for(self._commits[step])

    def settle(self, step: int) -> None:
        """Block until a kept step is on the disk; later steps need not be complete.

        Raises:
            StorageError: the disk fails.
        """
        self.await_commit(step)
        self._disk.settle()

    def restore(self, fill: ChunkWork) -> None:
        """Bring all states of the reopened file home.

        Args:
            fill: fills a frozen state that lies in memory and so is in no slot.
        """

        def read_or_fill(buffer: BufferId) -> None:
            if self._disk.has_slots(buffer):
                self._disk.read(buffer, self._address(buffer))
            else:
                fill(buffer)

        self._adopt()
        if "restore" in self._kinds:
            self._run("restore", read_or_fill)

    def discard(self) -> None:
        """Let the scratch file go when the engine closes: what it keeps is elsewhere too."""
        self._disk.discard()

    def _write(self, buffer: BufferId) -> None:
        self._disk.write(buffer, self._address(buffer))

    def _address(self, buffer: BufferId) -> int:
        state, chunk = split_state(buffer)
        return self._memory.address(state, self._chunks[chunk])
