"""A shell for the commands, and a folder with a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_cases import run_shell, write_plan_folder


@pytest.fixture
def shell():
    return run_shell


@pytest.fixture
def plan_folder(tmp_path) -> Path:
    write_plan_folder(tmp_path / "plans")
    return tmp_path / "plans"
