"""What disk lies under a folder: free space, file system, drive, direct I/O.

In: a path that need not exist yet. Out: a `Disk`. Looks only; `takes_direct_io` tries with one
empty file, removed at once.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packhorse.machine.cgroups import read_text

_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_SCRATCH_FILES: Final = "packhorse-*.scratch"
_BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's own are
_NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"9p", "cifs", "fuse.sshfs", "lustre", "nfs", "nfs4", "smb3", "beegfs", "gpfs", "ceph"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk under a folder.

    `folder` is the nearest folder that exists; `drive` is the device's number and name, such as
    `259:0 nvme0n1`, or only its number when it has no name. What scratch files in the folder take
    counts as free: a run that goes on from them, or begins anew, has that space.
    """

    folder: Path
    free_bytes: int
    total_bytes: int
    file_system: str
    drive: str
    writable: bool

    @property
    def in_memory(self) -> bool:
        """Whether files there are memory, so that offloading to it frees nothing."""
        return self.file_system in _MEMORY_FILE_SYSTEMS

    @property
    def over_network(self) -> bool:
        """Whether files there live on another machine."""
        return self.file_system in _NETWORK_FILE_SYSTEMS


def find_disk(path: str | os.PathLike[str], root: Path = Path("/")) -> Disk:
    """Find the disk under `path`.

    Args:
        root: where /proc and /sys are found; `/` on a real machine.
    """
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    status = os.statvfs(folder)
    number = folder.stat().st_dev
    major_minor = f"{os.major(number)}:{os.minor(number)}"
    try:
        name = (root / "sys/dev/block" / major_minor).readlink().name
    except OSError:
        name = ""
    return Disk(
        folder=folder,
        free_bytes=status.f_bavail * status.f_frsize + _scratch_bytes(folder),
        total_bytes=status.f_blocks * status.f_frsize,
        file_system=_file_system(folder.resolve(), root),
        drive=f"{major_minor} {name}".strip(),
        writable=os.access(folder, os.W_OK | os.X_OK),
    )


def takes_direct_io(folder: str | os.PathLike[str]) -> bool:
    """Try whether files in `folder` can be opened with O_DIRECT.

    Raises:
        OSError: no file can be made there.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    path = Path(folder, f".packhorse-direct-{os.getpid()}")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        # Some file systems make the file before they refuse the flag.
        path.unlink(missing_ok=True)
    return True


def _scratch_bytes(folder: Path) -> int:
    sizes: list[int] = []
    for path in folder.glob(_SCRATCH_FILES):
        with suppress(FileNotFoundError):  # a run may end meanwhile
            sizes.append(path.stat().st_blocks * _BLOCK_BYTES)
    return sum(sizes)


def _file_system(folder: Path, root: Path) -> str:
    """Type of the mount with the longest path above `folder`; the last one mounted there wins."""
    best, kind = -1, "unknown"
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if len(fields) < 5 or not types:
            continue
        place = fields[4].replace("\\040", " ")
        if folder.is_relative_to(place) and len(place) >= best:
            best, kind = len(place), types[0]
    return kind
