"""Holds the import table of docs/architecture.md, the torch rooms and the shape of modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "packhorse"
TABLE_HEAD = "| package | may import |"

MAX_LINES = 500
VAGUE_NAMES = {"core", "common", "utils", "util", "helpers", "misc"}
TORCH_PACKAGES = {"torch", "transformers", "safetensors"}
TORCH_ROOMS = (
    "graph", "graph.*", "profile.measure*", "machine.probe*", "runtime", "runtime.*", "optim",
    "optim.*", "checkpoint", "checkpoint.*", "data", "data.*", "trainer", "trainer.*",
)  # fmt: skip
# These two may enter a room, and load torch, but only inside a function.
LAZY = ("api", "cli", "cli.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement's target, as a dotted name."""

    module: str
    target: str
    line: int
    level: int
    is_lazy: bool


def find_modules(root: Path = SOURCE) -> dict[str, Path]:
    """Map dotted names below packhorse (`""` for the package itself) to files."""
    modules: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(module: str, text: str) -> Iterator[Import]:
    tree = ast.parse(text)
    lazy_lines = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    checking_lines = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                targets, level = [alias.name for alias in names], 0
            case ast.ImportFrom(module=base, names=names, level=level):
                targets = [f"{base or ''}.{alias.name}" for alias in names]
            case _:
                continue
        for target in targets:
            is_lazy = node.lineno in lazy_lines or node.lineno in checking_lines
            yield Import(
                module=module, target=target, line=node.lineno, level=level, is_lazy=is_lazy
            )


def read_table(text: str) -> dict[str, set[str]]:
    """Read the import table; `all` and `all but x` are spelled out."""
    lines = text[text.index(TABLE_HEAD) :].splitlines()[2:]
    rows: dict[str, str] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, allowed = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = allowed
    every = {name for name in rows if "." not in name}
    table: dict[str, set[str]] = {}
    for name, allowed in rows.items():
        if allowed.startswith("all"):
            table[name] = every - set(allowed.removeprefix("all but ").split(", "))
        elif allowed == "-":
            table[name] = set()
        else:
            table[name] = set(allowed.split(", "))
            assert table[name] <= every, f"row {name} names an unknown package"
    return table


def find_broken_imports(
    module: str, text: str, table: dict[str, set[str]], modules: set[str]
) -> list[str]:
    """List the imports of one module that the table forbids."""
    package = module.partition(".")[0]
    allowed = {package, "units", "errors", "notation"}
    for row, names in table.items():
        if row == package or fnmatch(module, row):
            allowed |= names
    broken: list[str] = []
    for item in find_imports(module, text):
        place = f"{module or 'packhorse'}:{item.line}"
        if item.level:
            broken.append(f"{place}: relative import of {item.target}")
        if not (item.target + ".").startswith("packhorse."):
            continue
        inner = item.target.removeprefix("packhorse").removeprefix(".")
        used = inner.partition(".")[0]
        if used in {"__version__", ""}:
            continue
        if used not in {name.partition(".")[0] for name in modules}:
            broken.append(f"{place}: packhorse has no module {used}")
        elif (module, used) in {("", "api"), ("__main__", "cli")}:
            continue
        elif used not in allowed:
            broken.append(f"{place}: {package or 'packhorse'} may not import {used}")
    return broken


def is_room(module: str) -> bool:
    return any(fnmatch(module, room) for room in TORCH_ROOMS)


def find_torch_leaks(module: str, text: str, modules: set[str]) -> list[str]:
    """List imports of torch, or of a torch room, outside the rooms."""
    if is_room(module):
        return []
    may_be_lazy = any(fnmatch(module, name) for name in LAZY)
    leaks: list[str] = []
    for item in find_imports(module, text):
        inner = item.target.removeprefix("packhorse").removeprefix(".")
        enters_room = item.target.startswith("packhorse.") and any(
            is_room(name) and name in modules for name in (inner, inner.rpartition(".")[0])
        )
        loads_torch = item.target.partition(".")[0] in TORCH_PACKAGES
        if (enters_room or loads_torch) and not (may_be_lazy and item.is_lazy):
            leaks.append(f"{module}:{item.line}: imports {item.target} outside a torch room")
    return leaks


