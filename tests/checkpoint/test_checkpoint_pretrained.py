from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_cases import make_run
from transformers import AutoModelForCausalLM, LlamaConfig

from packhorse.checkpoint.header import TensorSpec
from packhorse.checkpoint.save import Piece, copy_model_files, save_checkpoint
from packhorse.checkpoint.tensor_files import TensorFiles
from packhorse.checkpoint.tensor_plan import StateTensor, TensorPlan


@pytest.mark.parametrize("max_shard_bytes", [5_000_000, 20_000])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_checkpoint(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=128,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "source")
    parameters = dict(model.named_parameters())
    ties = {"model.embed_tokens.weight": ("lm_head.weight",)} if tied else {}
    with TensorFiles.open(tmp_path / "source", ties=ties) as files:
        for name, parameter in parameters.items():
            target = torch.empty(parameter.numel())
            files.read_into(name, 0, parameter.numel(), target)
            assert torch.equal(target, parameter.detach().flatten())
        assert ("lm_head.weight" in files) is True
    plan = TensorPlan(
        model=tuple(
            StateTensor(
                spec=TensorSpec(name=name, dtype="float32", shape=tuple(p.shape)),
                parameter=name,
                state="param",
            )
            for name, p in parameters.items()
        ),
        optimizer=(),
    )
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(1.0)
    path = save_checkpoint(
        tmp_path / "run",
        make_run(1),
        plan,
        (
            Piece(parameter=name, state="param", start=0, values=p.detach())
            for name, p in parameters.items()
        ),
        add_files=copy_model_files(tmp_path / "source"),
        max_shard_bytes=max_shard_bytes,
    )
    assert (len(list(path.glob("model*.safetensors"))) > 1) == (max_shard_bytes < 1_000_000)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.config.tie_word_embeddings == tied
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, parameters[name])
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
