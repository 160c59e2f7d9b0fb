"""Budgets: how much of each tier a plan may use.

In: the recipe's form `{device: 22GiB, host: 48GiB, disk: [{path: scratch, size: 600GiB}]}`, the
command line's form `device=22GiB,disk=600GiB`, or `--memory 2GiB`. Out: a `Budget`, and a `Machine`
whose tiers carry it.
A tier that no budget names may use what is free there less a margin: a tenth of it, at least
`MEMORY_MARGIN_BYTES` of memory or `DISK_MARGIN_BYTES` of a disk.
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
from packhorse.machine.spec import Machine, Tier, TierName
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
    """What a person grants per tier; None: what is free less a margin."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk: DiskBudget | None = None


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
        disk=None if disk is None else _parse_disk(disk),
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
        "disk": None if budget.disk is None else budget.disk.size_bytes,
    }
    there: list[TierName] = [tier.name for tier in tiers]
    for name, size_bytes in named.items():
        if name not in there and (size_bytes is not None or (name == "disk" and budget.disk)):
            raise _no_tier(owner, there, name)
    granted: list[Tier] = []
    for tier in tiers:
        size_bytes = named[tier.name]
        if tier.name == "disk" and budget.disk is not None:
            tier = replace(tier, path=budget.disk.path)
            if here:
                tier = _measure_disk(tier)
        if size_bytes is not None:
            if size_bytes > tier.total_bytes:
                raise InputError(
                    f"the budget of tier {tier.name} is {format_bytes(size_bytes)}, but {owner}"
                    f" has {format_bytes(tier.total_bytes)}",
                    where=f"{_WHERE}: {tier.name}" + (f" ({tier.path})" if tier.path else ""),
                    fix=f"grant at most {tier.name}={_floor_mib(tier.total_bytes)}",
                )
            tier = replace(tier, budget_bytes=size_bytes)
        if here and tier.name == "disk" and tier.budget_bytes:
            check_scratch(tier)
        granted.append(tier)
    return tuple(granted)


def check_scratch(tier: Tier) -> None:
    """Refuse a disk tier whose folder cannot be made or written, or whose disk is too full.

    Raises:
        InputError: names the folder, and need and have.
    """
    path = tier.path or DEFAULT_SCRATCH
    disk = find_disk(path)
    is_file = Path(path).exists() and not Path(path).is_dir()
    if is_file or not disk.writable:
        raise InputError(
            f"the scratch folder cannot be {'used: it is no folder' if is_file else 'written'}",
            where=f"{_WHERE}: disk ({path})",
            fix="name a folder that this user may write, for example disk: [{path: scratch}]",
        )
    have_bytes = disk.free_bytes
    if have_bytes < tier.budget_bytes:
        raise InputError(
            f"the budget of tier disk is {format_bytes(tier.budget_bytes)}, but"
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


def _split_text(text: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise _bad(f"cannot read {part.strip()!r} as TIER=SIZE")
        if name in entries:
            raise _bad(f"tier {name!r} is named twice")
        entries[name] = value
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


def _parse_disk(value: object) -> DiskBudget:
    """Read a size, a folder, `folder:size`, `{path, size}`, or a list of one of them."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        shares = cast("Sequence[object]", value)  # from a recipe; the entry is checked below
        if len(shares) != 1:
            raise InputError(
                f"the budget names {len(shares)} scratch folders; a plan uses exactly one",
                where=f"{_WHERE}: disk",
                fix="name the fastest one, or join the drives by the system's volume manager",
            )
        return _parse_disk(shares[0])
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
