"""Rules of style that a linter does not know: each is a function that lists what breaks it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "docs", "scripts", "recipes", "bench", "machines", ".ci")
TEXT_SUFFIXES = {"", ".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".jsonl", ".csv"}
ROOT_FILES = (
    "README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "constraints.txt", ".gitignore",
)  # fmt: skip


def find_files() -> list[Path]:
    found = [ROOT / name for name in ROOT_FILES]
    for folder in FOLDERS:
        found += [
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
        ]
    return found


# Joined from parts, so that this file does not break its own rules.
MACHINE_PATH = re.compile("|".join(rf"(?<![\w.$}}])/{name}\b" for name in ("work", "root", "tmp")))
NOTE_TO_SELF = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
PYRIGHT_IGNORE = re.compile(r"#\s*pyright:\s*ignore")
TYPE_IGNORE = re.compile(r"#\s*type:\s*" + "ignore")
REASONED_IGNORE = re.compile(r"#\s*pyright:\s*ignore\[[\w, ]+\]\s*#\s*\w")


def find_non_ascii(text: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if not line.isascii()]


def find_machine_paths(text: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)]


def find_notes_to_self(text: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if NOTE_TO_SELF.search(line)]


def find_swallowed_errors(text: str) -> list[int]:
    """A handler of everything that does not raise."""
    broad = {"Exception", "BaseException"}

    def catches_all(handler: ast.ExceptHandler) -> bool:
        kind = handler.type
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return kind is None or any(isinstance(k, ast.Name) and k.id in broad for k in kinds)

    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler)
        and catches_all(node)
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]


def find_sleeps(text: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Attribute) and node.func.attr == "sleep")
            or (isinstance(node.func, ast.Name) and node.func.id == "sleep")
        )
    ]


def find_unexplained_escapes(text: str) -> list[int]:
    """`Any`, `cast(` and ignores of the type checker without a comment on their line."""
    lines = text.splitlines()
    broken = [
        n
        for n, line in enumerate(lines, 1)
        if TYPE_IGNORE.search(line)
        or (PYRIGHT_IGNORE.search(line) and not REASONED_IGNORE.search(line))
    ]
    import_lines = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for token, after in pairwise(tokens):
        if token.type != tokenize.NAME or token.start[0] in import_lines | commented:
            continue
        if token.string == "Any" or (token.string == "cast" and after.string == "("):
            broken.append(token.start[0])
    return sorted(broken)


def find_public_functions(text: str) -> set[str]:
    return {
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }


def find_broken_places(
    files: list[Path], find: Callable[[str], list[int]], *, below: tuple[str, ...] = ()
) -> list[str]:
    """List `file:line` of every place that a rule rejects."""
    places: list[str] = []
    for path in files:
        name = path.relative_to(ROOT)
        if below and name.parts[0] not in below:
            continue
        try:
            places += [f"{name}:{line}" for line in find(path.read_text(encoding="utf-8"))]
        except SyntaxError as error:
            error.add_note(f"in {name}")
            raise
    return places


def show(places: list[str]) -> str:
    return "\n" + "\n".join(places)


FILES = find_files()
PYTHON_FILES = [path for path in FILES if path.suffix == ".py"]


def test_plain_ascii() -> None:
    places = find_broken_places(FILES, find_non_ascii)
    assert not places, show(places)


def test_no_paths_of_a_machine() -> None:
    places = find_broken_places(FILES, find_machine_paths)
    assert not places, show(places)


def test_no_notes_to_self() -> None:
    places = find_broken_places(FILES, find_notes_to_self)
    assert not places, show(places)


def test_no_swallowed_errors() -> None:
    places = find_broken_places(PYTHON_FILES, find_swallowed_errors)
    assert not places, show(places)


def test_no_sleep_in_tests() -> None:
    places = find_broken_places(PYTHON_FILES, find_sleeps, below=("tests",))
    assert not places, show(places)


def test_escapes_from_the_type_checker_have_a_reason() -> None:
    places = find_broken_places(PYTHON_FILES, find_unexplained_escapes, below=("src", "scripts"))
    assert not places, show(places)


def test_packages_and_public_functions_never_share_a_name() -> None:
    source = ROOT / "src" / "packhorse"
    packages = {path.parent.name for path in source.rglob("__init__.py")}
    functions: set[str] = set()
    for path in source.rglob("*.py"):
        functions |= find_public_functions(path.read_text(encoding="utf-8"))
    assert packages & functions == set()


def test_test_modules_have_unique_names() -> None:
    names = [path.name for path in PYTHON_FILES if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_links_and_paths_in_prose_exist() -> None:
    missing: list[str] = []
    prose = [path for path in FILES if path.suffix == ".md"]
    for path in prose:
        text = path.read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
        missing += [f"{path.name}: {link}" for link in links if not (path.parent / link).exists()]
        paths = re.findall(r"`((?:src|tests|docs|scripts|recipes|bench)/[\w./-]+)`", text)
        missing += [f"{path.name}: {name}" for name in paths if not (ROOT / name).exists()]
    assert not missing, show(missing)


@pytest.mark.parametrize(
    ("find", "bad", "good"),
    [
        (find_non_ascii, "a = 'caf\u00e9'", "a = 'cafe'"),
        (find_machine_paths, "open('/" + "tmp/x')", "open('run/tmp/x')"),
        (find_notes_to_self, "# TO" + "DO later", "# to do later"),
        (
            find_swallowed_errors,
            "try:\n    f()\nexcept Exception:\n    pass",
            "try:\n    f()\nexcept Exception as e:\n    raise ValueError from e",
        ),
        (
            find_swallowed_errors,
            "try:\n    f()\nexcept (OSError, BaseException):\n    pass",
            "try:\n    f()\nexcept (OSError, ValueError):\n    pass",
        ),
        (find_swallowed_errors, "try:\n    f()\nexcept:\n    pass", "f()"),
        (find_sleeps, "import time\ntime.sleep(1)", "import time\ntime.time()"),
        (find_unexplained_escapes, "x: Any = 1", "x: Any = 1  # Any: free-form"),
        (find_unexplained_escapes, "x = cast(int, y)", "from typing import Any, cast"),
        (
            find_unexplained_escapes,
            "x = y  # pyright: ignore[reportAny]",
            "x = y  # pyright: ignore[reportAny]  # y has no stubs",
        ),
        (find_unexplained_escapes, "x = y  # type: " + "ignore", "any(x)"),
    ],
)
def test_each_rule_finds_what_it_is_for(
    find: Callable[[str], list[int]], bad: str, good: str
) -> None:
    assert find(bad) != []
    assert find(good) == []
