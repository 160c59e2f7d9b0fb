"""Which control groups hold this process, and what their files say. cgroup v1, v2 and both at once.

In: a root path, so that tests use a made-up /proc and /sys. Out: folders, nearest first.
A container may see the host's group names with its own group mounted at the top, or its own
namespace; both are resolved, and every level above counts, since limits are inherited.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One level of a control group hierarchy."""

    version: Literal[1, 2]
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    version: Literal[1, 2]
    controllers: frozenset[str]
    root: PurePosixPath
    folder: PurePosixPath


def find_groups(controller: str, root: Path) -> tuple[Group, ...]:
    """List the groups of this process that may limit `controller`, from its own to the top.

    Args:
        controller: `memory` or `cpu`.
        root: where /proc and /sys are found; `/` on a real machine.
    """
    groups: list[Group] = []
    own = _own_groups(root)
    for mount in _mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        name = own.get("" if mount.version == 2 else controller)
        if name is None:
            continue
        top = root / mount.folder.relative_to("/")
        folder = top
        if name.is_relative_to(mount.root):
            folder = top / name.relative_to(mount.root)
        if not folder.is_dir():
            folder = top
        while folder.is_dir():
            groups.append(Group(version=mount.version, folder=folder))
            if folder == top:
                break
            folder = folder.parent
    return tuple(groups)


def read_numbers(path: Path) -> tuple[int | None, ...]:
    """Read the numbers of a one-line file; `max` and other words are None, no file is empty."""
    text = read_text(path)
    if text is None:
        return ()
    return tuple(int(word) if _is_int(word) else None for word in text.split())


def read_number(path: Path) -> int | None:
    """Read a file that holds one number; None when it is missing or says `max`."""
    numbers = read_numbers(path)
    return numbers[0] if numbers else None


def read_text(path: Path) -> str | None:
    """Read a kernel file; None when it is missing or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _own_groups(root: Path) -> dict[str, PurePosixPath]:
    """Group name by controller; the one of version 2 under the empty name."""
    groups: dict[str, PurePosixPath] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = PurePosixPath(parts[2])
    return groups


def _mounts(root: Path) -> tuple[_Mount, ...]:
    mounts: list[_Mount] = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 5 or not types or types[0] not in ("cgroup", "cgroup2"):
            continue
        mounts.append(
            _Mount(
                version=1 if types[0] == "cgroup" else 2,
                controllers=frozenset(types[-1].split(",")),
                root=PurePosixPath(_unescape(fields[3])),
                folder=PurePosixPath(_unescape(fields[4])),
            )
        )
    return tuple(mounts)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)


def _is_int(word: str) -> bool:
    return word.removeprefix("-").isdigit()
