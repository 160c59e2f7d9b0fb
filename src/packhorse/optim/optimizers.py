"""Optimizers as values: hyperparameters, the states they keep, and parameter groups.

In: what a user chooses. Out: frozen values that planning can read without a tensor in sight.
Names and defaults are those of torch.optim, so that a plain loop is written with the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from packhorse.errors import RecipeError

OverrideValue = float | bool | tuple[float, float]

NO_DECAY: Final = "no_decay"
DECAY: Final = "decay"
ALL: Final = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with hyperparameters of their own.

    `patterns` are shell patterns for whole parameter names (`model.embed*`, `*.bias`); `overrides`
    maps fields of the optimizer, such as `lr` or `weight_decay`, to the group's values. Where the
    group does not override `weight_decay`, its biases and norm weights stay without decay.

    Raises:
        RecipeError: the name is reserved, or there is no pattern.
    """

    name: str
    patterns: tuple[str, ...]
    overrides: Mapping[str, OverrideValue] = field(default_factory=dict[str, OverrideValue])

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (ALL, DECAY, NO_DECAY):
            raise RecipeError(
                f"a parameter group cannot be called {self.name!r}",
                where="parameter groups",
                fix=f"use a name without a slash other than {ALL}, {DECAY} and {NO_DECAY}",
            )
        if not self.patterns:
            raise RecipeError(
                f"parameter group {self.name!r} has no patterns, so nothing is in it",
                where="parameter groups",
                fix="give parameter name patterns, for example *.embed_tokens.weight",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW with decoupled weight decay, as `torch.optim.AdamW(fused=True)` computes it.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019).

    Raises:
        RecipeError: a value is out of range, or a group overrides what AdamW does not have.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    groups: tuple[ParameterGroup, ...] = ()

    def __post_init__(self) -> None:
        _require(self.lr >= 0, "lr", self.lr, "0 or more")
        for beta in self.betas:
            _require(0 <= beta < 1, "betas", self.betas, "at least 0 and below 1, both")
        _require(self.eps >= 0, "eps", self.eps, "0 or more")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _check_groups(self)

    @property
    def state_names(self) -> tuple[str, ...]:
        """What it keeps for each parameter, in float32 and of the parameter's shape."""
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum, as `torch.optim.SGD(fused=True)` computes it.

    Raises:
        RecipeError: a value is out of range, or a group overrides what SGD does not have.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    groups: tuple[ParameterGroup, ...] = ()

    def __post_init__(self) -> None:
        _require(self.lr >= 0, "lr", self.lr, "0 or more")
        _require(self.momentum >= 0, "momentum", self.momentum, "0 or more")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        if self.nesterov:
            _require(self.momentum > 0, "momentum", self.momentum, "above 0 with nesterov")
            _require(self.dampening == 0, "dampening", self.dampening, "0 with nesterov")
        _check_groups(self)

    @property
    def state_names(self) -> tuple[str, ...]:
        """What it keeps for each parameter: nothing without momentum."""
        return ("momentum_buffer",) if self.momentum else ()


Optimizer = AdamW | SGD


def override(optimizer: Optimizer, overrides: Mapping[str, OverrideValue]) -> Optimizer:
    """Apply a group's overrides; the result has no groups."""
    return replace(optimizer, groups=(), **overrides)


def _check_groups(optimizer: Optimizer) -> None:
    known = sorted(f.name for f in fields(optimizer) if f.name != "groups")
    names = [group.name for group in optimizer.groups]
    for group in optimizer.groups:
        if names.count(group.name) > 1:
            raise RecipeError(
                f"two parameter groups are called {group.name!r}",
                where="parameter groups",
                fix="give each group a name of its own",
            )
        unknown = sorted(set(group.overrides) - set(known))
        if unknown:
            raise RecipeError(
                f"parameter group {group.name!r} sets {unknown[0]!r}, which"
                f" {type(optimizer).__name__} does not have",
                where="parameter groups",
                fix="known: " + ", ".join(known),
            )
        changed = override(optimizer, group.overrides)
        if changed.state_names != optimizer.state_names:
            raise RecipeError(
                f"parameter group {group.name!r} would need other optimizer states"
                f" ({', '.join(changed.state_names) or 'none'}) than the rest"
                f" ({', '.join(optimizer.state_names) or 'none'})",
                where="parameter groups",
                fix="let all groups have a momentum, or none",
            )


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise RecipeError(f"{name} is {value}, it must be {limit}", where="optimizer")
