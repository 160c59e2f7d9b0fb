"""Modules without their weights.

In: a model source. Out: a transformers causal LM whose parameters are on `meta` and whose buffers
are real: a parameter becomes `meta` the moment a module registers it, so the whole model never
exists. Ties stay ties; the config is a copy of its own.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Generator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from packhorse.errors import InputError, ModelError, RecipeError
from packhorse.graph.export import describe_parameters
from packhorse.trainer.model_sources import ModelSource


def build_module(
    source: ModelSource, *, attention: Literal["causal", "eager", "native"] | None = None
) -> nn.Module:
    """Build the module of a model in float32 and training mode, its parameters on `meta`.

    Args:
        attention: pinned path; None takes the fast one where the architecture has it.

    Raises:
        RecipeError: the pinned path is none of a transformers model's.
        ModelError: transformers cannot build it as a causal LM.
        InputError: transformers is not installed.
    """
    if attention == "native":
        raise RecipeError(
            "attention is pinned to native, which is for modules that are not of transformers",
            where="recipe: plan.attention",
            fix="use causal or eager",
        )
    implementation = {"causal": "sdpa", "eager": "eager", None: None}[attention]
    transformers = _import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(source.config), local_files_only=True)
        config = copy.deepcopy(config)
        with meta_parameters():
            module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=implementation
            )
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            "transformers cannot build this model as a causal language model:"
            f" {reason[0] if reason else type(error).__name__}",
            where=str(source.config),
            fix="use an architecture of AutoModelForCausalLM that transformers has itself",
        ) from error
    assert isinstance(module, nn.Module)
    return module.train()


@contextlib.contextmanager
def meta_parameters() -> Generator[None]:
    """Inside, every parameter that a module registers is moved to `meta`; buffers stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        # A tie registers a parameter that is on meta already, and must stay the same object.
        if param is not None and not param.is_meta:
            moved = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            self._parameters[name] = moved  # pyright: ignore[reportPrivateUsage]  # registering would come here again

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Stop the training of parameters whose name (or a tied one) fits a pattern.

    Returns:
        The canonical names of what is frozen.

    Raises:
        RecipeError: a pattern fits no parameter, or nothing is left to train.
    """
    specs = describe_parameters(module)
    frozen: list[str] = []
    for pattern in patterns:
        found = [
            spec.name
            for spec in specs.values()
            if any(fnmatchcase(name, pattern) for name in (spec.name, *spec.aliases))
        ]
        if not found:
            near = get_close_matches(pattern, specs, n=1, cutoff=0.0)
            raise RecipeError(
                f"the pattern {pattern!r} fits no parameter",
                where="recipe: freeze",
                fix=f"the nearest parameter is {near[0]!r}" if near else None,
            )
        frozen += found
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RecipeError(
            "every parameter is frozen, so there is nothing to train",
            where="recipe: freeze",
            fix="freeze fewer parameters",
        )
    return tuple(dict.fromkeys(frozen))


def find_vocabulary(module: nn.Module) -> int:
    """Count the tokens that the model's input embedding has rows for.

    Raises:
        ModelError: the model has no input embedding.
    """
    find: Any = getattr(module, "get_input_embeddings", None)  # transformers' own method
    embedding = find() if find is not None else None
    if not isinstance(embedding, nn.Module) or not hasattr(embedding, "weight"):
        raise ModelError(f"{type(module).__name__} has no input embedding")
    weight = embedding.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _import_transformers() -> Any:  # Any: the module is partly untyped
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            "models of Hugging Face need transformers: pip install 'packhorse[hf]'"
        ) from error