TABLE = read_table((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
MODULES = find_modules()


def test_every_package_has_a_row() -> None:
    packages = {name.partition(".")[0] for name in MODULES} - {"", "__main__"}
    assert packages | {"api"} == {name for name in TABLE if "." not in name}


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_table(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert find_broken_imports(module, text, TABLE, set(MODULES)) == []


@pytest.mark.parametrize("module", MODULES)
def test_torch_stays_in_its_rooms(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert find_torch_leaks(module, text, set(MODULES)) == []


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        ("program.x", "from packhorse.plan.spec import Plan", "program may not import plan"),
        ("program.x", "def f():\n    import packhorse.plan", "program may not import plan"),
        (
            "program.x",
            "if TYPE_CHECKING:\n    from packhorse import plan",
            "program may not import plan",
        ),
        ("program.x", "from . import text", "relative import"),
        ("machine.spec", "from packhorse.storage import file", "machine may not import storage"),
        ("trainer.x", "import packhorse.search.search", "trainer may not import search"),
        ("api", "import packhorse.cli.main", "api may not import cli"),
        ("plan.x", "import packhorse.nowhere", "no module nowhere"),
    ],
)
def test_a_forbidden_import_is_found(module: str, text: str, reason: str) -> None:
    (broken,) = find_broken_imports(module, text, TABLE, set(MODULES))
    assert reason in broken


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("machine.probe_disk", "from packhorse.storage import file"),
        ("program.x", "from packhorse import __version__, units"),
        ("program.x", "from packhorse.program.y import Task\nimport json"),
        ("cli.main", "from packhorse.search import search"),
    ],
)
def test_an_allowed_import_passes(module: str, text: str) -> None:
    assert find_broken_imports(module, text, TABLE, set(MODULES)) == []


@pytest.mark.parametrize(
    ("module", "text", "leaks"),
    [
        ("plan.spec", "import torch.nn", 1),
        ("plan.spec", "def f():\n    from safetensors import safe_open", 1),
        ("plan.spec", "from packhorse.runtime import memory", 1),
        ("cli.main", "import torch", 1),
        ("cli.main", "def f():\n    from packhorse import runtime", 0),
        ("machine.probe", "import torch", 0),
        ("machine.spec", "import torch", 1),
    ],
)
def test_a_torch_leak_is_found(module: str, text: str, leaks: int) -> None:
    assert len(find_torch_leaks(module, text, set(MODULES))) == leaks


def test_modules_are_short_and_well_named() -> None:
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert [name for name in MODULES if set(name.split(".")) & VAGUE_NAMES] == []


def test_init_files_are_empty() -> None:
    inits = [path for path in SOURCE.rglob("__init__.py") if path != SOURCE / "__init__.py"]
    assert [path for path in inits if path.read_text(encoding="utf-8").strip()] == []
    packages = {path.parent for path in SOURCE.rglob("*.py")}
    assert packages == {path.parent for path in inits} | {SOURCE}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


HEAVY = ("torch", "transformers", "safetensors", "numpy", "pydantic", "highspy", "pyarrow")


def test_importing_packhorse_loads_nothing_heavy() -> None:
    code = f"import sys, packhorse; print([m for m in {HEAVY} if m in sys.modules])"
    done = run_python(code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_help_loads_no_torch() -> None:
    code = f"""
import sys
sys.argv = ["packhorse", "--help"]
from packhorse.cli.main import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print("loaded", code or 0, [m for m in {HEAVY[:3]} if m in sys.modules])
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded 0 []"


def test_torch_free_half_works_without_torch() -> None:
    names = [f"packhorse.{name}" for name in MODULES if name and not is_room(name)]
    names.remove("packhorse.__main__")
    blocked = f"sys.modules.update(dict.fromkeys({sorted(TORCH_PACKAGES)}))"
    code = f"import sys, importlib; {blocked}\nfor name in {names}: importlib.import_module(name)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    import packhorse

    assert set(packhorse.__all__) == {
        "AdamW", "Run", "SGD", "__version__", "find_plan", "probe", "simulate",
    }  # fmt: skip
    assert dir(packhorse) == sorted(packhorse.__all__)
    for name in packhorse.__all__:
        assert getattr(packhorse, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        packhorse.nothing  # noqa: B018
