"""Which optimizer group each parameter belongs to.

In: parameter names, an optimizer, and where known the kind of module that holds each parameter.
Out: a group name for every parameter, and the hyperparameters of a group.

The default is that of Hugging Face's Trainer: biases and the weights of norms do not decay. User
groups come first, in order; the first pattern that matches wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from torch import nn

from packhorse.errors import RecipeError
from packhorse.optim.optimizers import (
    ALL,
    DECAY,
    NO_DECAY,
    Optimizer,
    ParameterGroup,
    override,
)

_NO_DECAY_NAME: Final = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# Where only names are known, the common short names of layer norms stand in for the module's kind.
_SHORT_NORM_NAME: Final = re.compile(r"(?:^|\.)(?:ln(?:_\w+|\d*)|norm\d*)\.")
_LAYER_NORM: Final = "LayerNorm"


def find_module_kinds(module: nn.Module) -> Mapping[str, str]:
    """Name the class of the module that holds each parameter, by parameter name.

    Everything inside a `torch.nn.LayerNorm` or a subclass of it counts as `LayerNorm`. A tied
    parameter appears under its first name, as in `named_parameters`.
    """
    kinds: dict[str, str] = {}
    for name, _ in module.named_parameters():
        path = name.split(".")[:-1]
        holders = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        inside = any(isinstance(holder, nn.LayerNorm) for holder in holders)
        kinds[name] = _LAYER_NORM if inside else type(holders[-1]).__name__
    return kinds


def assign_groups(
    names: Iterable[str],
    optimizer: Optimizer,
    *,
    module_kinds: Mapping[str, str] | None = None,
) -> Mapping[str, str]:
    """Give each parameter the name of its group.

    The groups are `decay` and `no_decay` (one group `all` when nothing decays anyway), then for
    each user group its name, and `<name>/no_decay` for its biases and norms unless the group sets
    `weight_decay` itself. Only groups that have parameters appear.

    Args:
        module_kinds: from `find_module_kinds`; without it layer norms are told by name.

    Raises:
        RecipeError: a pattern matches no parameter.
    """
    wanted = tuple(names)
    for group in optimizer.groups:
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name in wanted):
                raise RecipeError(
                    f"pattern {pattern!r} of parameter group {group.name!r} matches no parameter",
                    where="parameter groups",
                    fix=f"parameters have names such as {', '.join(wanted[:3]) or '(none)'}",
                )
    return {name: _group_of(name, optimizer, module_kinds) for name in wanted}


def hyperparameters(optimizer: Optimizer, group: str) -> Optimizer:
    """Give the optimizer as it applies to one group, by a name from `assign_groups`.

    Raises:
        RecipeError: the optimizer has no such group.
    """
    name, _, suffix = group.partition("/")
    found = _find_group(optimizer, name)
    if found is not None and suffix in ("", NO_DECAY):
        own = override(optimizer, found.overrides)
    elif group in (ALL, DECAY, NO_DECAY):
        own = override(optimizer, {})
    else:
        raise RecipeError(
            f"the optimizer has no parameter group {group!r}",
            where="parameter groups",
            fix="known: " + ", ".join((DECAY, NO_DECAY, *(g.name for g in optimizer.groups))),
        )
    return override(own, {"weight_decay": 0.0}) if NO_DECAY in (name, suffix) else own


def decays_by_default(name: str, *, module_kinds: Mapping[str, str] | None = None) -> bool:
    """Tell whether weight decay applies to a parameter when no group says otherwise."""
    lowered = name.lower()
    if _NO_DECAY_NAME.search(lowered):
        return False
    if module_kinds is None:
        return not _SHORT_NORM_NAME.search(lowered)
    return module_kinds.get(name) != _LAYER_NORM


def _group_of(name: str, optimizer: Optimizer, module_kinds: Mapping[str, str] | None) -> str:
    decays = decays_by_default(name, module_kinds=module_kinds)
    for group in optimizer.groups:
        if any(fnmatchcase(name, pattern) for pattern in group.patterns):
            own = override(optimizer, group.overrides)
            if decays or "weight_decay" in group.overrides or own.weight_decay == 0:
                return group.name
            return f"{group.name}/{NO_DECAY}"
    if optimizer.weight_decay == 0:
        return ALL
    return DECAY if decays else NO_DECAY


def _find_group(optimizer: Optimizer, name: str) -> ParameterGroup | None:
    return next((group for group in optimizer.groups if group.name == name), None)
