"""Measures the scratch disk by the path that a run uses: one preallocated file, huge-page memory.

In: the scratch folder. Out: read and write links between memory and disk. The file is written once
before anything counts, since the first write of allocated space costs more than every later one;
it is removed afterwards, and what a killed probe left is removed by the next one.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.errors import InputError, StorageError
from packhorse.machine.spec import Link, TierName
from packhorse.storage.mapping import Mapping
from packhorse.storage.scratch_file import ScratchFile
from packhorse.storage.scratch_folder import ScratchFolder, claim_scratch
from packhorse.storage.space import explain_failure, free_bytes, nearest_folder
from packhorse.units import MIB

DEFAULT_FILE_BYTES: Final = 256 * MIB
_MIN_FILE_BYTES: Final = MIB
_PIECE_BYTES: Final = 32 * MIB
_PAGE_BYTES: Final = 4096
_LATENCY_RUNS: Final = 25
_STEADY_PASSES: Final = 4
_STEADY_SHARE: Final = 0.05
_STEADY_LIMIT_NS: Final = 120 * 10**9
_PREFIX: Final = "packhorse-probe-"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """What the scratch disk does."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    read_latency_ns: int
    write_latency_ns: int
    direct: bool

    def links(self, memory: TierName) -> tuple[Link, Link]:
        """Give the two links between the disk and the tier that its transfers start and end in."""
        return (
            Link(
                source=memory,
                target="disk",
                bytes_per_s=self.write_bytes_per_s,
                latency_ns=self.write_latency_ns,
            ),
            Link(
                source="disk",
                target=memory,
                bytes_per_s=self.read_bytes_per_s,
                latency_ns=self.read_latency_ns,
            ),
        )


def measure_disk(
    scratch: str, *, file_bytes: int = DEFAULT_FILE_BYTES, sustained: bool = False
) -> DiskRates:
    """Measure reads and writes in a temporary folder inside (or nearest above) `scratch`.

    Args:
        scratch: the scratch folder.
        file_bytes: size of the file, lowered to a quarter of the free space.
        sustained: write on until the rate is steady (a drive's cache is full) or two minutes pass.

    Raises:
        StorageError: the folder is unwritable or the disk fails.
    """
    parent = nearest_folder(scratch)
    remove_dead_probes(parent)
    size_bytes = min(file_bytes, free_bytes(parent) // 4) // _PAGE_BYTES * _PAGE_BYTES
    if size_bytes < _MIN_FILE_BYTES:
        raise StorageError(
            f"too little space to measure the disk: {free_bytes(parent)} bytes are free",
            where=str(parent),
            fix="free some space there or name another scratch folder",
        )
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise explain_failure(error, parent, "measure the disk") from error
    try:
        with claim_scratch(folder) as claimed:
            return _measure(claimed, size_bytes, sustained=sustained)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _measure(claimed: ScratchFolder, size_bytes: int, *, sustained: bool) -> DiskRates:
    piece_bytes = min(_PIECE_BYTES, size_bytes)
    with Mapping(piece_bytes) as mapping, claimed.create_file("probe", size_bytes) as file:
        # A drive may compress or skip zeros: give it bytes that differ.
        view = mapping.view(0, piece_bytes)
        pattern = bytes((index * 37 + (index >> 8)) & 0xFF for index in range(64 * 1024))
        for start in range(0, piece_bytes, len(pattern)):
            end = min(start + len(pattern), piece_bytes)
            view[start:end] = pattern[: end - start]
        view.release()
        _write_pass(file, mapping, piece_bytes)
        write_rates = [_write_pass(file, mapping, piece_bytes)]
        began = time.perf_counter_ns()
        while sustained and not _is_steady(write_rates):
            if time.perf_counter_ns() - began > _STEADY_LIMIT_NS:
                break
            write_rates.append(_write_pass(file, mapping, piece_bytes))
        write_latency_ns = _page_latency_ns(file, mapping, writing=True)
        before = file.counters
        for offset_bytes in range(0, size_bytes, piece_bytes):
            length = min(piece_bytes, size_bytes - offset_bytes)
            # A run reads into chunks whose pages it gave back: making them anew is in the rate.
            mapping.drop(0, piece_bytes)
            file.read_into(mapping.address, offset_bytes, length)
        spent = file.counters.since(before)
        return DiskRates(
            read_bytes_per_s=spent.read_bytes * 1e9 / max(1, spent.read_ns),
            write_bytes_per_s=statistics.mean(write_rates[-_STEADY_PASSES:])
            if sustained
            else write_rates[-1],
            read_latency_ns=_page_latency_ns(file, mapping, writing=False),
            write_latency_ns=write_latency_ns,
            direct=file.direct,
        )


def _write_pass(file: ScratchFile, mapping: Mapping, piece_bytes: int) -> float:
    before = file.counters
    for offset_bytes in range(0, file.size_bytes, piece_bytes):
        length = min(piece_bytes, file.size_bytes - offset_bytes)
        file.write_from(mapping.address, offset_bytes, length)
    spent = file.counters.since(before)
    return spent.written_bytes * 1e9 / max(1, spent.write_ns)


def _is_steady(rates: list[float]) -> bool:
    last = rates[-_STEADY_PASSES:]
    mean = statistics.mean(last)
    return len(last) == _STEADY_PASSES and max(last) - min(last) <= _STEADY_SHARE * mean


def _page_latency_ns(file: ScratchFile, mapping: Mapping, *, writing: bool) -> int:
    """Median time of moving one page, over pages spread across the file."""
    num_pages = file.size_bytes // _PAGE_BYTES
    durations_ns: list[int] = []
    for index in range(_LATENCY_RUNS):
        offset_bytes = index * 7919 % num_pages * _PAGE_BYTES
        began = time.perf_counter_ns()
        if writing:
            file.write_from(mapping.address, offset_bytes, _PAGE_BYTES)
        else:
            file.read_into(mapping.address, offset_bytes, _PAGE_BYTES)
        durations_ns.append(time.perf_counter_ns() - began)
    return round(statistics.median(durations_ns))
