"""What a summed loss is divided by, so that any cut of a batch gives the loss of the whole.

In: a module and a global batch. Out: the denominator:

    transformers models        label tokens of the global batch, after the causal shift
    a (sum, count) pair        the sum of the counts of all micro-batches
    a mean                     the number of micro-batches

The count of a pair is traced on fake tensors and must follow from the inputs alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from packhorse.data.values import IGNORED_LABEL
from packhorse.errors import InputError, ModelError
from packhorse.graph.export import is_transformers_model
from packhorse.graph.losses import find_loss

LossKind = Literal["items", "pair", "mean"]


class LossKindWatcher:
    """Remembers what kind of loss a module returned while it was traced."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind: LossKind = "items" if is_transformers_model(module) else "mean"

    def take(self, output: object) -> None:
        """Look at what the forward returned."""
        if self.kind != "items" and find_loss(self.module, output)[1] is not None:
            self.kind = "pair"


@contextlib.contextmanager
def watch_loss(module: nn.Module) -> Generator[LossKindWatcher]:
    """Find out inside the block what the module's forward returns."""
    watcher = LossKindWatcher(module)

    def look(owner: nn.Module, arguments: object, output: object) -> None:
        del owner, arguments
        watcher.take(output)

    handle = module.register_forward_hook(look)
    try:
        yield watcher
    finally:
        handle.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Gives the denominator of each global batch; `counter` only for a pair."""

    kind: LossKind
    rows: int
    num_microbatches: int
    counter: fx.GraphModule | None
    parameters: Mapping[str, Tensor]

    def find(self, batch: Mapping[str, Tensor]) -> float:
        """Give the denominator of a global batch.

        Raises:
            InputError: there is nothing to learn from in it.
        """
        match self.kind:
            case "mean":
                return self.num_microbatches
            case "items":
                count = int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())
            case "pair":
                count = sum(
                    self._count({name: t[first : first + self.rows] for name, t in batch.items()})
                    for first in range(0, self.rows * self.num_microbatches, self.rows)
                )
        if not count:
            raise InputError(
                "the batch has nothing to learn from: its count is 0",
                where="batch",
                fix=f"give at least one label other than {IGNORED_LABEL} after the first token"
                if self.kind == "items"
                else "give at least one row that counts",
            )
        return count

    def _count(self, part: Mapping[str, Tensor]) -> float:
        assert self.counter is not None
        with torch.no_grad():
            return float(self.counter(dict(self.parameters), dict(part)))


def make_denominators(
    module: nn.Module,
    kind: LossKind,
    example: Mapping[str, Tensor],
    *,
    rows: int,
    num_microbatches: int,
) -> Denominators:
    """Prepare the denominators of a module.

    Args:
        kind: from `watch_loss`.
        example: a micro-batch.

    Raises:
        ModelError: the count of a (sum, count) pair does not follow from the inputs alone.
    """
    counter = _trace_count(module, example) if kind == "pair" else None
    return Denominators(
        kind=kind,
        rows=rows,
        num_microbatches=num_microbatches,
        counter=counter,
        parameters={
            name: torch.empty(parameter.shape, device="meta")
            for name, parameter in module.named_parameters()
        },
    )


def _trace_count(module: nn.Module, example: Mapping[str, Tensor]) -> fx.GraphModule:
    def count(parameters: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        output: object = functional_call(module, parameters, (), batch)
        _, found = find_loss(module, output)
        assert found is not None  # of a pair: watch_loss saw one
        return found if isinstance(found, Tensor) else torch.tensor(float(found))

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        parameters = {
            name: torch.empty(p.shape, dtype=p.dtype) for name, p in module.named_parameters()
        }
        batch = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in example.items()}
        try:
            with torch.no_grad():
                traced = make_fx(count)(parameters, batch)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise _cannot_count(module, str(error).strip().splitlines()[0]) from error
    traced.graph.eliminate_dead_code()
    traced.recompile()
    holders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if any(node.users for node in holders[: len(parameters)]):
        raise _cannot_count(module, "it depends on the parameters")
    return traced


def _cannot_count(module: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"the count that {type(module).__name__} returns beside its sum cannot be found from the"
        f" inputs alone: {reason}",
        where=f"forward of {type(module).__qualname__}",
        fix="return (sum, count) with a count such as (labels != -100).sum(), or return a mean",
    )
