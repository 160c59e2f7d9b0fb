"""A loss or gradient that is not finite: the block is named, and states are still good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from subjects import find_subject

from bench.planned import PLACES, open_engine
from bench.zoo import ZOO, make_steps
from packhorse.errors import NonFiniteError
from packhorse.runtime.executor import Executor
from packhorse.runtime.lanes import LanesStuckError

ON_DISK = replace(PLACES["all on disk"], activations=("recompute",))
STEPS = make_steps(ZOO["llama"], num_steps=1, num_microbatches=2)


def spoil(name: str, value: float):
    """The subject with one element of one parameter replaced."""
    subject = find_subject("llama")
    weights = {key: tensor.clone() for key, tensor in subject.weights.items()}
    weights[name].view(-1)[3] = value
    return replace(subject, weights=weights)


@pytest.mark.parametrize("ways", [ON_DISK, PLACES["resident"]], ids=["disk", "resident"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_block_with_a_bad_output_is_named(ways, layer: int, tmp_path: Path) -> None:
    subject = spoil(f"model.layers.{layer}.mlp.down_proj.weight", float("nan"))
    with (
        open_engine(
            subject, ways, num_microbatches=2, max_grad_norm=1.0, scratch=tmp_path, audit=False
        ) as engine,
        pytest.raises(NonFiniteError) as caught,
    ):
        engine.train_step(STEPS[0], step=7, learning_rate=1e-3)
    text = str(caught.value)
    assert "the loss became nan in step 7" in text
    assert f"step 7, micro-batch 0, first in block model.layers.{layer}" in text


def test_a_lane_that_does_not_end_keeps_no_bad_loss_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiesce = Executor.quiesce

    def stick(executor: Executor) -> None:
        quiesce(executor)
        raise LanesStuckError("lane disk_write does not end", {"disk_write": 3})

    subject = spoil("model.layers.0.mlp.down_proj.weight", float("nan"))
    engine = open_engine(
        subject, ON_DISK, num_microbatches=2, max_grad_norm=1.0, scratch=tmp_path, audit=False
    )
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "quiesce", stick)
        with pytest.raises(NonFiniteError, match="the loss became nan in step 7"):
            engine.train_step(STEPS[0], step=7, learning_rate=1e-3)
    engine.close()


def test_a_bad_gradient_names_its_parameters_before_any_update(tmp_path: Path) -> None:
    # A finite loss whose gradient overflows: the square of a huge activation's norm.
    subject = spoil("model.layers.1.input_layernorm.weight", 1e-3)
    weights = dict(subject.weights)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e37)
    subject = replace(subject, weights=weights)
    with (
        open_engine(
            subject, ON_DISK, num_microbatches=2, max_grad_norm=1.0, scratch=tmp_path, audit=False
        ) as engine,
        pytest.raises(NonFiniteError) as caught,
    ):
        engine.train_step(STEPS[0], step=1, learning_rate=1e-3)
    assert "in step 1" in str(caught.value)
    assert "first in block" in str(caught.value)
