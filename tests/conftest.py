"""What every test shares: no network, one thread, fixed seeds, golden files."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, and no deadline: other processes share the cores.
settings.register_profile("packhorse", derandomize=True, deadline=None)
settings.load_profile("packhorse")

# Before anything imports torch or transformers: both read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

GOLDEN = Path(__file__).resolve().parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--bless", action="store_true", help="rewrite the golden files with what the tests produce"
    )


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed Python always, numpy and torch where a test has loaded them, and pin torch's threads."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/<name>`; `--bless` rewrites the file instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--bless"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.is_file(), f"tests/golden/{name} is missing; run pytest with --bless"
        assert text == path.read_text(encoding="utf-8"), (
            f"differs from tests/golden/{name}; if that is meant, run pytest with --bless"
        )

    return compare
