"""The fingerprint changes with the architecture and with nothing else."""

from __future__ import annotations

from functools import cache

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from packhorse.graph.export import export_module
from packhorse.graph.fingerprint import fingerprint_model
from packhorse.graph.split import split_graph


def fingerprint(module: torch.nn.Module, *, rows: int = 2, length: int = 12) -> str:
    tokens = torch.zeros((rows, length), dtype=torch.long)
    exported = export_module(module, {"input_ids": tokens, "labels": tokens})
    return fingerprint_model(exported, split_graph(exported))


def llama(**changes: object) -> LlamaForCausalLM:
    words: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**(words | changes)))


@cache
def plain() -> str:
    return fingerprint(llama())


def test_weights_rows_length_and_freezing_do_not_matter() -> None:
    module = llama()
    module.model.embed_tokens.weight.requires_grad_(False)
    assert fingerprint(module) == plain()
    assert fingerprint(llama(), rows=3, length=20) == plain()
    assert fingerprint(llama(), rows=1, length=9) == plain()


def test_heads_epsilon_and_rope_matter() -> None:
    others = {
        "heads": fingerprint(llama(num_attention_heads=8, num_key_value_heads=8)),
        "epsilon": fingerprint(llama(rms_norm_eps=1e-2)),
        "rope": fingerprint(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        "width": fingerprint(llama(intermediate_size=64)),
        "activation": fingerprint(llama(hidden_act="gelu")),
    }
    assert len({plain(), *others.values()}) == 6, others


def test_a_window_matters_and_the_length_of_its_mask_does_not() -> None:
    def gemma(window: int, length: int) -> str:
        config = Gemma3TextConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=window,
            layer_types=["sliding_attention"], max_position_embeddings=64,
        )  # fmt: skip
        return fingerprint(Gemma3ForCausalLM(config), length=length)

    assert gemma(5, 12) != gemma(6, 12)
    assert gemma(5, 12) == gemma(5, 21)
