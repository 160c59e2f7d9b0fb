"""Peers: other training systems, each in a virtual environment of its own below `.cache/peers`.

In: the name of a peer. Out: its interpreter, or the reason why there is none. An environment is
made when it is asked for the first time: it sees the packages of the environment that the bench
runs in (so both sides compute with the same torch) and adds only what the peer needs on top. The
project's own environment stays as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.report import ROOT

FOLDER: Final = ROOT / ".cache" / "peers"
INSTALL_LIMIT_S: Final = 600
# In order: what deepspeed is built with and depends on beside torch, which comes from the
# environment of the bench, then itself. Its C++ parts are compiled on first use.
PACKAGES: Final[Mapping[str, Sequence[Sequence[str]]]] = {
    "deepspeed": (
        ("einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "setuptools", "wheel"),
        ("deepspeed==0.19.8",),
    ),
}
_DONE: Final = "installed.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An installed peer; `python` is None where it could not be had, for `reason`."""

    name: str
    python: Path | None
    reason: str


def find_peer(name: str) -> Peer:
    """Find a peer's environment, or make it.

    Blocks while packages are installed, at most `INSTALL_LIMIT_S`.
    """
    folder = FOLDER / name
    python = folder / "bin" / "python"
    done = folder / _DONE
    wanted = json.dumps(PACKAGES[name])
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return Peer(name=name, python=python, reason="")
    try:
        _install(folder, PACKAGES[name])
    except subprocess.CalledProcessError as error:
        return Peer(name=name, python=None, reason=f"not installed: {_last_line(error.stderr)}")
    except subprocess.TimeoutExpired:
        reason = f"not installed: took longer than {INSTALL_LIMIT_S} s"
        return Peer(name=name, python=None, reason=reason)
    done.write_text(wanted, encoding="utf-8")
    return Peer(name=name, python=python, reason="")


def ask_peer(
    peer: Peer, module: str, specification: Mapping[str, object], *, limit_s: float
) -> Mapping[str, Any] | str:
    """Run a module of the benches with a peer's interpreter.

    Returns:
        The JSON object that it printed last; or, in words, why there is none.
    """
    if peer.python is None:
        return peer.reason
    # What is compiled on first use; a run that was stopped meanwhile left its lock behind.
    extensions = FOLDER / peer.name / "extensions"
    for lock in extensions.rglob("*lock"):
        lock.unlink()
    try:
        done = subprocess.run(
            [str(peer.python), "-m", module, json.dumps(specification)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(specification.get("num_threads", 1)),
                "PATH": f"{peer.python.parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT / "src"),
                "TORCH_EXTENSIONS_DIR": str(extensions),
            },
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        return f"stopped after {limit_s:.0f} s; its last line: {_last_line(said)}"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return f"ended with {done.returncode}: {_last_line(done.stderr)}"
    answer: Mapping[str, Any] = json.loads(lines[-1])
    return answer


def _install(folder: Path, groups: Sequence[Sequence[str]]) -> None:
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    python = folder / "bin" / "python"
    asked = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"])
    shared = Path(asked.strip()) / "shared.pth"
    shared.write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    for packages in groups:
        _run([*pip, "--no-deps", "--no-build-isolation", *packages])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=INSTALL_LIMIT_S
    )
    return done.stdout


def _last_line(text: str | None) -> str:
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "without a word"
