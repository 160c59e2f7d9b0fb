"""Modules without weights equal built ones; weights arrive from files and from seeds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny_runs import write_model
from torch import Tensor, nn

from packhorse.errors import FileFormatError, ModelError, RecipeError
from packhorse.trainer.model_sources import find_model
from packhorse.trainer.modules import build_module, find_vocabulary, freeze_parameters
from packhorse.trainer.weight_files import FolderWeights
from packhorse.trainer.weights import RandomWeights, WeightSource

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "rope": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LONG_ROPE),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32,
        bos_token_id=1, eos_token_id=1,
    ),
    "neox": lambda: transformers.GPTNeoXConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, bos_token_id=1, eos_token_id=1,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip


def save(folder: Path, name: str) -> nn.Module:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def read(source: WeightSource, name: str, shape: torch.Size) -> Tensor:
    """Read in two ranges, as chunks do."""
    values = torch.empty(shape.numel())
    middle = shape.numel() // 3
    source.read_into(name, middle, shape.numel(), values[middle:])
    source.read_into(name, 0, middle, values[:middle])
    return values.view(shape)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_module_without_weights_is_the_built_one_in_all_else(tmp_path: Path, name: str):
    built = save(tmp_path, name)
    module = build_module(find_model(str(tmp_path)))
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.training
    shapes = {n: p.shape for n, p in built.named_parameters()}
    assert {n: p.shape for n, p in module.named_parameters()} == shapes
    theirs = dict(built.named_buffers())
    ours = dict(module.named_buffers())
    assert list(ours) == list(theirs)
    for key, buffer in theirs.items():
        assert torch.equal(ours[key], buffer), key
        assert ours[key].dtype == buffer.dtype, key
    names = {n for n, _ in built.named_parameters(remove_duplicate=False)}
    assert {n for n, _ in module.named_parameters(remove_duplicate=False)} == names
    assert find_vocabulary(module) == 64
    source = FolderWeights(module, tmp_path)
    for key, parameter in built.named_parameters():
        assert torch.equal(read(source, key, parameter.shape), parameter), key
        assert source.dtypes[key] == "float32"
    source.close()


def test_experts_are_merged_from_files_that_hold_them_one_by_one(tmp_path: Path):
    save(tmp_path, "mixtral")
    names = json.dumps(list_tensors(tmp_path))
    assert "experts.0.w1" in names
    assert "gate_up_proj" not in names


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_random_weights_are_the_models_own_initialisation(tmp_path: Path, name: str):
    built = save(tmp_path, name)
    module = build_module(find_model(str(tmp_path / "config.json")))
    state = torch.random.get_rng_state()
    parameters = dict(built.named_parameters())
    source, again = RandomWeights(module, seed=5), RandomWeights(module, seed=5)
    backwards = {n: read(again, n, p.shape) for n, p in reversed(parameters.items())}
    other = RandomWeights(module, seed=6)
    for key, parameter in parameters.items():
        values = read(source, key, parameter.shape)
        assert torch.equal(values, backwards[key]), key
        if parameter.std() == 0:
            assert torch.equal(values, parameter), key
        else:
            torch.testing.assert_close(values.std(), parameter.std(), rtol=0.15, atol=0)
            assert not torch.equal(values, read(other, key, parameter.shape))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_freezing_names_what_it_does_not_find(tmp_path: Path):
    save(tmp_path, "llama")
    module = build_module(find_model(str(tmp_path)))
    frozen = freeze_parameters(module, ["lm_head.*", "*.layers.0.mlp.*"])
    assert frozen[0] == "model.embed_tokens.weight", "a tied name freezes the parameter"
    assert sum(not p.requires_grad for p in module.parameters()) == 4
    with pytest.raises(RecipeError, match="fits no parameter") as caught:
        freeze_parameters(module, ["model.embed_token.weight"])
    assert "model.embed_tokens.weight" in str(caught.value)
    with pytest.raises(RecipeError, match="nothing to train"):
        freeze_parameters(module, ["*"])


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path):
    save(tmp_path, "llama")
    source = find_model(str(tmp_path))
    config = json.loads(source.config.read_text())
    source.config.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"no tensor for the parameter 'model.layers.2"):
        FolderWeights(build_module(find_model(str(tmp_path))), tmp_path)
    source.config.write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(FileFormatError, match=r"shape \[48, 32\], the model needs \[64, 32\]"):
        FolderWeights(build_module(find_model(str(tmp_path))), tmp_path)


def test_models_that_cannot_be_trained_are_refused(tmp_path: Path):
    folder = write_model(tmp_path / "model")
    with pytest.raises(ModelError, match="there is no model at"):
        find_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="neither a local folder nor a model"):
        find_model("nobody/nothing-of-this-name")
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"no model.safetensors") as caught:
        find_model(str(tmp_path / "bare"))
    assert "for random weights, name" in str(caught.value)
    config = folder / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match=r"quantised \(gptq\)"):
        find_model(str(folder))
    config.write_text(json.dumps({**content, "model_type": "no_such_type"}))
    with pytest.raises(ModelError, match="cannot build this model"):
        build_module(find_model(str(folder)))


def list_tensors(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        return list(file.keys())


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "model")
    assert find_model("~/model").folder == tmp_path / "model"
    with pytest.raises(ModelError, match="there is no model at ~/other"):
        find_model("~/other")
