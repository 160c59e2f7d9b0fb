"""Machine files: JSON and YAML in, JSON and YAML out.

In: text, or a path that ends in .json, .yaml or .yml. Out: a `Machine`; or a `FileFormatError` that
names the key, what was expected there, and the nearest key that exists.
`parse_machine(format_machine(machine)) == machine` always holds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Final, cast

from pydantic import TypeAdapter, ValidationError

from packhorse.errors import FileFormatError, PackhorseError
from packhorse.machine.reading import (
    FIX,
    FileSort,
    check_names,
    explain_invalid,
    parse_body,
    read_file,
    write_notation,
)
from packhorse.machine.spec import (
    Drive,
    Emulation,
    Heap,
    Link,
    Machine,
    MatmulPoint,
    PeerLink,
    Saving,
    Tier,
    UpdateRate,
)
from packhorse.units import format_bytes

KIND: Final = "packhorse/machine"
VERSION: Final = 2
"""2 came with drives, mixed and burst rates; files of version 1 name none of them."""

_SORT: Final = FileSort(noun="machine", kind=KIND, version=VERSION)
_PARTS: Final[Mapping[str, type]] = {
    "tiers": Tier,
    "links": Link,
    "matmul": MatmulPoint,
    "updates": UpdateRate,
    "heap": Heap,
    "saving": Saving,
    "emulation": Emulation,
    "peers": PeerLink,
}
_PAGE_BYTES: Final = 4096
MOST_DRIVE_THREADS: Final = 16


def format_machine(machine: Machine) -> str:
    """Render a machine as JSON text that ends in a newline."""
    return json.dumps({"kind": KIND, "version": VERSION} | asdict(machine), indent=2) + "\n"


def write_machine(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine file; YAML when the name ends in .yaml or .yml, else JSON.

    Raises:
        FileFormatError: the file cannot be written.
    """
    write_notation(format_machine(machine), path, _SORT)


