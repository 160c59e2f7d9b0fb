"""The disk tier: every buffer that may lie on disk has aligned extents of a scratch file.

In: buffers with a disk pool, a scratch folder, and whether finished steps are kept. Out: reads and
writes in place between extents and chunk memory. The file is preallocated before the first step.

A buffer has one extent; what a block saves has a part of it for each of its storages, and values of
micro-batches that never meet share one: see `runtime.disk_places`. Where finished steps are kept, a
state that steps change has two, and a record beside the file says which one holds the last finished
step: see `storage.slots`. Such a file stays when the process ends, however it ends; any other is
removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from packhorse.errors import InputError, StorageError
from packhorse.program.buffers import Buffer, BufferId
from packhorse.runtime.disk_places import NO_PLACES, DiskPlaces
from packhorse.storage.counters import IoCounters
from packhorse.storage.extents import align_up, lay_out_extents
from packhorse.storage.kept_layout import describe_layout, read_layout, second
from packhorse.storage.kept_state import (
    NAMES,
    KeptState,
    find_kept,
    refuse_kept,
    refuse_unreadable,
    remove_kept,
)
from packhorse.storage.page_marks import mark_pages
from packhorse.storage.record import (
    Json,
    create_record,
    open_record,
    same_header,
)
from packhorse.storage.scratch_space import (
    Scratch,
    ScratchSpace,
    StateFile,
    claim_space,
    make_scratch,
)
from packhorse.storage.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How finished steps are kept.

    `sizes_bytes` names the states that steps change: those at home on the disk and those that are
    written behind. `description` says what a reader of the file must know beside the extents, its
    `owner` among it.
    """

    sizes_bytes: Mapping[BufferId, int]
    description: Json


