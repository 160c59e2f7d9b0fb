"""What is set aside on a GPU beside a plan's ledger, with a driver's figures that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from subjects import find_subject

from bench.planned import RESIDENT, make_plan
from packhorse.compiler.lower import lower_plan
from packhorse.trainer.device_memory import (
    LATER_BYTES,
    LIBRARY_BYTES,
    find_allocator_bytes,
    measure_device_base,
)
from packhorse.units import GIB, MIB


def test_the_base_is_all_that_the_allocator_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 4 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300 * MIB)
    base = measure_device_base(torch.device("cpu"))
    assert base == GIB - 300 * MIB + LATER_BYTES


def test_the_allocator_gets_the_kept_heap_and_its_slack() -> None:
    subject = find_subject("llama")
    plan = make_plan(
        subject.traced.model, subject.optimizer, RESIDENT, num_microbatches=1, clips=True
    )
    kept = replace(plan, heap_slack=0.5)
    program = lower_plan(kept, subject.traced.model, "load")
    (heap,) = (pool for pool in program.pools if pool.id == program.workspace_pool)
    (chunks,) = (pool for pool in program.pools if pool.tier == "device" and pool != heap)
    allowed = find_allocator_bytes(kept, program) - LIBRARY_BYTES
    assert allowed >= 1.5 * heap.capacity_bytes > 0
    # Chunks and the allocator share what the budget leaves, to the byte.
    assert allowed + chunks.capacity_bytes == kept.budget_bytes["device"] - kept.base_bytes
    assert LIBRARY_BYTES < LATER_BYTES
