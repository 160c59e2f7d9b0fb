"""Budgets: how much of each tier a plan may use.

In: the recipe's form `{device: 22GiB, host: 48GiB, disk: [{path: scratch, size: 600GiB}]}`, the
command line's form `device=22GiB,disk=600GiB`, or `--memory 2GiB`. Out: a `Budget`, and a `Machine`
whose tiers carry it.
A tier that no budget names may use what is free there less a margin: a tenth of it, at least
`MEMORY_MARGIN_BYTES` of memory or `DISK_MARGIN_BYTES` of a disk.
Several scratch folders are written `disk: [{path: /a/scratch}, {path: /b/scratch}]`, or
`disk=/a/scratch:600GiB,disk=/b/scratch:300GiB` on the command line; each has its own budget.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, cast, get_args

from packhorse.errors import InputError
from packhorse.machine.disks import find_disk
from packhorse.machine.drives import usable_bytes
from packhorse.machine.spec import Drive, Machine, Tier, TierName
from packhorse.units import GIB, MIB, format_bytes, format_exact_bytes, parse_bytes

DEFAULT_SCRATCH: Final = "scratch"
MARGIN_SHARE: Final = 0.1
MEMORY_MARGIN_BYTES: Final = 512 * MIB
DISK_MARGIN_BYTES: Final = 2 * GIB
_TIER_NAMES: Final[tuple[TierName, ...]] = get_args(TierName)
_WHERE: Final = "budget"
_FORMS: Final = (
    "write for example device=22GiB,host=48GiB,disk=600GiB or"
    " {device: 22GiB, disk: [{path: scratch, size: 600GiB}]}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBudget:
    """A scratch folder and how much of its disk may be used; None: what is free less a margin."""

    path: str
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a person grants per tier; None, or no disk: what is free less a margin."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    disks: tuple[DiskBudget, ...] = ()


def free_less_margin(free: int, kind: Literal["memory", "disk"]) -> int:
    """Take the stated margin off what is free; never below 0. Both are bytes."""
    least = MEMORY_MARGIN_BYTES if kind == "memory" else DISK_MARGIN_BYTES
    return max(0, free - max(int(free * MARGIN_SHARE), least))


def parse_budget(value: object) -> Budget:
    """Read a budget in the recipe's form, in the command line's form, or None (nothing named).

    Raises:
        InputError: names the key, the value and the accepted forms.
    """
    if value is None:
        return Budget()
    if isinstance(value, Budget):
        return value
    if isinstance(value, str):
        value = _split_text(value)
    if not isinstance(value, Mapping):
        raise _bad(f"a budget cannot be {value!r}")
    entries = cast("Mapping[object, object]", value)  # from a recipe or a caller: checked here
    for name in entries:
        if name not in _TIER_NAMES:
            near = difflib.get_close_matches(str(name), _TIER_NAMES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"tiers are {', '.join(_TIER_NAMES)}"
            raise InputError(f"unknown tier {name!r} in the budget", where=_WHERE, fix=hint)
    disk = entries.get("disk")
    return Budget(
        device_bytes=_parse_size("device", entries.get("device")),
        host_bytes=_parse_size("host", entries.get("host")),
        disks=() if disk is None else _parse_disks(disk),
    )


def parse_memory(text: str | int, machine: Machine) -> Budget:
    """Read `--memory X`, short for `device=X`.

    Raises:
        InputError: the machine has a GPU, where it would be unclear which memory is meant.
    """
    if machine.device != "cpu":
        raise InputError(
            f"--memory is ambiguous here: {machine.name} has a {machine.device} device and RAM",
            where=f"--memory {text}",
            fix=f"write --budget device={text} for the device's memory, or host={text} for RAM",
        )
    return Budget(device_bytes=_parse_size("device", text))


def with_budget(machine: Machine, budget: Budget, *, here: bool = False) -> Machine:
    """Give a machine's tiers the budget; tiers that it does not name keep what they have.

    Args:
        here: as for `grant_tiers`.

    Raises:
        InputError: as for `grant_tiers`.
    """
    tiers = grant_tiers(machine.tiers, budget, owner=machine.name, here=here)
    return replace(machine, tiers=tiers)


def grant_tiers(
    tiers: Sequence[Tier], budget: Budget, *, owner: str, here: bool = False
) -> tuple[Tier, ...]:
    """Give tiers the budget; those that it does not name keep what they have.

    Args:
        owner: the machine's name, for messages.
        here: the machine is the one that this process runs on, so that the scratch folder must be
            writable and its disk must have the space now.

    Raises:
        InputError: a tier is not there, has less than the budget, or its folder is unwritable.
    """
    named: dict[TierName, int | None] = {
        "device": budget.device_bytes,
        "host": budget.host_bytes,
    }
    there: list[TierName] = [tier.name for tier in tiers]
    for name, size_bytes in named.items():
        if name not in there and size_bytes is not None:
            raise _no_tier(owner, there, name)
    if budget.disks and "disk" not in there:
        raise _no_tier(owner, there, "disk")
    return tuple(
        _grant_disk(tier, budget.disks, owner, here=here)
        if tier.name == "disk"
        else _grant(tier, named.get(tier.name), owner)
        for tier in tiers
    )


def _grant(tier: Tier, size_bytes: int | None, owner: str) -> Tier:
    if size_bytes is None:
        return tier
    if size_bytes > tier.total_bytes:
        raise InputError(
            f"the budget of tier {tier.name} is {format_bytes(size_bytes)}, but {owner}"
            f" has {format_bytes(tier.total_bytes)}",
            where=f"{_WHERE}: {tier.name}" + (f" ({tier.path})" if tier.path else ""),
            fix=f"grant at most {tier.name}={_floor_mib(tier.total_bytes)}",
        )
    return replace(tier, budget_bytes=size_bytes)


def _grant_disk(tier: Tier, disks: Sequence[DiskBudget], owner: str, *, here: bool) -> Tier:
    if len(disks) > 1 or (disks and len(tier.drives) > 1):
        tier = _grant_drives(tier, disks, owner, here=here)
    elif disks:
        tier = replace(tier, path=disks[0].path)
        if here:
            tier = _measure_disk(tier)
        tier = _grant(tier, disks[0].size_bytes, owner)
        tier = replace(
            tier,
            drives=tuple(
                replace(drive, path=disks[0].path, budget_bytes=tier.budget_bytes)
                for drive in tier.drives
            ),
        )
    if here and tier.budget_bytes:
        check_scratch(tier)
    return tier


def _grant_drives(tier: Tier, disks: Sequence[DiskBudget], owner: str, *, here: bool) -> Tier:
    """Give each drive its budget; together they hold what the smallest for its share allows."""
    named = {disk.path: disk.size_bytes for disk in disks}
    known = [drive.path for drive in tier.drives]
    if sorted(named) != sorted(known):
        raise InputError(
            f"the budget names the scratch folder{'s' if len(named) > 1 else ''}"
            f" {', '.join(named)}, but {owner} was measured with"
            f" {', '.join(known or [str(tier.path)])}",
            where=f"{_WHERE}: disk",
            fix="name the same folders, or measure the ones that you want together: packhorse probe"
            " --budget " + ",".join(f"disk={path}" for path in named),
        )
    free = free_disk_bytes(known) if here else {}
    drives: list[Drive] = []
    for drive in tier.drives:
        default = free_less_margin(free[drive.path], "disk") if here else drive.budget_bytes
        size_bytes = named[drive.path]
        if here and size_bytes is not None and size_bytes > free[drive.path]:
            raise _disk_is_full(drive.path, size_bytes, free[drive.path])
        drives.append(replace(drive, budget_bytes=default if size_bytes is None else size_bytes))
    total_bytes = sum(free.values()) if here else tier.total_bytes
    granted = replace(tier, total_bytes=total_bytes, path=known[0], drives=tuple(drives))
    return _grant(granted, usable_bytes(drives), owner)


def free_disk_bytes(paths: Sequence[str]) -> dict[str, int]:
    """What is free under each folder; folders of one file system get equal parts of it."""
    disks = {path: find_disk(path) for path in paths}
    names = [disk.drive for disk in disks.values()]
    return {path: disk.free_bytes // names.count(disk.drive) for path, disk in disks.items()}


def check_scratch(tier: Tier) -> None:
    """Refuse a disk tier whose folders cannot be made or written, or whose disks are too full.

    Raises:
        InputError: names the folder, and need and have.
    """
    shares = {drive.path: drive.budget_bytes for drive in tier.drives}
    for path, need_bytes in (shares or {tier.path or DEFAULT_SCRATCH: tier.budget_bytes}).items():
        disk = find_disk(path)
        is_file = Path(path).exists() and not Path(path).is_dir()
        if is_file or not disk.writable:
            raise InputError(
                f"the scratch folder cannot be {'used: it is no folder' if is_file else 'written'}",
                where=f"{_WHERE}: disk ({path})",
                fix="name a folder that this user may write, for example disk: [{path: scratch}]",
            )
        if disk.free_bytes < need_bytes:
            raise _disk_is_full(path, need_bytes, disk.free_bytes)


def _disk_is_full(path: str, need_bytes: int, have_bytes: int) -> InputError:
    return InputError(
        f"the budget of tier disk is {format_bytes(need_bytes)}, but"
        f" {format_bytes(have_bytes)} are free",
        where=f"{_WHERE}: disk ({path})",
        fix=f"free some space there or grant at most disk={_floor_mib(have_bytes)}",
    )


def _measure_disk(tier: Tier) -> Tier:
    have_bytes = find_disk(tier.path or DEFAULT_SCRATCH).free_bytes
    return replace(tier, total_bytes=have_bytes, budget_bytes=free_less_margin(have_bytes, "disk"))


def _no_tier(owner: str, there: Sequence[TierName], name: TierName) -> InputError:
    fix = f"name only the tiers that are there: {', '.join(there)}"
    if name == "host":
        fix = "without a GPU the device tier is the share of RAM: write device=... instead"
    return InputError(f"the budget names tier {name}, but {owner} has none", where=_WHERE, fix=fix)


def _split_text(text: str) -> dict[str, object]:
    entries: dict[str, object] = {}
    disks: list[object] = []
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise _bad(f"cannot read {part.strip()!r} as TIER=SIZE")
        if name == "disk":
            disks.append(value)
        elif name in entries:
            raise _bad(f"tier {name!r} is named twice")
        else:
            entries[name] = value
    if disks:
        entries["disk"] = disks
    return entries


def _parse_size(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _bad(f"tier {name}: {value!r} is no size")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise _bad(f"tier {name}: {error}") from error


def _parse_disks(value: object) -> tuple[DiskBudget, ...]:
    """Read one scratch folder in any form, or a list of them."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return (_parse_disk(value),)
    shares = cast("Sequence[object]", value)  # from a recipe; the entries are checked below
    disks = tuple(_parse_disk(share) for share in shares)
    if not disks:
        raise _bad("the disk budget is an empty list")
    places = [os.path.realpath(disk.path) for disk in disks]
    for disk, place in zip(disks, places, strict=True):
        if places.count(place) > 1:
            raise InputError(
                f"the scratch folder {disk.path!r} is named {places.count(place)} times",
                where=f"{_WHERE}: disk",
                fix="name each folder once, with its own size; each on a drive of its own",
            )
    return disks


