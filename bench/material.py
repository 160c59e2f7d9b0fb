"""What benches train on: rows of random tokens, and a random checkpoint of any size.

A checkpoint is written tensor by tensor, so that making it needs no more memory than its largest
tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from packhorse.checkpoint.header import TensorSpec
from packhorse.checkpoint.tensor_writer import TensorFileWriter

VOCABULARY: Final = 32_000
TIED_VOCABULARY: Final = 50_257
_SCALE: Final = 0.02
_PART: Final = 1 << 22


def write_tokens(
    path: Path, *, num_rows: int, length: int, seed: int, vocabulary: int = VOCABULARY
) -> Path:
    """Write rows of random tokens, every one of them a label."""
    generator = torch.Generator().manual_seed(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            row = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": row, "labels": row}) + "\n")
    return path


def make_config(*, width: int, num_layers: int) -> LlamaConfig:
    """Describe a Llama with untied embeddings."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        dtype="float32",
    )


def make_tied_config(*, width: int, num_layers: int) -> GPT2Config:
    """Describe a GPT-2, whose head is its embedding, without dropout."""
    return GPT2Config(
        architectures=["GPT2LMHeadModel"],
        vocab_size=TIED_VOCABULARY,
        n_embd=width,
        n_layer=num_layers,
        n_head=width // 64,
        n_positions=1024,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        dtype="float32",
    )


def describe_shapes(config: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
    """Give the shape of every parameter."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def write_checkpoint(folder: Path, config: PretrainedConfig, *, seed: int = 0) -> int:
    """Write a folder with config.json and float32 weights; give the bytes of its weights."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    shapes = describe_shapes(config)
    specs = [TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()]
    generator = torch.Generator().manual_seed(seed)
    with TensorFileWriter(folder / "model.safetensors", specs) as file:
        for spec in specs:
            for start in range(0, spec.num_elements, _PART):
                count = min(_PART, spec.num_elements - start)
                if len(spec.shape) == 1:
                    values = torch.ones(count)
                else:
                    values = torch.randn(count, generator=generator).mul_(_SCALE)
                file.write(spec.name, start, values)
        file.finish()
    return sum(spec.size_bytes for spec in specs)
