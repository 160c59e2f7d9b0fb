"""Measures the scratch disk by the way that a run uses: preallocated files, a run's own transfers.

In: the scratch folders. Out: each one's rates and the fastest way to move its bytes; and the links
between memory and all of them together: reads alone, writes alone, and both at once.

    for each folder: try ways of moving bytes on a small file, keep the fastest
    make the real file, striped over the folders; write it once before anything counts
    with `WriteLimits`: write on until the rate is steady
    write it, read it, then read one half while the other is written
    in both directions: what computing loses beside it

The file is as large as asked, as far as space and time allow: bytes that still lie in some cache
say nothing of a drive. Files are removed however the probe ends; what a killed one left is removed
by the next.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from packhorse.errors import InputError, StorageError
from packhorse.machine.drives import share_units
from packhorse.machine.probe_crowding import measure_core_ns_per_byte
from packhorse.machine.probe_io import IoPath, PathRates, choose_io_path
from packhorse.machine.probe_passes import Moved, Passes, make_memory
from packhorse.machine.probe_sustained import SustainedRate, WriteLimits, write_until_steady
from packhorse.machine.spec import Drive, Link, TierName
from packhorse.storage.scratch_folder import ScratchFolder, claim_scratch
from packhorse.storage.scratch_space import Scratch, ScratchPart, ScratchSpace
from packhorse.storage.space import explain_failure, free_bytes, nearest_folder
from packhorse.units import GIB, MIB, format_bytes

DEFAULT_FILE_BYTES: Final = 2 * GIB
DEFAULT_LIMIT_NS: Final = 30 * 10**9
"""What the passes and trials of a disk may take, beside `WriteLimits`."""

TRIAL_FILE_BYTES: Final = 256 * MIB
_MIN_FILE_BYTES: Final = MIB
_PAGE_BYTES: Final = 4096
# Of the time limit: a trial in one direction (there are ten trials at most), a pass (four), and a
# direction beside computing.
_TRIAL_SHARE: Final = 0.02
_PASS_SHARE: Final = 0.14
_BESIDE_SHARE: Final = 0.03
_LEAST_MIX_NS: Final = 10**7
_FREE_SHARE: Final = 4
_PREFIX: Final = "packhorse-probe-"

Tell = Callable[[str, int, int], None]
"""Told while writing until steady: what is done, the bytes written, and the most there will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """What the scratch folders do together, and `drives` alone; mixed rates None if unknown.

    `trial_write_bytes_per_s` is what the only drive did in its trial, 0 for several.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_read_bytes_per_s: float | None
    mixed_write_bytes_per_s: float | None
    read_latency_ns: int
    write_latency_ns: int
    measured_bytes: int
    drives: tuple[Drive, ...]
    read_core_ns_per_byte: float | None = None
    write_core_ns_per_byte: float | None = None
    sustained: SustainedRate | None = None
    trial_write_bytes_per_s: float = 0.0

    @property
    def burst_bytes_per_s(self) -> float | None:
        """The rate at first, where the one at last is known to be steady.

        A short trial is over before a cache is full, and so may be the early windows.
        """
        found = self.sustained
        if found is None or not found.steady:
            return None
        return max(found.early_bytes_per_s, found.bytes_per_s, self.trial_write_bytes_per_s)

    def links(self, memory: TierName) -> tuple[Link, Link]:
        """Give the two links between the disk and the tier that its transfers start and end in."""
        return (
            Link(
                source=memory,
                target="disk",
                bytes_per_s=self.write_bytes_per_s,
                latency_ns=self.write_latency_ns,
                mixed_bytes_per_s=self.mixed_write_bytes_per_s,
                burst_bytes_per_s=self.burst_bytes_per_s,
                core_ns_per_byte=self.write_core_ns_per_byte,
            ),
            Link(
                source="disk",
                target=memory,
                bytes_per_s=self.read_bytes_per_s,
                latency_ns=self.read_latency_ns,
                mixed_bytes_per_s=self.mixed_read_bytes_per_s,
                core_ns_per_byte=self.read_core_ns_per_byte,
            ),
        )


def measure_disk(
    *folders: str,
    file_bytes: int = DEFAULT_FILE_BYTES,
    limit_ns: int = DEFAULT_LIMIT_NS,
    sustained: WriteLimits | None = None,
    tell: Tell | None = None,
) -> DiskRates:
    """Measure reads and writes in temporary folders inside (or nearest above) the scratch folders.

    Args:
        folders: the scratch folders, each on a drive of its own.
        file_bytes: size of the file, lowered to a quarter of the free space.
        limit_ns: passes end when they took their share of it, and count as far as they got.
        sustained: write on until the rate is steady (a drive's cache is full) or a limit reached.

    Raises:
        StorageError: a folder is unwritable, has too little space, or a disk fails.
    """
    sizes: dict[str, int] = {}
    for folder in folders:
        remove_dead_probes(nearest_folder(folder))
        sizes[folder] = affordable_bytes(folder, file_bytes)
    with ExitStack() as stack:
        claimed = [stack.enter_context(_claim_beside(folder)) for folder in folders]
        chosen = [
            _choose(each, sizes[name], limit_ns)
            for name, each in zip(folders, claimed, strict=True)
        ]
        drives = tuple(
            _describe(name, path, rates, sizes[name])
            for name, (path, rates) in zip(folders, chosen, strict=True)
        )
        units = share_units(drives)
        # The smallest for its share limits all of them, as in a run.
        most = min(
            sizes[name] * sum(units) // own for name, own in zip(folders, units, strict=True)
        )
        total_bytes = min(file_bytes, most) // _PAGE_BYTES * _PAGE_BYTES
        space = ScratchSpace(_scratch_of(drives, units), tuple(claimed))
        huge_pages = all(drive.huge_pages for drive in drives)
        rates = _measure(space, total_bytes, huge_pages, limit_ns, sustained, tell)
    # Of several drives nobody tried all at once.
    alone = drives[0].write_bytes_per_s if len(drives) == 1 else 0.0
    return replace(rates, drives=_settle(drives, rates), trial_write_bytes_per_s=alone)


def remove_dead_probes(parent: Path) -> tuple[Path, ...]:
    """Remove the temporary folders of probes that were killed; those of live ones stay."""
    removed: list[Path] = []
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        if not folder.is_dir():
            continue
        try:
            with claim_scratch(folder) as claimed:
                claimed.remove_files()
        except (InputError, StorageError):
            # In use by a live probe, or not ours to remove.
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return tuple(removed)


def affordable_bytes(folder: str, file_bytes: int) -> int:
    """Lower the size of a probe's file to a quarter of what is free.

    Raises:
        StorageError: that is next to nothing.
    """
    parent = nearest_folder(folder)
    have_bytes = free_bytes(parent)
    size_bytes = min(file_bytes, have_bytes // _FREE_SHARE) // _PAGE_BYTES * _PAGE_BYTES
    if size_bytes < _MIN_FILE_BYTES:
        raise StorageError(
            f"too little space to measure the disk: {have_bytes} bytes are free",
            where=str(parent),
            fix="free some space there or name another scratch folder",
        )
    return size_bytes


@contextmanager
def _claim_beside(scratch: str) -> Generator[ScratchFolder]:
    """Hold a temporary folder on the scratch folder's disk; it goes at the end, with its files."""
    parent = nearest_folder(scratch)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise explain_failure(error, parent, "measure the disk") from error
    try:
        with claim_scratch(folder) as claimed:
            yield claimed
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _choose(folder: ScratchFolder, size_bytes: int, limit_ns: int) -> tuple[IoPath, PathRates]:
    trial_bytes = min(TRIAL_FILE_BYTES, size_bytes)
    trial_ns = round(limit_ns * _TRIAL_SHARE)
    # Every trial finds space that was written before.
    made = folder.create_file("trial", trial_bytes)
    try:
        with make_memory(trial_bytes, huge_pages=True) as memory:
            primed = Passes(made, memory)
            primed.prime(5 * trial_ns)

        def trial(path: IoPath) -> PathRates | None:
            part = ScratchPart(
                folder=folder.path,
                direct=path.direct,
                block_bytes=path.block_bytes,
                num_threads=path.num_threads,
            )
            space = ScratchSpace(Scratch(parts=(part,)), (folder,))
            with (
                space.open_file("trial", trial_bytes) as file,
                make_memory(trial_bytes, huge_pages=path.huge_pages) as memory,
            ):
                if path.direct and not file.direct:
                    return None
                passes = Passes(file, memory)
                passes.size_bytes = primed.size_bytes
                return PathRates(
                    write_bytes_per_s=passes.write(trial_ns).bytes_per_s,
                    read_bytes_per_s=passes.read(trial_ns).bytes_per_s,
                )

        return choose_io_path(trial)
    finally:
        made.remove()


def _describe(folder: str, path: IoPath, rates: PathRates, size_bytes: int) -> Drive:
    return Drive(
        path=folder,
        budget_bytes=size_bytes,
        read_bytes_per_s=rates.read_bytes_per_s,
        write_bytes_per_s=rates.write_bytes_per_s,
        measured_bytes=min(TRIAL_FILE_BYTES, size_bytes),
        direct=path.direct,
        block_bytes=path.block_bytes,
        num_threads=path.num_threads,
        huge_pages=path.huge_pages,
    )


def _scratch_of(drives: Sequence[Drive], units: Sequence[int]) -> Scratch:
    return Scratch(
        parts=tuple(
            ScratchPart(
                folder=Path(drive.path),
                units=own,
                direct=drive.direct,
                block_bytes=drive.block_bytes,
                num_threads=drive.num_threads,
            )
            for drive, own in zip(drives, units, strict=True)
        )
    )


def _measure(
    space: ScratchSpace,
    size_bytes: int,
    huge_pages: bool,
    limit_ns: int,
    sustained: WriteLimits | None,
    tell: Tell | None,
) -> DiskRates:
    pass_ns = round(limit_ns * _PASS_SHARE)
    file = space.create_file("probe", size_bytes)
    try:
        with make_memory(size_bytes, huge_pages=huge_pages) as memory:
            passes = Passes(file, memory)
            steady: SustainedRate | None = None
            if sustained is None:
                passes.prime(pass_ns)
                write_bytes_per_s = passes.write(pass_ns).bytes_per_s
            else:
                steady = _write_on(passes, sustained, tell)
                write_bytes_per_s = steady.bytes_per_s
            read = passes.read(pass_ns)
            beside_ns = round(limit_ns * _BESIDE_SHARE)
            # About as long as half of each takes at half the rate.
            mixed = passes.mix(min(pass_ns, max(_LEAST_MIX_NS, 2 * read.duration_ns)))
            return DiskRates(
                read_bytes_per_s=read.bytes_per_s,
                write_bytes_per_s=write_bytes_per_s,
                mixed_read_bytes_per_s=None if mixed is None else mixed[0].bytes_per_s,
                mixed_write_bytes_per_s=None if mixed is None else mixed[1].bytes_per_s,
                read_latency_ns=passes.latency_ns(writing=False),
                write_latency_ns=passes.latency_ns(writing=True),
                measured_bytes=passes.size_bytes,
                drives=(),
                read_core_ns_per_byte=measure_core_ns_per_byte(passes.read, beside_ns),
                write_core_ns_per_byte=measure_core_ns_per_byte(passes.write, beside_ns),
                sustained=steady,
            )
    finally:
        file.remove()


def _write_on(passes: Passes, limits: WriteLimits, tell: Tell | None) -> SustainedRate:
    """Write windows, round after round through the file, until the rate is steady."""
    # A window is a thirty-second of what may be written, but never less than one piece.
    per_window = max(1, limits.size_bytes // 32 // passes.piece_bytes)
    written_before = 0

    def write_window() -> Moved:
        nonlocal written_before
        window = passes.write_from(written_before, per_window)
        written_before += per_window
        return window

    what = (
        f"writing until the rate is steady, at most {format_bytes(limits.size_bytes)} or"
        f" {limits.duration_ns / 1e9:.0f} s"
    )

    def say(written_bytes: int) -> None:
        if tell is not None:
            tell(what, min(written_bytes, limits.size_bytes), limits.size_bytes)

    found = write_until_steady(write_window, limits, first_bytes=passes.size_bytes, tell=say)
    passes.size_bytes = min(passes.size_bytes, found.written_bytes)
    return found


def _settle(drives: tuple[Drive, ...], rates: DiskRates) -> tuple[Drive, ...]:
    """Give the only drive the rates of the long passes; several keep those of their trials."""
    if len(drives) > 1:
        return tuple(replace(drive, measured_bytes=rates.measured_bytes) for drive in drives)
    return tuple(
        replace(
            drive,
            read_bytes_per_s=rates.read_bytes_per_s,
            write_bytes_per_s=rates.write_bytes_per_s,
            measured_bytes=rates.measured_bytes,
        )
        for drive in drives
    )