def read_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine file.

    Raises:
        FileFormatError: the file is missing, of another kind, of a newer version, or damaged.
    """
    return parse_machine(read_file(path, _SORT), where=os.fspath(path))


def parse_machine(text: str, *, where: str = "machine text") -> Machine:
    """Read a machine from JSON or YAML text.

    Args:
        where: what errors name as the place, such as the path.

    Raises:
        FileFormatError: as for `read_machine`.
    """
    return take_machine(parse_body(text, _SORT, where), where)


def take_machine(body: Mapping[str, object], where: str) -> Machine:
    """Make a machine of the keys of a file, without kind and version.

    Raises:
        FileFormatError: a key is unknown, missing or ill-typed, or parts do not fit together.
    """
    _check_keys(body, where)
    try:
        machine = TypeAdapter(Machine).validate_python(body)
    except ValidationError as error:
        raise explain_invalid(error, where) from error
    check_machine(machine, where)
    return machine


def check_machine(machine: Machine, where: str) -> None:
    """Refuse a machine whose parts do not fit together.

    Raises:
        FileFormatError: names the first part that is wrong.
    """

    def refuse(what: str, key: str) -> PackhorseError:
        return FileFormatError(what, where=f"{where}: {key}", fix=FIX)

    names = [tier.name for tier in machine.tiers]
    if "device" not in names:
        raise refuse("a machine needs a tier named device", "tiers")
    for index, tier in enumerate(machine.tiers):
        if tier.name in names[:index]:
            raise refuse(f"tier {tier.name} is there twice", f"tiers[{index}]")
        if not 0 <= tier.budget_bytes <= tier.total_bytes:
            raise refuse(
                f"the budget of tier {tier.name} is {format_bytes(tier.budget_bytes)}, outside 0 .."
                f" {format_bytes(tier.total_bytes)}",
                f"tiers[{index}].budget_bytes",
            )
        if tier.endurance_bytes is not None and tier.endurance_bytes <= 0:
            raise refuse(
                f"the endurance must be above 0, not {tier.endurance_bytes}",
                f"tiers[{index}].endurance_bytes",
            )
        if tier.name == "disk" and not tier.path:
            raise refuse("the disk tier needs the path of a scratch folder", f"tiers[{index}].path")
        for key, what in _find_drive_faults(tier):
            raise refuse(what, f"tiers[{index}].{key}")
    for index, link in enumerate(machine.links):
        for end in (link.source, link.target):
            if end not in names:
                raise refuse(f"there is no tier named {end}", f"links[{index}]")
        if link.latency_ns < 0:
            raise refuse("a latency cannot be negative", f"links[{index}].latency_ns")
        core_ns = link.core_ns_per_byte
        if core_ns is not None and not (math.isfinite(core_ns) and core_ns >= 0):
            raise refuse(
                f"a core's time must be 0 or more, not {core_ns}",
                f"links[{index}].core_ns_per_byte",
            )
    for key, what in _find_peer_faults(machine):
        raise refuse(what, key)
    for index, update in enumerate(machine.updates):
        if update.tier not in names:
            raise refuse(f"there is no tier named {update.tier}", f"updates[{index}].tier")
    if not machine.matmul:
        raise refuse("a machine needs at least one point of the matmul curve", "matmul")
    rates = {
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "compute_scale": machine.compute_scale,
    }
    for index, link in enumerate(machine.links):
        alone = f"links[{index}].bytes_per_s"
        found = {
            alone: link.bytes_per_s,
            f"links[{index}].mixed_bytes_per_s": link.mixed_bytes_per_s,
            f"links[{index}].burst_bytes_per_s": link.burst_bytes_per_s,
        }
        rates |= {key: rate for key, rate in found.items() if rate is not None}
    if machine.saving is not None:
        rates |= {
            "saving.write_bytes_per_s": machine.saving.write_bytes_per_s,
            "saving.checksum_bytes_per_s": machine.saving.checksum_bytes_per_s,
        }
        if machine.saving.sync_ns < 0:
            raise refuse("a time cannot be negative", "saving.sync_ns")
    rates |= {f"matmul[{i}].flops_per_s": x.flops_per_s for i, x in enumerate(machine.matmul)}
    rates |= {
        f"updates[{i}].parameters_per_s": x.parameters_per_s for i, x in enumerate(machine.updates)
    }
    for key, rate in rates.items():
        if not (math.isfinite(rate) and rate > 0):
            raise refuse(f"a rate must be a positive number, not {rate}", key)
    counts = {"num_cores": machine.num_cores, "num_threads": machine.num_threads}
    counts |= {f"matmul[{i}].size": x.size for i, x in enumerate(machine.matmul)}
    for key, count in counts.items():
        if count < 1:
            raise refuse(f"must be at least 1, not {count}", key)
    for key, share in (
        ("map_cost", machine.heap.map_cost),
        ("keep_slack", machine.heap.keep_slack),
    ):
        if not (math.isfinite(share) and share >= 0):
            raise refuse(f"a share must be 0 or more, not {share}", f"heap.{key}")
    if not 0 <= machine.busy_share <= 1:
        raise refuse(f"a share must be 0 to 1, not {machine.busy_share}", "busy_share")
    if machine.emulation is not None:
        for what in _find_emulation_faults(machine, machine.emulation):
            raise refuse(what, "emulation")


def _find_peer_faults(machine: Machine) -> Iterator[tuple[str, str]]:
    """Find what is wrong with the links to other ranks, as keys and sentences."""
    seen: set[int] = set()
    for index, link in enumerate(machine.peers):
        place = f"peers[{index}]"
        if link.peer < 0:
            yield f"{place}.peer", f"ranks count from 0, so there is no rank {link.peer}"
        if link.peer in seen:
            yield f"{place}.peer", f"there is a second link to rank {link.peer}"
        seen.add(link.peer)
        for key, what in find_link_faults(link):
            yield f"{place}.{key}", what


def find_link_faults(link: PeerLink) -> Iterator[tuple[str, str]]:
    """Find numbers of a link between ranks that make no sense, as keys and sentences."""
    if not (math.isfinite(link.bytes_per_s) and link.bytes_per_s > 0):
        yield "bytes_per_s", f"a rate must be a positive number, not {link.bytes_per_s}"
    if link.latency_ns < 0:
        yield "latency_ns", "a latency cannot be negative"
    if not (math.isfinite(link.core_ns_per_byte) and link.core_ns_per_byte >= 0):
        yield "core_ns_per_byte", f"a core's time must be 0 or more, not {link.core_ns_per_byte}"


def _find_emulation_faults(machine: Machine, emulation: Emulation) -> Iterator[str]:
    """Find what an emulated machine lacks."""
    if machine.device != "cpu":
        yield f"a machine is emulated on the CPU, so its device is cpu, not {machine.device}"
    if not (math.isfinite(emulation.slowdown) and emulation.slowdown > 0):
        yield f"the slowdown must be a positive number, not {emulation.slowdown}"
    for source, target in (("host", "device"), ("device", "host")):
        if not any((link.source, link.target) == (source, target) for link in machine.links):
            yield f"an emulated machine needs a link from {source} to {target}"
    for tier in ("device", "host"):
        if not any(update.tier == tier for update in machine.updates):
            yield f"an emulated machine needs an update rate of tier {tier}"


def _find_drive_faults(tier: Tier) -> Iterator[tuple[str, str]]:
    """Find what is wrong with the drives of a tier, as keys and sentences."""
    if tier.drives and tier.name != "disk":
        yield "drives", f"only the disk tier has drives, not {tier.name}"
    if tier.drives and tier.drives[0].path != tier.path:
        yield "drives[0].path", f"the first drive must be at the tier's path, {tier.path!r}"
    paths: set[str] = set()
    for index, drive in enumerate(tier.drives):
        place = f"drives[{index}]"
        if not drive.path or drive.path in paths:
            yield f"{place}.path", f"each drive needs a folder of its own, not {drive.path!r}"
        paths.add(drive.path)
        for key, rate in (
            ("read_bytes_per_s", drive.read_bytes_per_s),
            ("write_bytes_per_s", drive.write_bytes_per_s),
        ):
            if not (math.isfinite(rate) and rate > 0):
                yield f"{place}.{key}", f"a rate must be a positive number, not {rate}"
        if drive.budget_bytes < 0 or drive.measured_bytes < 0:
            yield place, "a number of bytes cannot be negative"
        if drive.block_bytes < 1 or drive.block_bytes % _PAGE_BYTES:
            yield f"{place}.block_bytes", f"must be a multiple of {_PAGE_BYTES}"
        if not 1 <= drive.num_threads <= MOST_DRIVE_THREADS:
            yield f"{place}.num_threads", f"must be 1 to {MOST_DRIVE_THREADS}"


def _check_keys(body: Mapping[str, object], where: str) -> None:
    """Refuse unknown keys, naming the nearest, before the types are looked at."""
    check_names(body, Machine, where)
    for key, part in _PARTS.items():
        value = body.get(key)
        entries: list[object] = [value]
        if isinstance(value, list):
            entries = cast("list[object]", value)  # parsed text: each entry is checked below
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                place = f"{key}[{index}]" if isinstance(value, list) else key
                names = cast("dict[str, object]", entry)  # parsed text: only its keys are read
                check_names(names, part, f"{where}: {place}")
                if part is Tier:
                    _check_drive_names(names.get("drives"), f"{where}: {place}")


def _check_drive_names(drives: object, where: str) -> None:
    if isinstance(drives, list):
        entries = cast("list[object]", drives)  # parsed text: each entry is checked here
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                names = cast("dict[str, object]", entry)  # parsed text: only its keys are read
                check_names(names, Drive, f"{where}.drives[{index}]")
