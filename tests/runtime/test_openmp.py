"""A thread's OpenMP helpers end, and come back when it computes again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from packhorse.runtime.openmp import release_team


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_helpers_end_and_come_back() -> None:
    counts: list[int] = []
    sums: list[torch.Tensor] = []
    released: list[bool] = []

    def compute() -> None:
        torch.set_num_threads(3)
        values = torch.linspace(0, 1, 1_000_000)
        sums.append(values.exp())
        counts.append(count_threads())
        released.append(release_team())
        counts.append(count_threads())
        sums.append(values.exp())
        counts.append(count_threads())

    num_threads = torch.get_num_threads()
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(num_threads)
    if not released[0]:
        pytest.skip("this OpenMP library keeps its threads")
    assert counts[1] == counts[0] - 2
    assert counts[2] == counts[0]
    assert torch.equal(sums[0], sums[1])
