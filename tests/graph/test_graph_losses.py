"""What a forward may return as its loss, and what it hears when it returns something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from packhorse.errors import ModelError
from packhorse.graph.export import export_module
from packhorse.graph.losses import find_loss
from packhorse.trainer.counting import make_denominators, watch_loss

BATCH = {"x": torch.ones(4, 3)}


class Returning(nn.Module):
    """Returns what a function makes of its hidden values."""

    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.make = make

    def forward(self, x: Tensor) -> object:
        return self.make(self.inner(x))


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "make",
    [
        lambda h: h.mean(),
        lambda h: {"loss": h.mean(), "hidden": h},
        lambda h: Output(h.mean()),
        lambda h: (h.sum(), h.numel()),
        lambda h: (h.sum(), torch.ones(4).sum()),
    ],
)
def test_losses_are_found_and_traced(make: Callable[[Tensor], object]) -> None:
    module = Returning(make)
    loss, count = find_loss(module, module(BATCH["x"]))
    with watch_loss(module) as watcher:
        export_module(module, BATCH)
    assert watcher.kind == ("mean" if count is None else "pair")
    found = make_denominators(module, watcher.kind, BATCH, rows=4, num_microbatches=1).find(BATCH)
    assert found == (1 if count is None else float(count))
    assert loss.requires_grad


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "returns no loss, but None"),
        (lambda _: 1.0, "returns no loss, but a float"),
        (lambda h: {"logits": h}, "returns no loss, but a dict with logits"),
        (lambda _: {}, "returns no loss, but a dict with nothing"),
        (lambda h: (h.mean(),), "returns no loss, but a tuple of a tensor float32[]"),
        (lambda h: (h.mean(), h), "a tensor float32[], a tensor float32["),
        (lambda h: (h.mean(), h.mean(), h), "returns no loss, but a tuple of"),
        (lambda h: h.argmax(), "returns no loss, but a tensor int64[]"),
        (lambda h: h.mean().detach(), "does not depend on any parameter that is trained"),
    ],
)
def test_what_is_no_loss_is_described(make: Callable[[Tensor], object], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        export_module(Returning(make), BATCH)
    assert words in str(caught.value)
    assert "Returning" in str(caught.value.where)
    assert "return" in str(caught.value.fix) or "detach" in str(caught.value.fix)