def _parse_disk(value: object) -> DiskBudget:
    """Read a size, a folder, `folder:size`, or `{path, size}`."""
    if isinstance(value, Mapping):
        share = cast("Mapping[object, object]", value)  # from a recipe; checked here
        for key in share:
            if key not in ("path", "size"):
                raise InputError(
                    f"unknown key {key!r} in the disk budget",
                    where=f"{_WHERE}: disk",
                    fix="the keys are path and size",
                )
        path = share.get("path", DEFAULT_SCRATCH)
        if not isinstance(path, str) or not path:
            raise _bad(f"disk: {path!r} is no path")
        return DiskBudget(path=path, size_bytes=_parse_size("disk", share.get("size")))
    if isinstance(value, os.PathLike):
        value = str(os.fspath(cast("os.PathLike[str]", value)))  # a path of any library
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _bad(f"tier disk: {value!r} is neither a size nor a folder")
    if _is_size(value):
        return DiskBudget(path=DEFAULT_SCRATCH, size_bytes=_parse_size("disk", value))
    path, colon, size = str(value).rpartition(":")
    if colon and path and _is_size(size):
        return DiskBudget(path=path, size_bytes=parse_bytes(size))
    if str(value)[0].isdigit() and "/" not in str(value):
        # 600Gib is a size with a typing error far more often than a folder; ./600Gib is a folder.
        return DiskBudget(path=DEFAULT_SCRATCH, size_bytes=_parse_size("disk", value))
    return DiskBudget(path=str(value))


def _is_size(value: str | int) -> bool:
    try:
        parse_bytes(value)
    except ValueError:
        return False
    return True


def _floor_mib(size_bytes: int) -> str:
    return format_exact_bytes(size_bytes // MIB * MIB)


def _bad(what: str) -> InputError:
    return InputError(what, where=_WHERE, fix=_FORMS)
