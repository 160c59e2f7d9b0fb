"""Keeps finished steps: what lies in memory is written behind, then everything is committed.

In: a disk tier with slots, the memory of chunks, a way to run programs. Out: kept steps, and all
states back in their homes from a kept one, those on the disk without a byte moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from packhorse.program.buffers import BufferId, Chunk, ChunkId
from packhorse.program.program import ProgramKind
from packhorse.runtime.disk import DiskTier
from packhorse.runtime.memory.chunks import ChunkMemory
from packhorse.storage.record import Json

ChunkWork = Callable[[BufferId], None]


class StepKeeper:
    """Keeps the steps of one engine; used between its programs only.

    Args:
        kinds: programs that there are: `persist` and `restore` where a state lies in memory.
        run: runs a program by its kind, with the work of its Imports or Exports.
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
        adopt: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._memory = memory
        self._chunks = chunks
        self._kinds = kinds
        self._run = run
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

        Blocks while states in memory are written, and while an earlier step is still on its way.

        Raises:
            StorageError: the disk is full or fails; the step that was kept before still stands.
        """
        if "persist" in self._kinds:
            self._run("persist", self._write)
        self._disk.commit(step, state)

    def settle(self) -> None:
        """Block until the last kept step is on the disk.

        Raises:
            StorageError: the disk fails.
        """
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
        state, _, chunk = buffer.partition("/")
        return self._memory.address(state, self._chunks[ChunkId(int(chunk))])
