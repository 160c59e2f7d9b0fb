"""Blocks are found at the narrowest cuts, whatever modules are called; equal ones are shared."""

from __future__ import annotations

import pytest
import torch
from subjects import find_subject
from torch import Tensor, nn
from torch.nn import functional
from transformers import OPTConfig, OPTForCausalLM

from bench.planned import PLACES, trace_subject, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.zoo import LAYERS, LENGTH, VOCABULARY, ZOO, batch_of, build_model, make_steps
from packhorse.graph.export import export_module
from packhorse.graph.liveness import storages_of
from packhorse.graph.trace import Traced, trace_blocks
from packhorse.optim.optimizers import AdamW

WIDTH_BYTES = 2 * LENGTH * 32 * 4  # two rows of hidden states of width 32, float32


def layer_blocks(traced: Traced) -> list[int]:
    return [i for i, block in enumerate(traced.model.blocks) if ".layers." in block.name]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral"])
def test_each_decoder_layer_is_a_block(name: str) -> None:
    model = find_subject(name).traced.model
    names = [block.name for block in model.blocks]
    layers = [f"model.layers.{index}" for index in range(LAYERS)]
    assert names == ["model.embed_tokens", *layers, "head"]


@pytest.mark.parametrize("name", list(ZOO))
def test_cuts_are_as_narrow_as_the_hidden_state(name: str) -> None:
    """One hidden state crosses each cut; the weave's skips make two or three cross some."""
    model = find_subject(name).traced.model
    for block in model.blocks[:-1]:
        crossing = [
            value
            for value in model.values.values()
            if value.producer is not None
            and value.producer <= block.id
            and any(user > block.id for user in value.consumers)
        ]
        assert {value.size_bytes for value in crossing} <= {WIDTH_BYTES, WIDTH_BYTES // 2}
        assert len(crossing) <= (4 if name == "weave" else 2)


def test_every_parameter_is_used_by_the_blocks_that_list_it() -> None:
    for name in ZOO:
        subject = find_subject(name)
        model = subject.traced.model
        assert set(model.parameters) == set(subject.weights)
        for parameter in model.parameters.values():
            users = tuple(b.id for b in model.blocks if parameter.name in b.parameters)
            assert users == parameter.blocks != ()


def test_equal_layers_share_a_body() -> None:
    llama = find_subject("llama").traced
    assert len({llama.model.blocks[i].body for i in layer_blocks(llama)}) == 1
    gemma = find_subject("gemma3").traced
    bodies = [gemma.model.blocks[i].body for i in layer_blocks(gemma)]
    assert bodies == [bodies[0], bodies[1]] * (LAYERS // 2), "sliding and full layers alternate"
    assert bodies[0] != bodies[1]


def test_tied_names_are_one_parameter() -> None:
    llama = find_subject("llama").traced.model
    embedding = llama.parameters["model.embed_tokens.weight"]
    assert embedding.aliases == ("lm_head.weight",)
    assert embedding.blocks == (0, len(llama.blocks) - 1)
    assert "lm_head.weight" not in llama.parameters
    weave = find_subject("weave").traced.model
    assert len(weave.parameters["shared.weight"].blocks) == 4
    assert len(weave.parameters["shared.weight"].aliases) == 4
    assert weave.parameters["embed.weight"].aliases == ("head.weight",)


def test_skips_are_values_with_several_consumers() -> None:
    model = find_subject("weave").traced.model
    consumers = {value.id: value.consumers for value in model.values.values() if value.needs_grad}
    assert consumers["h1"] == (2, 4, 6)
    assert consumers["h2"] == (3, 5)
    assert sorted(map(len, consumers.values())) == [1, 1, 1, 1, 2, 3]


def test_frozen_parameters_have_no_backward_below_them() -> None:
    model = find_subject("llama", "frozen").traced.model
    assert [block.has_backward for block in model.blocks] == [False, False, True, True, True, True]
    assert not model.parameters["model.embed_tokens.weight"].trainable
    assert not model.values["h1"].needs_grad
    assert model.values["h2"].needs_grad


def test_fingerprint_ignores_rows_and_what_is_frozen() -> None:
    everything = find_subject("llama").traced.model.fingerprint
    assert find_subject("llama", "frozen").traced.model.fingerprint == everything
    other_rows = trace_blocks(find_subject("llama").exported, rows=1).model
    assert other_rows.fingerprint == everything
    assert other_rows.rows == 1
    assert find_subject("qwen3").traced.model.fingerprint != everything


class Bare(nn.Module):
    """No submodule, no embedding: six matrices in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(24, 24) / 5 for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return functional.mse_loss(x, y)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.layer(x), y)


class Positions(nn.Module):
    """Positions, a mask and a ramp made inside the forward from sizes of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.positions = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 40)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        rows, length = input_ids.shape
        places = torch.arange(length).expand(rows, -1)
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.embed(input_ids) + self.positions(places) * (places / length).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Nested(nn.Module):
    """Dictionaries, a shared submodule called under two names, a value used by every block."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 12))
        self.parts = nn.ModuleDict({"one": inner, "two": nn.Linear(12, 12), "three": inner})
        self.gate = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start = x * self.gate
        state = {"x": start}
        for part in self.parts.values():
            state["x"] = part(state["x"]) + start
        return (state["x"] - y).square().mean()


def floats(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "x": torch.randn(shape, generator=generator), "y": torch.randn(shape, generator=generator)
    }  # fmt: skip


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "input_ids": torch.randint(0, 40, (3, 9), generator=generator),
        "labels": torch.randint(0, 40, (3, 9), generator=generator),
    }


@pytest.mark.parametrize(
    ("build", "batch", "num_blocks"),
    [
        (Bare, floats(3, 24), None),
        (OneLayer, floats(3, 8), None),
        (Positions, tokens(), None),
        (Nested, floats(3, 12), None),
    ],
    ids=["bare", "one layer", "positions", "nested"],
)
def test_any_module_has_the_bits_of_the_plain_loop(build, batch, num_blocks, tmp_path) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(2)
        return build()

    optimizer = AdamW(lr=1e-2)
    subject = trace_subject(seeded(), batch, optimizer)
    step = tuple({**batch, "denominator": torch.tensor(2.0)} for _ in range(2))
    plain = train_plainly(seeded(), optimizer, [step] * 2, max_grad_norm=1.0)
    ways = PLACES["all on disk"]
    curve = train_by_plan(subject, ways, [step] * 2, max_grad_norm=1.0, scratch=tmp_path)
    assert find_differences(plain, curve) == ()


def test_a_module_without_structure_is_cut_all_the_same() -> None:
    traced = trace_subject(Bare(), floats(3, 24), AdamW()).traced
    assert len(traced.model.blocks) >= 3
    assert sum(len(block.parameters) for block in traced.model.blocks) == 6


def test_a_loss_that_is_no_scalar_or_knows_no_parameter_is_refused() -> None:
    from packhorse.errors import ModelError

    class Whole(OneLayer):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x) - y

    class Free(OneLayer):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return functional.mse_loss(x, y)

    for module, words in ((Whole(), "shape"), (Free(), "does not depend on any parameter")):
        with pytest.raises(ModelError, match=words):
            trace_blocks(export_module(module, floats(3, 8)), rows=3)


def test_other_rows_are_refused_where_the_batch_is_fixed() -> None:
    from dataclasses import replace

    from packhorse.errors import ModelError

    exported = replace(find_subject("weave").exported, batch_is_dynamic=False)
    with pytest.raises(ModelError, match="traced for 2 rows"):
        trace_blocks(exported, rows=3)


def test_vocabulary_and_chunked_loss_are_known() -> None:
    for name in ("llama", "gpt2", "qwen3", "mixtral"):
        traced = find_subject(name).traced
        assert traced.loss_can_be_chunked, name
        assert traced.vocabulary == VOCABULARY


def test_build_is_seeded() -> None:
    one, other = (dict(build_model(ZOO["llama"]).named_parameters()) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = make_steps(ZOO["llama"], num_steps=1, num_microbatches=1)
    assert batch_of(steps)["input_ids"].shape == (2, LENGTH)


def test_gradients_of_inputs_share_no_bytes() -> None:
    # OPT adds two embeddings: autograd hands both blocks the same gradient tensor.
    config = OPTConfig(
        vocab_size=61, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=1,
    )  # fmt: skip
    tokens = torch.zeros((2, 9), dtype=torch.long)
    exported = export_module(OPTForCausalLM(config), {"input_ids": tokens, "labels": tokens})
    traced = trace_blocks(exported, rows=2)
    for code in traced.code.values():
        assert code.backward is not None
        for variant in (code.backward.first, code.backward.later):
            nodes = list(variant.graph.graph.nodes)
            given = list(nodes[-1].args[0])[: len(code.backward.input_grads)]
            held = {
                k for n in nodes if n.op == "placeholder" for k, _ in storages_of(n.meta["val"])
            }
            keys = [key for node in given for key, _ in storages_of(node.meta["val"])]
            assert len(set(keys)) == len(keys)
            assert not set(keys) & held
