"""The disk tier: every buffer that may lie on disk has one aligned extent of a scratch file.

In: buffers with a disk pool, a scratch folder. Out: reads and writes in place between extents and
chunk memory. The file is preallocated before the first step, and removed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from packhorse.errors import InputError
from packhorse.program.buffers import Buffer, BufferId
from packhorse.storage.counters import IoCounters
from packhorse.storage.extents import lay_out_extents
from packhorse.storage.scratch_folder import claim_scratch


class DiskTier:
    """Buffers on disk, in one file of a folder that this process holds.

    Raises:
        InputError: another live process holds the folder.
        StorageError: not enough space, or the folder is unwritable.
    """

    def __init__(self, buffers: Mapping[BufferId, Buffer], folder: Path | None) -> None:
        sizes: dict[str, int] = {b.id: b.size_bytes for b in buffers.values() if "disk" in b.pools}
        self._extents = lay_out_extents(sizes)
        self._folder = None
        self._file = None
        if not sizes:
            return
        if folder is None:
            raise InputError(
                f"the plan keeps {len(sizes)} buffers on disk, but no scratch folder is given",
                fix="add a disk to the budget, for example disk=scratch",
            )
        self._folder = claim_scratch(folder)
        try:
            self._folder.remove_files()
            self._file = self._folder.create_file("state", self._extents.total_bytes)
        except BaseException:
            self._folder.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def size_bytes(self) -> int:
        """Size of the scratch file."""
        return self._extents.total_bytes

    @property
    def path(self) -> Path | None:
        """The scratch file, where there is one."""
        return None if self._file is None else self._file.path

    @property
    def counters(self) -> IoCounters:
        """What was moved since the start."""
        if self._file is None:
            return IoCounters()
        return self._file.counters

    def read(self, buffer: BufferId, address: int) -> None:
        """Read a buffer's extent to an address; blocks until it is there."""
        assert self._file is not None
        extent = self._extents[buffer]
        self._file.read_into(address, extent.offset_bytes, extent.size_bytes)

    def write(self, buffer: BufferId, address: int) -> None:
        """Write a buffer's extent from an address; blocks until the disk has it."""
        assert self._file is not None
        extent = self._extents[buffer]
        self._file.write_from(address, extent.offset_bytes, extent.size_bytes)

    def close(self) -> None:
        """Remove the scratch file and give the folder free."""
        if self._file is not None:
            self._file.remove()
            self._file = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None