class DiskTier:
    """Buffers on disk, in one file of a folder that this process holds, or striped over several.

    Args:
        buffers: those with a disk pool have a place.
        folder: the scratch folder, or all of them and how their bytes move.
        keeping: None when the file goes with the process.
        resumed: kept state that this process goes on from. It is opened in place when the file
            would be the same, and left beside a new file otherwise.
        places: which buffers lie there in parts, or take turns.

    Raises:
        InputError: another live process holds the folder, or it keeps the state of a run that this
            process does not go on from.
        StorageError: not enough space, or the folder is unwritable.
    """

    def __init__(
        self,
        buffers: Mapping[BufferId, Buffer],
        folder: Path | Scratch | None,
        keeping: Keeping | None = None,
        resumed: KeptState | None = None,
        places: DiskPlaces = NO_PLACES,
    ) -> None:
        self._places = places
        sizes: dict[str, int] = {
            b.id: sum(map(align_up, places.saved[b.id].sizes_bytes))
            if b.id in places.saved
            else b.size_bytes
            for b in buffers.values()
            if "disk" in b.pools and b.id not in places.turns
        }
        others: dict[str, int] = {}
        fixed: tuple[str, ...] = ()
        if keeping is not None:
            for name, size_bytes in keeping.sizes_bytes.items():
                sizes[name] = size_bytes
                others[second(name)] = size_bytes
            fixed = tuple(
                buffer.id
                for buffer in buffers.values()
                if buffer.home == "disk" and buffer.id not in keeping.sizes_bytes
            )
        self._extents = lay_out_extents({**sizes, **others})
        self._folder: ScratchSpace | None = None
        self._file: StateFile | None = None
        self._slots: Slots | None = None
        self._record = None
        self._resumed = resumed
        self._is_reopened = False
        self._discarded = False
        if not sizes:
            return
        if folder is None:
            raise InputError(
                f"the plan keeps {len(sizes)} buffers on disk, but no scratch folder is given",
                fix="add a disk to the budget, for example disk=scratch",
            )
        self._folder = claim_space(make_scratch(folder))
        try:
            self._open(self._folder, keeping, fixed)
        except BaseException:
            self._close_files()
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
        """The scratch file, or its first part, where there is one."""
        return None if self._file is None else self._file.path

    @property
    def counters(self) -> IoCounters:
        """What was moved since the start."""
        if self._file is None:
            return IoCounters()
        return self._file.counters

    @property
    def keeps(self) -> bool:
        """Whether finished steps are kept."""
        return self._slots is not None

    @property
    def recorded_step(self) -> int | None:
        """The newest step that is kept, None when there is none."""
        return None if self._slots is None else self._slots.recorded_step

    @property
    def is_reopened(self) -> bool:
        """Whether the resumed file itself is in use, with all states of its step in place."""
        return self._is_reopened

    def read(self, buffer: BufferId, address: int) -> None:
        """Read a buffer's newest bytes to an address; blocks until they are there."""
        assert self._file is not None
        slot = 0
        if self._slots is not None and buffer in self._slots:
            slot = self._slots.slot_to_read(buffer)
        extent = self._extents[second(buffer) if slot else self._place(buffer)]
        self._file.read_into(address, extent.offset_bytes, extent.size_bytes)

    def write(self, buffer: BufferId, address: int) -> None:
        """Write a buffer from an address; blocks until the disk has it.

        The recorded slot is left alone: while a commit is in progress, the write waits for it.
        """
        assert self._file is not None
        if self._slots is None or buffer not in self._slots:
            extent = self._extents[self._place(buffer)]
            self._file.write_from(address, extent.offset_bytes, extent.size_bytes)
            if self._slots is not None and self._slots.marks(buffer):
                self._slots.wrote_fixed(buffer, mark_pages(address, extent.size_bytes))
            return
        slot = self._slots.slot_to_write(buffer)
        extent = self._extents[second(buffer) if slot else buffer]
        self._file.write_from(address, extent.offset_bytes, extent.size_bytes)
        self._slots.wrote(buffer, slot, mark_pages(address, extent.size_bytes))

    def read_parts(self, buffer: BufferId, address: int) -> None:
        """Read all parts of a buffer to an address, each from a page on; blocks until then."""
        assert self._file is not None
        size_bytes = sum(map(align_up, self._places.saved[buffer].sizes_bytes))
        if size_bytes:
            offset_bytes = self._extents[self._place(buffer)].offset_bytes
            self._file.read_into(address, offset_bytes, size_bytes)

    def write_part(self, buffer: BufferId, index: int, address: int) -> None:
        """Write a part of a buffer from an address; blocks until the disk has it."""
        assert self._file is not None
        offset_bytes, size_bytes = self._find_part(buffer, index)
        if size_bytes:
            self._file.write_from(address, offset_bytes, size_bytes)

    def _place(self, buffer: BufferId) -> BufferId:
        return self._places.turns.get(buffer, buffer)

    def _find_part(self, buffer: BufferId, index: int) -> tuple[int, int]:
        sizes = self._places.saved[buffer].sizes_bytes
        first = self._extents[self._place(buffer)].offset_bytes
        return first + sum(map(align_up, sizes[:index])), sizes[index]

    def commit(self, step: int, state: Json) -> None:
        """Begin to make what was written durable as the state after `step`; see `Slots.commit`."""
        assert self._slots is not None
        self._slots.commit(step, state)

    def settle(self) -> None:
        """Block until the last commit is on the disk."""
        if self._slots is not None:
            self._slots.settle()

    def has_slots(self, buffer: BufferId) -> bool:
        """Whether a buffer is among those that are kept."""
        return self._slots is not None and buffer in self._slots

    def discard(self) -> None:
        """Let kept state go at the end, also what this one was filled from: nobody needs it."""
        self._discarded = True

    def close(self) -> None:
        """Give the folder free; the file stays when it keeps a step, and goes otherwise."""
        if self._slots is not None:
            # What was recorded before a failed commit still stands, and goes on standing.
            with suppress(StorageError):
                self._slots.settle()
        try:
            self._close_files()
        finally:
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    def _close_files(self) -> None:
        # What is resumed stays, also where it could not be opened as a whole.
        keeps_step = self.recorded_step is not None or self._is_reopened
        stays = keeps_step and not self._discarded
        source = None if self._is_reopened else self._resumed
        if self._record is not None:
            self._record.close() if stays else self._record.remove()
            self._record = None
        if self._file is not None:
            self._file.close() if stays else self._file.remove()
            self._file = None
        self._slots = None
        if source is not None and self._discarded:
            remove_kept(source)

    def _open(self, folder: ScratchSpace, keeping: Keeping | None, fixed: tuple[str, ...]) -> None:
        kept, unreadable = find_kept(folder.path)
        mine = self._resumed
        for each in kept:
            if mine is None or each.record != mine.record:
                raise refuse_kept(each, folder.path)
        for other in unreadable:
            if other.may_return:
                raise refuse_unreadable(other, folder.path)
        folder.remove_files(but=() if mine is None else (mine.file, mine.record))
        used = None if mine is None else mine.names
        names = next(names for names in NAMES if names != used)
        if keeping is None:
            self._file = self._create(folder, names[0])
            return
        header = {
            **keeping.description,
            **describe_layout(folder, self._extents, fixed),
        }
        recorded = None
        if mine is not None and same_header(mine.header, header):
            self._is_reopened = True
            layout, recorded = mine.layout, mine.entry
            self._file = folder.open_file(mine.names[0], self.size_bytes)
            self._record = open_record(mine.record)
        else:
            layout = read_layout(header)
            self._file = self._create(folder, names[0])
            self._record = create_record(
                folder.file_path(names[1]),
                header,
                num_buffers=len(layout.marked),
            )
        # In the order of the header, by which an entry is read: not every reader has the plan.
        self._slots = Slots(
            layout.in_slots,
            flush=self._file.flush,
            record=self._record,
            recorded=recorded,
            fixed=layout.fixed,
        )

    def _create(self, folder: ScratchSpace, name: str) -> StateFile:
        try:
            return folder.create_file(name, self.size_bytes)
        except StorageError as error:
            if self._resumed is None:
                raise
            raise StorageError(
                error.what,
                where=f"{error.where}\nbeside {self._resumed.file}, whose states it takes over",
                fix=f"{error.fix};\nor resume as before, with the plan and the machine file of"
                " the run folder: that needs no second file",
            ) from error
