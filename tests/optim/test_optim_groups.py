from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Trainer

from packhorse.errors import RecipeError
from packhorse.optim.groups import (
    assign_groups,
    decays_by_default,
    find_module_kinds,
    hyperparameters,
)
from packhorse.optim.optimizers import SGD, AdamW, ParameterGroup


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        class OwnNorm(nn.LayerNorm):
            pass

        self.scale = OwnNorm(4)
        self.enorm = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.tied = self.enorm


def tiny_models() -> list[nn.Module]:
    with torch.device("meta"):
        return [
            AutoModelForCausalLM.from_config(
                LlamaConfig(
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                    num_key_value_heads=1,
                    vocab_size=16,
                    attention_bias=True,
                )
            ),
            AutoModelForCausalLM.from_config(
                GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=8)
            ),
            Custom(),
        ]


@pytest.mark.parametrize("model", tiny_models(), ids=lambda model: type(model).__name__)
def test_default_is_the_trainers(model: nn.Module) -> None:
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    kinds = find_module_kinds(model)
    groups = assign_groups(kinds, AdamW(weight_decay=0.1), module_kinds=kinds)
    assert list(groups) == [name for name, _ in model.named_parameters()]
    assert {name for name, group in groups.items() if group == "decay"} == theirs & set(groups)
    assert set(groups.values()) == {"decay", "no_decay"}


def test_names_alone_know_gpt2s_norms() -> None:
    model = tiny_models()[1]
    kinds = find_module_kinds(model)
    optimizer = AdamW(weight_decay=0.1)
    assert assign_groups(kinds, optimizer) == assign_groups(kinds, optimizer, module_kinds=kinds)
    assert decays_by_default("model.lnear.weight")


def test_without_decay_there_is_one_group() -> None:
    assert set(assign_groups(["a.weight", "a.bias"], AdamW(weight_decay=0.0)).values()) == {"all"}


def test_user_groups() -> None:
    optimizer = AdamW(
        lr=1e-3,
        weight_decay=0.1,
        groups=(
            ParameterGroup(name="slow", patterns=("low.*",), overrides={"lr": 1e-5}),
            ParameterGroup(name="strong", patterns=("*.bias",), overrides={"weight_decay": 0.5}),
        ),
    )
    names = ["low.weight", "low.bias", "low.norm.weight", "high.weight", "high.bias", "norm.weight"]
    groups = assign_groups(names, optimizer)
    assert list(groups.values()) == [
        "slow",
        "slow/no_decay",
        "slow/no_decay",
        "decay",
        "strong",
        "no_decay",
    ]
    seen = {name: hyperparameters(optimizer, name) for name in set(groups.values())}
    assert {name: (h.lr, h.weight_decay) for name, h in seen.items()} == {
        "slow": (1e-5, 0.1),
        "slow/no_decay": (1e-5, 0.0),
        "decay": (1e-3, 0.1),
        "strong": (1e-3, 0.5),
        "no_decay": (1e-3, 0.0),
    }
    assert all(h.groups == () for h in seen.values())


def test_a_pattern_without_effect_is_an_error() -> None:
    optimizer = SGD(groups=(ParameterGroup(name="x", patterns=("wrong.*",)),))
    with pytest.raises(RecipeError, match=r"'wrong\.\*' of parameter group 'x' matches no"):
        assign_groups(["a.weight"], optimizer)
    with pytest.raises(RecipeError, match="no parameter group 'y'"):
        hyperparameters(optimizer, "y")
