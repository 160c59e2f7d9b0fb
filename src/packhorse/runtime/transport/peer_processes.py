"""Processes of other ranks on this computer: who has ended, and by what.

In: process ids. Out: a descriptor that says when a process ends, and the signal or the code that it
ended with. Only what the kernel still knows: whoever started the process may have taken it away.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

# Fields of /proc/PID/stat behind the name, see proc(5): 3 is the state, 52 how the process ended.
_STATE_AT: Final = 0
_EXIT_AT: Final = 49


def find_process_space() -> str | None:
    """Name this computer's start and this process's namespace: alike where processes are seen."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def open_process(pid: int) -> int | None:
    """Open a descriptor that can be read once a process has ended; None where there is none."""
    with suppress(OSError, AttributeError):  # an older kernel, a process that is gone, no Linux
        return os.pidfd_open(pid)
    return None


def find_end(pid: int) -> str | None:
    """Say how a process ended, such as `SIGKILL` or `exit code 1`; None where nobody knows."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _EXIT_AT or fields[_STATE_AT] not in ("Z", "X"):
        return None
    status = int(fields[_EXIT_AT])
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if number is None:
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
