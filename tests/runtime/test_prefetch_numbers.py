"""Copies that run ahead move bytes earlier and change no bit, also with audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from subjects import find_subject

from bench.planned import PLACES, make_plan, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.optim.optimizers import AdamW


@pytest.mark.parametrize("heap", ["keep", "map"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_plan_that_prefetches_has_the_bits_of_the_plain_loop(
    heap: str, max_grad_norm: float | None, tmp_path: Path
) -> None:
    entry = ZOO["llama"]
    steps = make_steps(entry, num_steps=3, num_microbatches=3)
    words = AdamW(lr=3e-3)
    subject = replace(find_subject("llama"), optimizer=words)
    plain = train_plainly(build_model(entry), words, steps, max_grad_norm=max_grad_norm)
    ways = replace(PLACES["all on disk"], activations=("keep", "recompute"), chunk_bytes=4096)
    ways = replace(ways, heap="keep" if heap == "keep" else "map")
    orders = []
    for depth in (0, 1, 5):
        ahead = replace(ways, prefetch=depth)
        model = subject.traced.model
        plan = make_plan(model, words, ahead, num_microbatches=3, clips=max_grad_norm is not None)
        orders.append(lower_plan(plan, model, "train_step").tasks)
        scratch = tmp_path / str(depth)
        curve = train_by_plan(subject, ahead, steps, max_grad_norm=max_grad_norm, scratch=scratch)
        assert find_differences(plain, curve) == ()
    assert len(set(orders)) == 3
