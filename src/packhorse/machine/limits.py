"""What this process may use of the machine: memory, cores, disk. Limits of containers included.

In: a root path (`/`, or a made-up tree in tests). Out: numbers, each with the file it came from.
The smallest limit counts: the machine's RAM, every control group above the process (v1 and v2), and
the address space limit of the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.errors import InputError
from packhorse.machine.cgroups import Group, find_groups, read_number, read_numbers, read_text

REAL_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """RAM as this process sees it.

    `limit_bytes` is the most it may ever use and `limit_from` the file that says so;
    `available_bytes` is what it can still take now without pushing anybody out.
    """

    machine_bytes: int
    limit_bytes: int
    limit_from: str
    available_bytes: int
    available_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimit:
    """Cores as this process sees them.

    `num_allowed` logical cores by affinity, `num_physical` distinct physical ones among them;
    `quota` is the share of time a control group grants, in cores (None: all of it); `num_cores`
    is how many threads can run at full speed.
    """

    num_allowed: int
    num_physical: int
    quota: float | None
    quota_from: str | None

    @property
    def num_cores(self) -> int:
        """Threads that can run at full speed: a fraction of a core does not carry another one."""
        if self.quota is None:
            return self.num_physical
        return max(1, min(self.num_physical, int(self.quota)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    value_bytes: int
    origin: str


def find_memory_limit(root: Path = REAL_ROOT) -> MemoryLimit:
    """Find how much RAM this process may use and how much of it is free.

    Raises:
        InputError: there is no /proc/meminfo, so this is no Linux.
    """
    meminfo = root / "proc/meminfo"
    sizes = _meminfo_bytes(meminfo)
    if "MemTotal" not in sizes:
        raise InputError(
            "cannot tell how much memory this machine has",
            where=str(meminfo),
            fix="run on Linux with /proc mounted, or give a machine file",
        )
    machine_bytes = sizes["MemTotal"]
    limits = [_Level(value_bytes=machine_bytes, origin=str(meminfo))]
    free = [
        _Level(value_bytes=sizes.get("MemAvailable", sizes.get("MemFree", 0)), origin=str(meminfo))
    ]
    for group in find_groups("memory", root):
        for level in _group_limits(group):
            # Version 1 says "no limit" with a number far above any machine's memory.
            if level.value_bytes < machine_bytes:
                limits.append(level)
                used_bytes = _group_used_bytes(group)
                free.append(
                    _Level(value_bytes=max(0, level.value_bytes - used_bytes), origin=level.origin)
                )
    address = _address_space_limit(root / "proc/self/limits")
    if address is not None:
        limits.append(address)
        used_bytes = _address_space_used_bytes(root / "proc/self/status")
        free.append(
            _Level(value_bytes=max(0, address.value_bytes - used_bytes), origin=address.origin)
        )
    limit = min(limits, key=lambda level: level.value_bytes)
    available = min(free, key=lambda level: level.value_bytes)
    return MemoryLimit(
        machine_bytes=machine_bytes,
        limit_bytes=limit.value_bytes,
        limit_from=limit.origin,
        available_bytes=min(available.value_bytes, limit.value_bytes),
        available_from=available.origin,
    )


def find_core_limit(root: Path = REAL_ROOT) -> CoreLimit:
    """Find how many cores this process may use: affinity, physical cores, control group quota."""
    places = _cpu_places(root / "proc/cpuinfo")
    allowed = _allowed_cpus(root / "proc/self/status") or frozenset(places) or frozenset((0,))
    physical = {places.get(cpu, ("", str(cpu))) for cpu in allowed}
    quota: float | None = None
    quota_from: str | None = None
    for group in find_groups("cpu", root):
        name = "cpu.max" if group.version == 2 else "cpu.cfs_quota_us"
        path = group.folder / name
        numbers = read_numbers(path)
        if group.version == 1:
            numbers += read_numbers(group.folder / "cpu.cfs_period_us")
        if len(numbers) < 2 or not numbers[0] or not numbers[1] or numbers[0] < 0:
            continue
        share = numbers[0] / numbers[1]
        if quota is None or share < quota:
            quota, quota_from = share, str(path)
    return CoreLimit(
        num_allowed=len(allowed),
        num_physical=len(physical),
        quota=quota,
        quota_from=quota_from,
    )


def find_cpu_model(root: Path = REAL_ROOT) -> str:
    """Find the processor's name."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return " ".join(value.split())
    return "unknown processor"


def _meminfo_bytes(path: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            sizes[key] = int(words[0]) * 1024
    return sizes


def _group_limits(group: Group) -> tuple[_Level, ...]:
    names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
    found = ((name, read_number(group.folder / name)) for name in names)
    return tuple(
        _Level(value_bytes=value, origin=str(group.folder / name))
        for name, value in found
        if value is not None and value >= 0
    )


def _group_used_bytes(group: Group) -> int:
    """What a group uses, less the file pages that the kernel drops first."""
    name, inactive = (
        ("memory.current", "inactive_file")
        if group.version == 2
        else ("memory.usage_in_bytes", "total_inactive_file")
    )
    used_bytes = read_number(group.folder / name) or 0
    for line in (read_text(group.folder / "memory.stat") or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == inactive:
            used_bytes -= int(words[1])
    return max(0, used_bytes)


def _address_space_limit(path: Path) -> _Level | None:
    for line in (read_text(path) or "").splitlines():
        if line.startswith("Max address space"):
            soft = line.split()[3]
            if soft.isdigit():
                return _Level(value_bytes=int(soft), origin=f"{path} (ulimit -v)")
    return None


def _address_space_used_bytes(path: Path) -> int:
    for line in (read_text(path) or "").splitlines():
        if line.startswith("VmSize:"):
            return int(line.split()[1]) * 1024
    return 0


def _allowed_cpus(path: Path) -> frozenset[int]:
    cpus: set[int] = set()
    for line in (read_text(path) or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            for span in line.split(":", 1)[1].strip().split(","):
                first, _, last = span.partition("-")
                if first.isdigit():
                    cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _cpu_places(path: Path) -> dict[int, tuple[str, str]]:
    """(socket, core) by logical cpu; where the file has none, each cpu is its own core."""
    places: dict[int, tuple[str, str]] = {}
    for block in (read_text(path) or "").split("\n\n"):
        fields: dict[str, str] = {}
        for line in block.splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        if fields.get("processor", "").isdigit():
            cpu = int(fields["processor"])
            places[cpu] = (fields.get("physical id", ""), fields.get("core id", f"cpu{cpu}"))
    return places
