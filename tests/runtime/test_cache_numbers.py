"""What stays in the valleys of memory changes no number: the bits are those of the plain loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from subjects import find_subject

from bench.planned import PLACES, Ways, make_plan, train_by_plan
from bench.reference import Curve, find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.optim.optimizers import AdamW
from packhorse.program.tasks import Copy

ON_DISK = PLACES["all on disk"]
KEEPING = replace(ON_DISK, heap="map", cache="valleys", chunk_bytes=4096)
WAYS = {
    "keep": KEEPING,
    "recompute": replace(KEEPING, activations=("recompute",)),
    "some on disk": replace(
        KEEPING, parameters=("disk", "device"), optimizer=("device", "disk", "disk")
    ),
}
WORDS = AdamW(lr=3e-3)


def steps_of(name: str, count: int):
    return make_steps(ZOO[name], num_steps=3, num_microbatches=count)


@cache
def plain_curve(name: str, count: int, clip: float | None) -> Curve:
    return train_plainly(build_model(ZOO[name]), WORDS, steps_of(name, count), max_grad_norm=clip)


def count_copies(name: str, ways: Ways, count: int, clip: float | None) -> int:
    model = find_subject(name).traced.model
    plan = make_plan(model, WORDS, ways, num_microbatches=count, clips=clip is not None)
    return sum(isinstance(task, Copy) for task in lower_plan(plan, model, "train_step").tasks)


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", "weave"])
def test_keeping_has_the_bits_of_the_plain_loop(
    name: str, count: int, way: str, clip: float | None, tmp_path: Path
) -> None:
    ways = WAYS[way]
    curve = train_by_plan(
        replace(find_subject(name), optimizer=WORDS),
        ways,
        steps_of(name, count),
        max_grad_norm=clip,
        scratch=tmp_path,
    )
    assert not find_differences(plain_curve(name, count, clip), curve)
    kept = count_copies(name, ways, count, clip)
    without = count_copies(name, replace(ways, cache="none"), count, clip)
    # One micro-batch without clipping has no gradient that waits, and few second uses.
    assert kept < without if count > 1 or clip else kept <= without
