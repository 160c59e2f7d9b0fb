"""Two slots for what must survive: a write never touches the slot that the record points at.

    read    the slot that was written last
    write   not before a flush in progress is recorded; then the slot that is not recorded
    commit  in the background: flush the file, then record which slots were written last

In: names of buffers, a file's flush and a record file. Out: the slot for every read and write, and
after a crash the newest recorded step with all of its slots untouched. Between two commits a buffer
may be written any number of times: from the second time on in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from packhorse.errors import StorageError
from packhorse.storage.record import Entry, Json, RecordFile

Flush = Callable[[], None]

STUCK_AFTER_S: Final = 600.0
"""A drive that does not bring its cache to the disk in so long is gone."""


class Slots:
    """Which slot of each buffer is read and written, and what is recorded.

    Reads, writes and `commit` may come from different threads; a buffer is not read while it is
    written, and `commit` is called while nothing is written.

    Args:
        names: of the buffers that have two slots.
        flush: brings everything that was written to the disk.
        record: where finished steps are recorded.
        recorded: the entry that the record holds, whose slots are read; None for a new file.
        fixed: buffers with one slot that are written before the first commit and stay.
        stuck_after_s: how long a commit may take.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        flush: Flush,
        record: RecordFile,
        recorded: Entry | None,
        fixed: Sequence[str] = (),
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        self._names = tuple(names)
        self._marked = (*names, *fixed)
        self._flush = flush
        self._record = record
        self._stuck_after_s = stuck_after_s
        self._changed = threading.Condition()
        self._recorded_step = None if recorded is None else recorded.step
        begin = [0] * len(self._names) if recorded is None else list(recorded.slots)
        if len(begin) != len(self._names):
            raise ValueError(f"{len(begin)} slots are recorded, {len(self._names)} are there")
        self._current = dict(zip(self._names, begin, strict=True))
        marks = recorded.marks if recorded is not None and recorded.marks else None
        self._marks: dict[str, int | None] = dict.fromkeys(self._marked)
        if marks is not None:
            self._marks = dict(zip(self._marked, marks, strict=True))
        self._durable = None if recorded is None else dict(self._current)
        self._pending: threading.Thread | None = None
        self._error: StorageError | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._current

    @property
    def recorded_step(self) -> int | None:
        """The newest step that is on the disk, None before the first."""
        return self._recorded_step

    def slot_to_read(self, name: str) -> int:
        """The slot that holds the newest bytes."""
        return self._current[name]

    def slot_to_write(self, name: str) -> int:
        """The slot that a write goes to; blocks while a commit is in progress.

        Raises:
            StorageError: the last commit failed, or does not end.
        """
        with self._changed:
            self._wait()
            return 0 if self._durable is None else 1 - self._durable[name]

    def wrote(self, name: str, slot: int, mark: int | None = None) -> None:
        """Note that a write is complete, and the mark of what was written."""
        self._current[name] = slot
        self._marks[name] = mark

    def marks(self, name: str) -> bool:
        """Whether the mark of a buffer's content is recorded."""
        return name in self._marks

    def wrote_fixed(self, name: str, mark: int) -> None:
        """Note that a buffer with one slot was written."""
        self._marks[name] = mark

    def commit(self, step: int, state: Json) -> None:
        """Begin to make everything written so far durable as the state after `step`.

        Blocks only while the last commit is still in progress.

        Raises:
            StorageError: the last commit failed, or does not end.
        """
        with self._changed:
            self._wait()
            current = dict(self._current)
            entry = Entry(
                step=step,
                slots=tuple(current[name] for name in self._names),
                state=state,
                marks=tuple(self._marks[name] for name in self._marked),
            )
            self._pending = threading.Thread(
                target=self._commit, args=(entry, current), name="packhorse-commit", daemon=True
            )
            self._pending.start()

    def settle(self) -> None:
        """Block until the last commit is on the disk.

        Raises:
            StorageError: it failed, or does not end; what was recorded before it still stands.
        """
        with self._changed:
            self._wait()

    def _wait(self) -> None:
        # Who knows that the drive is silent does not wait for it again.
        if self._error is None and not self._changed.wait_for(
            lambda: self._pending is None, timeout=self._stuck_after_s
        ):
            self._error = StorageError(
                f"the drive has not brought a finished step to the disk in"
                f" {self._stuck_after_s:g} s",
                where=str(self._record.path),
                fix="look at the drive and the kernel log, then resume",
            )
        if self._error is not None:
            raise self._error

    def _commit(self, entry: Entry, current: dict[str, int]) -> None:
        error: StorageError | None = StorageError(
            "finished steps are no longer recorded", fix="look at the error above; then resume"
        )
        try:
            self._flush()
            self._record.add(entry)
            error = None
        except StorageError as caught:
            error = caught
        finally:
            with self._changed:
                if error is None:
                    self._durable = current
                    self._recorded_step = entry.step
                self._error = error
                self._pending = None
                self._changed.notify_all()
