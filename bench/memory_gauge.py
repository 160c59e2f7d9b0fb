"""How large this process is and was, as the kernel tells it."""

from __future__ import annotations

import json
from pathlib import Path


def read_status_bytes(field: str) -> int:
    """Read a size of this process, for example VmRSS (now) or VmHWM (the largest ever)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def reset_peak() -> None:
    """Let VmHWM begin anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def write_memory(path: Path, *, imports_bytes: int, peak_bytes: int | None = None) -> None:
    """Write what `bench.children` reads of a child.

    Args:
        peak_bytes: where VmHWM was reset on the way.
    """
    if peak_bytes is None:
        peak_bytes = read_status_bytes("VmHWM")
    memory = {"imports_bytes": imports_bytes, "peak_bytes": peak_bytes}
    path.write_text(json.dumps(memory), encoding="utf-8")
