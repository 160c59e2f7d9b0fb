"""Tracing computes nothing, changes nothing, and says what it cannot trace."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from bench.zoo import ZOO, batch_of, build_model, make_steps
from packhorse.errors import ModelError
from packhorse.graph.export import export_module
from packhorse.graph.trace import trace_blocks


def snapshot(module: nn.Module) -> dict[str, tuple[int, Tensor, bool]]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: (id(tensor), tensor.detach().clone(), tensor.requires_grad)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "weave"])
def test_the_module_is_left_as_it_was(name: str) -> None:
    entry = ZOO[name]
    module = build_model(entry, "frozen")
    config = copy.deepcopy(getattr(module, "config", None))
    batch = batch_of(make_steps(entry, num_steps=1, num_microbatches=1))
    before = snapshot(module)
    random_state = torch.get_rng_state()
    kinds = {n: type(m).forward for n, m in module.named_modules()}
    with torch.no_grad():
        output = module(**batch)
    trace_blocks(export_module(module, batch), rows=2)
    after = snapshot(module)
    assert before.keys() == after.keys()
    for key, (identity, values, wants) in before.items():
        assert after[key][0] == identity, f"{key} is another object"
        assert torch.equal(after[key][1], values)
        assert after[key][2] == wants
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {n: type(m).forward for n, m in module.named_modules()} == kinds
    with torch.no_grad():
        again = module(**batch)
    first = output.loss if config is not None else output
    second = again.loss if config is not None else again
    assert torch.equal(first, second)
    if config is not None:
        assert module.config.to_dict() == config.to_dict()


def test_transformers_is_left_as_it_was() -> None:
    from transformers import masking_utils

    functions = (masking_utils.is_torchdynamo_exporting, masking_utils.find_packed_sequence_indices)
    entry = ZOO["gemma3"]
    batch = batch_of(make_steps(entry, num_steps=1, num_microbatches=1))
    export_module(build_model(entry), batch)
    broken = {**batch, "input_ids": torch.ones(2, 24)}
    with pytest.raises(ModelError):
        export_module(build_model(entry), broken)
    assert functions == (
        masking_utils.is_torchdynamo_exporting, masking_utils.find_packed_sequence_indices
    )  # fmt: skip


def test_parameters_may_be_on_meta() -> None:
    entry = ZOO["weave"]
    batch = batch_of(make_steps(entry, num_steps=1, num_microbatches=1))
    real = trace_blocks(export_module(build_model(entry), batch), rows=2)
    with torch.device("meta"):
        module = entry.build()
    traced = trace_blocks(export_module(module, batch), rows=2)
    assert traced.model == real.model
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_buffer_on_meta_has_no_values() -> None:
    entry = ZOO["llama"]
    with torch.device("meta"):
        module = entry.build()
    batch = batch_of(make_steps(entry, num_steps=1, num_microbatches=1))
    with pytest.raises(ModelError, match="meta device"):
        export_module(module, batch)


def test_one_export_serves_any_number_of_rows() -> None:
    entry = ZOO["gpt2"]
    for example in (1, 2):
        batch = batch_of(make_steps(entry, num_steps=1, num_microbatches=1, rows=example))
        exported = export_module(build_model(entry), batch)
        assert exported.batch_is_dynamic
        for rows in (1, 2, 3):
            model = trace_blocks(exported, rows=rows).model
            assert model.rows == rows
            hidden = model.values["h2"]
            assert hidden.shape == (rows, 24, 32)


class Small(nn.Module):
    """A layer whose forward does something before the loss."""

    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.act = act

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        if self.act is not None:
            h = self.act(self, h)
        return functional.mse_loss(self.second(h), y)


class Branching(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 2 if h.sum() > 0 else h


class ItemCalling(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * float(h.abs().max().item())


class Drawing(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + torch.rand(h.shape)


class NormalDrawing(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + torch.randn_like(h)


class WithoutCounter(nn.Module):
    """Running statistics without the counter that `nn.BatchNorm1d` changes first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, h: Tensor) -> Tensor:
        return functional.batch_norm(h, self.mean, self.variance, training=True)


class NumpyUsing(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + torch.from_numpy(np.tanh(h.detach().numpy()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        return self.cells(h)[0]


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.strange = inner
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.second(self.strange(self.layer(x))), y)


class InputChanging(Small):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x, y)


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x) - y}


BATCH = {"x": torch.ones(2, 8), "y": torch.zeros(2, 8)}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Holder(Branching()), ("Branching", "strange")),
        (Holder(ItemCalling()), ("ItemCalling", "strange")),
        (Holder(NumpyUsing()), ("NumpyUsing", "strange")),
        (Holder(nn.BatchNorm1d(8)), ("strange", "running statistics")),
        (Holder(WithoutCounter()), ("strange", "strange.mean", "running statistics")),
        (Holder(Drawing()), ("rand", "strange")),
        (Holder(NormalDrawing()), ("randn", "strange")),
        (Holder(Recurrent()), ("lstm", "strange.cells", "LSTMCell")),
        (InputChanging(), ("changes the input 'x'",)),
        (NoLoss(), ("NoLoss", "loss")),
    ],
    ids=[
        "branch",
        "item",
        "numpy",
        "batch norm",
        "bare batch norm",
        "rand",
        "randn",
        "lstm",
        "in place",
        "no loss",
    ],
)
def test_an_untraceable_module_is_named(
    module: nn.Module, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(module)
    with pytest.raises(ModelError) as caught:
        trace_blocks(export_module(module, BATCH), rows=2)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert caught.value.fix
    assert len(message.splitlines()) < 30
    assert capfd.readouterr().err == ""
    after = snapshot(module)
    assert {n: before[n][0] for n in before} == {n: after[n][0] for n in after}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_parameters_of_a_dtype_that_would_be_lost_are_refused(dtype: torch.dtype) -> None:
    module = Small()
    values = torch.ones(3, dtype=dtype)
    module.scale = nn.Parameter(values, requires_grad=dtype.is_floating_point)
    with pytest.raises(ModelError, match=r"parameter scale is (float64|int64|complex64)"):
        export_module(module, BATCH)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
def test_parameters_without_elements_are_refused(shape: tuple[int, ...]) -> None:
    module = Small()
    module.register_parameter("empty", nn.Parameter(torch.zeros(shape)))
    with pytest.raises(ModelError, match=r"parameter empty has shape \[.*\], so no elements"):
        export_module(module, BATCH)


def test_a_loss_that_ignores_the_number_of_items_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(ModelError, match="loss of T5ForConditionalGeneration ignores num_items"):
        export_module(
            transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}
        )


def test_a_forward_that_misses_an_argument_says_so() -> None:
    with pytest.raises(ModelError) as caught:
        export_module(Small(), {"x": BATCH["x"]})
    assert "Small" in str(caught.value)
    assert "'y'" in str(caught.value)
