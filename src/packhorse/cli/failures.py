"""What a command says when it fails, and the code that it ends with.

In: whatever ended the command early. Out: a message on stderr and an exit code; with `--json` also
`{"error": ...}` on stdout. A person's mistake never shows a traceback; our own mistake writes it to
a file and names the file.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from packhorse import __version__
from packhorse.errors import InputError, PackhorseError, StoppedError

BUG: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_EXTRAS: Final[Mapping[str, str]] = {
    "torch": "train",
    "safetensors": "train",
    "transformers": "hf",
    "tokenizers": "hf",
    "gguf": "hf",
    "jinja2": "hf",
    "pyarrow": "data",
}


def report_error(error: PackhorseError, *, as_json: bool) -> int:
    """Say what is wrong, where, and what to change."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if not isinstance(error, StoppedError):
        # To stop was what somebody wanted.
        console.print("error: ", style="bold red", end="")
    first, _, rest = str(error).partition("\n")
    if console.is_terminal:
        # Broken at words, and aligned; files and programs get the lines as they are.
        console.print(first, style="bold")
        console.print(_render_places(error))
    else:
        console.print(first + (f"\n{rest}" if rest else ""), soft_wrap=True)
    if as_json:
        document = {
            "error": type(error).__name__,
            "exit_code": error.exit_code,
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
        }
        sys.stdout.write(json.dumps({"error": document}, indent=2) + "\n")
    return error.exit_code


def _render_places(error: PackhorseError) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column()
    for label, text in (("  where:", error.where), ("  fix:", error.fix)):
        if text:
            table.add_row(label, Text(text))
    return table


def report_usage(message: str, command: str, *, as_json: bool) -> int:
    """Say what is wrong with the command line."""
    error = InputError(
        message[:1].lower() + message[1:].rstrip("."),
        where=command,
        fix=f"`{command} --help` shows what it takes",
    )
    return report_error(error, as_json=as_json)


def explain_missing_module(error: ModuleNotFoundError) -> PackhorseError | None:
    """Word the lack of an optional package as the command that installs it; else None."""
    name = (error.name or "").partition(".")[0]
    if name not in _EXTRAS:
        return None
    return InputError(
        f"this needs {name}, which is not installed",
        fix=f"pip install 'packhorse[{_EXTRAS[name]}]'",
    )


def report_bug(error: BaseException, arguments: Sequence[str], *, as_json: bool) -> int:
    """Write the traceback of a mistake of ours to a file and say where it is."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    place = _last_place(error)
    path = _write_report(error, arguments)
    console.print("packhorse failed by a mistake of its own: ", style="bold red", end="")
    console.print(what, soft_wrap=True)
    console.print(f"  where:  {place}", soft_wrap=True)
    console.print(f"  report: {path or 'it could not be written'}", soft_wrap=True)
    console.print("  fix:    please send us the report; it holds the traceback", soft_wrap=True)
    if as_json:
        document = {
            "error": "bug",
            "exit_code": BUG,
            "what": what,
            "where": place,
            "report": None if path is None else str(path),
        }
        sys.stdout.write(json.dumps({"error": document}, indent=2) + "\n")
    return BUG


def _last_place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "packhorse" in Path(frame.filename).parts] or frames
    return f"{ours[-1].filename}:{ours[-1].lineno} in {ours[-1].name}" if ours else "unknown"


def _write_report(error: BaseException, arguments: Sequence[str]) -> Path | None:
    lines = [
        f"packhorse {__version__}, python {platform.python_version()}, {platform.platform()}",
        "arguments: " + " ".join(arguments),
        "",
        "".join(traceback.format_exception(error)),
    ]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="packhorse-report-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("\n".join(lines))
            return Path(file.name)
    except OSError:
        return None
