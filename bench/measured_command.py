"""A `packhorse` command in a process that tells how large it became.

    python -m bench.measured_command MEMORY.json train recipe.yaml --json

Everything that the command does counts: planning, tracing, measuring, loading, training,
evaluating, saving. Only what its imports need is there before.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch  # noqa: F401  imported before the first look
import transformers  # noqa: F401  imported before the first look

import packhorse.trainer.training  # noqa: F401  imported before the first look
from bench.memory_gauge import read_status_bytes, write_memory
from packhorse.cli.main import run_arguments


def main() -> int:
    """Run the command, write the memory file, give the command's exit code."""
    report, *arguments = sys.argv[1:]
    imports_bytes = read_status_bytes("VmRSS")
    try:
        return run_arguments(arguments)
    finally:
        write_memory(Path(report), imports_bytes=imports_bytes)


if __name__ == "__main__":
    sys.exit(main())
