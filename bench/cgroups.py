"""Memory cgroups for children: version 1 and version 2.

In: a limit in bytes. Out: a `MemoryGroup` below the group of this process, so that every limit
around it still holds. A command that is wrapped enters the group before it starts; nobody else
does. The group is removed at the end; it must be empty then.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

_MOUNTS: Final = Path("/proc/self/mountinfo")
_OWN: Final = Path("/proc/self/cgroup")
_ENTER: Final = 'echo $$ > "$0" && exec "$@"'


class NoGroupError(OSError):
    """This process cannot make a memory cgroup here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """A cgroup whose members together hold at most `limit_bytes`."""

    path: Path
    version: Literal[1, 2]
    limit_bytes: int

    @property
    def peak_bytes(self) -> int | None:
        """The most that its members ever held, page cache included; None on old kernels."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        file = self.path / name
        return int(file.read_text(encoding="ascii")) if file.is_file() else None

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Give a command that enters the group and then is `command`."""
        return ["/bin/sh", "-c", _ENTER, str(self.path / "cgroup.procs"), *command]


@contextmanager
def open_group(limit_bytes: int) -> Generator[MemoryGroup]:
    """Make a memory cgroup without swap; remove it at the end.

    Raises:
        NoGroupError: there is no memory controller, or no right to use it.
    """
    parent, version = find_parent()
    path = parent / f"packhorse-bench-{os.getpid()}-{limit_bytes}"
    try:
        path.mkdir()
    except OSError as error:
        raise NoGroupError(f"{path} cannot be made: {error.strerror}") from error
    try:
        _set_limit(path, version, limit_bytes)
        yield MemoryGroup(path=path, version=version, limit_bytes=limit_bytes)
    finally:
        path.rmdir()


def find_parent() -> tuple[Path, Literal[1, 2]]:
    """Find the memory group of this process and the version it is of.

    Raises:
        NoGroupError: there is none.
    """
    mounts = _read_mounts()
    own = {}
    for line in _OWN.read_text(encoding="utf-8").splitlines():
        _, controllers, place = line.split(":", 2)
        own[controllers] = place.lstrip("/")
    for controllers, place in own.items():
        if "memory" in controllers.split(",") and "memory" in mounts:
            return mounts["memory"] / place, 1
    if "" in own and "unified" in mounts:
        parent = mounts["unified"] / own[""]
        controllers = (parent / "cgroup.subtree_control").read_text(encoding="ascii").split()
        if "memory" in controllers:
            return parent, 2
        # A group with members of its own cannot hand the controller down, but its parent may.
        above = parent.parent
        control = above / "cgroup.subtree_control"
        if control.is_file() and "memory" in control.read_text(encoding="ascii").split():
            return above, 2
    raise NoGroupError("there is no memory controller that a group of ours could use")


def _read_mounts() -> dict[str, Path]:
    mounts: dict[str, Path] = {}
    for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        place = Path(before.split()[4])
        if kind == "cgroup" and "memory" in options.replace(" ", ",").split(","):
            mounts["memory"] = place
        elif kind == "cgroup2":
            mounts["unified"] = place
    return mounts


def _set_limit(path: Path, version: Literal[1, 2], limit_bytes: int) -> None:
    if version == 1:
        files = {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes}
        needed = "memory.limit_in_bytes"
    else:
        files = {"memory.max": limit_bytes, "memory.swap.max": 0}
        needed = "memory.max"
    for name, value in files.items():
        file = path / name
        # Kernels without swap accounting have no file for it.
        if name == needed or file.is_file():
            try:
                file.write_text(str(value), encoding="ascii")
            except OSError as error:
                if name == needed:
                    raise NoGroupError(f"{file} cannot be written: {error.strerror}") from error
