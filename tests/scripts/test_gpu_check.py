"""The script for a GPU, with a Python that only says what it is asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "gpu" / "check.sh"
# -c: which Python this is; -: what it lacks; -m: the bench itself.
STUB = """#!/bin/sh
case "$1" in
  -c) exit 0 ;;
  -) echo "$LACKS" ;;
  -m) echo "$@ $CUBLAS_WORKSPACE_CONFIG"; exit "$STATUS" ;;
esac
"""


def check(folder: Path, *arguments: str, **words: str) -> subprocess.CompletedProcess[str]:
    stub = folder / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    env = {"LACKS": "", "STATUS": "0", "PYTHON": str(stub), **os.environ, **words}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=env, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("status", ["0", "1", "2"])
def test_it_ends_as_the_bench_does(tmp_path: Path, status: str) -> None:
    done = check(tmp_path, "--quick", STATUS=status)
    assert done.returncode == int(status)
    assert done.stdout == "-m bench.gpu --quick :4096:8\n"


def test_a_bench_that_took_too_long_is_told(tmp_path: Path) -> None:
    done = check(tmp_path, STATUS="137")
    assert done.returncode == 124
    assert "not over after 475 s" in done.stderr


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = check(tmp_path, LACKS="highspy no-such-package")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "lacks: highspy no-such-package; put their wheels" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = check(tmp_path, PYTHON="no-such-python")
    assert done.returncode == 2
    assert done.stderr == "gpu/check: no Python here has a torch that sees a GPU; nothing was run\n"
