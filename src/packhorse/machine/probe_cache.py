"""Measured machines, kept by hardware fingerprint, so that probing happens once.

In: facts of the hardware. Out: a fingerprint, and the machine that was measured under it. Budgets
and free space are never taken from the cache: they are looked up anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from packhorse.errors import FileFormatError
from packhorse.machine.files import format_machine, read_machine
from packhorse.machine.spec import Machine
from packhorse.storage.durable import write_durably
from packhorse.storage.space import explain_failure

# Raised whenever what is measured, or how, changes: older results are then measured again.
PROBE_VERSION: Final = 7


def default_cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Name the cache folder: `packhorse` in XDG_CACHE_HOME, or in `~/.cache`."""
    env = os.environ if environment is None else environment
    home = env.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "packhorse"


def make_fingerprint(facts: Mapping[str, str | int | float | bool | None]) -> str:
    """Digest the facts that a measurement depends on."""
    text = json.dumps({**facts, "probe": PROBE_VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_measured(folder: Path, fingerprint: str) -> Machine | None:
    """Load the machine that was measured under a fingerprint; None when there is none.

    A damaged or older cache file counts as none: the cache holds nothing that cannot be measured
    again.
    """
    path = _path(folder, fingerprint)
    if not path.is_file():
        return None
    try:
        machine = read_machine(path)
    except FileFormatError:
        return None
    return machine if machine.fingerprint == fingerprint else None


def store_measured(folder: Path, machine: Machine) -> Path:
    """Keep a measured machine and tell where.

    Raises:
        StorageError: the cache folder is unwritable or its disk is full.
    """
    path = _path(folder, machine.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_failure(error, path.parent, "make the cache folder") from error
    write_durably(path, format_machine(machine))
    return path


def age_ns(machine: Machine, now: datetime | None = None) -> int | None:
    """Tell how long ago a machine was measured; None when it was not measured here."""
    try:
        then = datetime.fromisoformat(machine.measured_at)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    passed = (now or datetime.now(UTC)) - then
    return max(0, round(passed.total_seconds() * 1e9))


def _path(folder: Path, fingerprint: str) -> Path:
    return folder / f"machine-{fingerprint}.json"
