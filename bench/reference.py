"""The plain PyTorch loop that every plan is compared with.

In: a module, an optimizer's words, the micro-batches of each step. Out: a `Curve`: what a person
would see of such a run, and every weight and optimizer state at its end. Eager mode, autograd,
gradients accumulated by `backward`, `torch.optim` with `fused=True`; only the norm is the
project's own, because a float32 norm depends on how it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from packhorse.graph.export import is_transformers_model
from packhorse.optim.groups import assign_groups, find_module_kinds, hyperparameters
from packhorse.optim.norm import clip_coefficient, global_norm
from packhorse.optim.optimizers import SGD, AdamW, Optimizer

Feed = Mapping[str, Tensor]
# By name of a tied parameter, which is its first user's, what its other users have in its place,
# the last user first: their gradients are added once a step.
Copies = Mapping[str, Sequence[nn.Parameter]]
NO_COPIES: Final[Copies] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run of some steps shows.

    `losses` has per step the loss of each micro-batch, `totals` their sum; `norms` are global and
    from before clipping. `states` maps a state (`param`, `exp_avg`, ...) and a parameter's name to
    its value after the last step; parameters without gradient have a `param` only.
    """

    losses: tuple[tuple[float, ...], ...]
    totals: tuple[float, ...]
    norms: tuple[float, ...]
    states: Mapping[str, Mapping[str, Tensor]]


def group_names(module: nn.Module, optimizer: Optimizer) -> Mapping[str, str]:
    """The optimizer group of each parameter."""
    names = [name for name, _ in module.named_parameters()]
    return assign_groups(names, optimizer, module_kinds=find_module_kinds(module))


def call_loss(module: nn.Module, feed: Feed) -> Tensor:
    """The micro-batch's share of the loss, as transformers' or a plain module's users call it."""
    tensors = {name: tensor for name, tensor in feed.items() if name != "denominator"}
    if is_transformers_model(module):
        return module(**tensors, num_items_in_batch=feed["denominator"], use_cache=False).loss
    output = module(**tensors)
    return (output[0] if isinstance(output, tuple) else output) / feed["denominator"]


def train_plainly(
    module: nn.Module,
    optimizer: Optimizer,
    steps: Sequence[Sequence[Feed]],
    *,
    max_grad_norm: float | None,
    copies: Copies = NO_COPIES,
) -> Curve:
    """Train `module` in place and tell what happened.

    Args:
        steps: per step, per micro-batch, the inputs and `denominator`.
        max_grad_norm: None leaves gradients as they are.
        copies: in whose place the module uses a parameter; see `Copies`.
    """
    others = {id(copy) for found in copies.values() for copy in found}
    own = [(name, p) for name, p in module.named_parameters() if id(p) not in others]
    names = {name: p for name, p in own if p.requires_grad}
    plain = make_optimizer(module, optimizer, dict(own))
    losses: list[tuple[float, ...]] = []
    totals: list[float] = []
    norms: list[float] = []
    for microbatches in steps:
        plain.zero_grad()
        total: Tensor | None = None
        shares: list[float] = []
        for feed in microbatches:
            loss = call_loss(module, feed)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            shares.append(float(loss.detach()))
        for name, found in copies.items():
            _add_copies(names[name], found)
        norm = global_norm([parameter.grad for parameter in names.values()])
        if max_grad_norm is not None:
            coefficient = clip_coefficient(norm, max_grad_norm)
            for parameter in names.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(coefficient)
        plain.step()
        for name, found in copies.items():
            for copy in found:
                copy.data.copy_(names[name].data)
        assert total is not None
        losses.append(tuple(shares))
        totals.append(float(total))
        norms.append(float(norm))
    states = {"param": {name: p.detach().clone() for name, p in own}}
    for state in optimizer.state_names:
        states[state] = {
            name: plain.state[parameter][state].detach().clone()
            for name, parameter in names.items()
            if parameter.grad is not None
        }
    return Curve(losses=tuple(losses), totals=tuple(totals), norms=tuple(norms), states=states)


def _add_copies(parameter: nn.Parameter, copies: Sequence[nn.Parameter]) -> None:
    """Add what the users of a tied parameter summed, each on its own, the last user first."""
    grads = [copy.grad for copy in (*copies, parameter) if copy.grad is not None]
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    parameter.grad = total
    for copy in copies:
        copy.grad = None


def make_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> torch.optim.Optimizer:
    """The fused optimizer of torch.optim with the same words and groups.

    `parameters` are those of the module unless given.
    """
    groups = group_names(module, optimizer)
    members: dict[str, list[nn.Parameter]] = {}
    for name, parameter in (parameters or dict(module.named_parameters())).items():
        if parameter.requires_grad:
            members.setdefault(groups[name], []).append(parameter)
    settings = [
        {"params": parameters, **_settings(hyperparameters(optimizer, group))}
        for group, parameters in members.items()
    ]
    kind = torch.optim.AdamW if isinstance(optimizer, AdamW) else torch.optim.SGD
    return kind(settings, fused=True)


def _settings(group: Optimizer) -> dict[str, object]:
    common: dict[str, object] = {"lr": group.lr, "weight_decay": group.weight_decay}
    match group:
        case AdamW():
            return {**common, "betas": group.betas, "eps": group.eps}
        case SGD():
            return {
                **common,
                "momentum": group.momentum,
                "dampening": group.dampening,
                "nesterov": group.nesterov,
            }


def find_differences(expected: Curve, actual: Curve) -> tuple[str, ...]:
    """Say, shortly, everything in which two curves differ in a bit; NaNs count as equal."""
    found: list[str] = []
    for what in ("losses", "totals", "norms"):
        pairs = zip(getattr(expected, what), getattr(actual, what), strict=True)
        found += [
            f"{what} of step {step + 1}: {one} and {other}"
            for step, (one, other) in enumerate(pairs)
            if repr(one) != repr(other)
        ]
    if expected.states.keys() != actual.states.keys():
        found.append(f"states {sorted(expected.states)} and {sorted(actual.states)}")
        return tuple(found)
    for state, tensors in expected.states.items():
        others = actual.states[state]
        if tensors.keys() != others.keys():
            found.append(f"{state} of {sorted(tensors.keys() ^ others.keys())}")
            continue
        found += [
            f"{state} of {name}: largest difference {_distance(tensor, others[name]):.3g}"
            for name, tensor in tensors.items()
            if not same_bits(tensor, others[name])
        ]
    return tuple(found)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit, the sign of zeros included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
