from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from packhorse.errors import RecipeError
from packhorse.optim.schedules import count_warmup_steps, learning_rate_at, say_warmup

KINDS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 7, 0.13, 50])
def test_equals_transformers(kind: str, warmup: float) -> None:
    total = 50
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=3e-4)
    scheduler = get_scheduler(
        KINDS[kind],
        optimizer,
        num_warmup_steps=count_warmup_steps(warmup, total),
        num_training_steps=total,
    )
    for step in range(total + 3):
        ours = learning_rate_at(step, base=3e-4, kind=kind, warmup_steps=warmup, total_steps=total)
        assert ours == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("warmup", [0, 0.03, 0.999, 1, 12])
def test_warmup_counts_as_in_transformers(warmup: float) -> None:
    arguments = SimpleNamespace(warmup_steps=warmup)
    theirs = TrainingArguments.get_warmup_steps(arguments, 101)
    assert count_warmup_steps(warmup, 101) == theirs


def test_negative_warmup_is_refused() -> None:
    with pytest.raises(RecipeError, match="warmup_steps is -1"):
        count_warmup_steps(-1, 10)


def test_a_run_of_one_step_that_is_warm_up_is_warned_of():
    (said,) = say_warmup(0.03, 1)
    assert "no weight will change" in said
    assert not say_warmup(0, 1)
    assert not say_warmup(0.03, 2)
