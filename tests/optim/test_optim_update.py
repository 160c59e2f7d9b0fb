from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.errors import RecipeError
from packhorse.optim.norm import clip_coefficient, global_norm
from packhorse.optim.optimizers import SGD, AdamW, ParameterGroup
from packhorse.optim.update import merge_pieces, update_shard

SHAPES = ((33, 17), (1,), (5, 7, 3), (640,), (97,), (31, 64))
NUM_STEPS = 4


def align(num_elements: int) -> int:
    return -(-num_elements // 32) * 32


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Flat:
    """Parameters of SHAPES in flat buffers at 32-element offsets, updated in cut pieces."""

    def __init__(self, params: list[torch.Tensor], optimizer: AdamW | SGD) -> None:
        self.starts: list[int] = []
        cursor = 0
        for param in params:
            self.starts.append(cursor)
            cursor += align(param.numel())
        names = ("param", "grad", *optimizer.state_names)
        self.buffers = {name: torch.zeros(cursor) for name in names}
        self.shapes = [param.shape for param in params]
        self.fill("param", params)

    def fill(self, name: str, values: list[torch.Tensor]) -> None:
        for start, value in zip(self.starts, values, strict=True):
            self.buffers[name][start : start + value.numel()] = value.detach().flatten()

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [
            (max(first, start) - start, min(first + shape.numel(), stop) - start)
            for first, shape in zip(self.starts, self.shapes, strict=True)
            if first < stop and start < first + shape.numel()
        ]

    def values(self, name: str) -> list[torch.Tensor]:
        return [
            self.buffers[name][start : start + shape.numel()].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def compare(optimizer: AdamW | SGD, reference: type, cuts: list[int], clip: float | None) -> None:
    generator = torch.Generator().manual_seed(5)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    flat = Flat(params, optimizer)
    arguments = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if isinstance(optimizer, AdamW):
        arguments |= {"betas": optimizer.betas, "eps": optimizer.eps}
    else:
        arguments |= {
            "momentum": optimizer.momentum,
            "dampening": optimizer.dampening,
            "nesterov": optimizer.nesterov,
        }
    plain = reference(params, fused=True, **arguments)
    length = flat.buffers["param"].numel()
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    for step in range(1, NUM_STEPS + 1):
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            # Exact zeros of both signs: a first momentum buffer must keep the sign.
            grad[grad.abs() < 0.1] = -0.0
            param.grad = grad
        flat.fill("grad", [param.grad for param in params])
        coefficient = None
        if clip is not None:
            norm = global_norm(param.grad for param in params)
            coefficient = clip_coefficient(norm, clip)
            torch.nn.utils.clip_grads_with_norm_(params, clip, norm.float())
        rate = optimizer.lr / step
        plain.param_groups[0]["lr"] = rate
        plain.step()
        for start, stop in itertools.pairwise(edges):
            piece = {name: buffer[start:stop] for name, buffer in flat.buffers.items()}
            update_shard(
                optimizer,
                step=step,
                learning_rate=rate,
                param=piece["param"],
                grad=piece["grad"],
                states={name: piece[name] for name in optimizer.state_names},
                pieces=flat.pieces(start, stop),
                clip_coefficient=coefficient,
            )
        for param, value in zip(params, flat.values("param"), strict=True):
            assert same_bits(param.detach(), value)
        for name in optimizer.state_names:
            for param, value in zip(params, flat.values(name), strict=True):
                assert same_bits(plain.state[param][name], value)


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torch(threads: int, weight_decay: float, clip: float | None) -> None:
    optimizer = AdamW(lr=1e-2, weight_decay=weight_decay)
    compare(optimizer, torch.optim.AdamW, [576, 608, 1312], clip)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)],
)
def test_sgd_equals_torch(
    threads: int, weight_decay: float, momentum: float, dampening: float, nesterov: bool
) -> None:
    optimizer = SGD(
        lr=1e-2,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
    )
    compare(optimizer, torch.optim.SGD, [64, 1344], 1.0)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 120).map(lambda n: 32 * n), max_size=6))
def test_any_cut_gives_the_same_bits(cuts: list[int]) -> None:
    compare(AdamW(lr=1e-2, weight_decay=0.1), torch.optim.AdamW, cuts, None)
    compare(SGD(lr=1e-2, momentum=0.9, weight_decay=0.1), torch.optim.SGD, cuts, None)


def test_large_shards_equal_with_threads(threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1_000_003, generator=generator)
    grad = torch.randn(1_000_003, generator=generator)
    param = torch.nn.Parameter(start.clone())
    param.grad = grad.clone()
    torch.optim.AdamW([param], lr=1e-2, fused=True).step()
    for cut in (0, 32 * 7_000, 32 * 31_250):
        value = start.clone()
        states = {name: torch.zeros_like(value) for name in AdamW().state_names}
        for part in (slice(0, cut), slice(cut, None)):
            update_shard(
                AdamW(lr=1e-2),
                step=1,
                learning_rate=1e-2,
                param=value[part],
                grad=grad[part],
                states={name: state[part] for name, state in states.items()},
            )
        assert same_bits(value, param.detach())


def test_compute_copy_is_the_rounded_master() -> None:
    param = torch.linspace(-1, 1, 96)
    copy = torch.zeros(96, dtype=torch.bfloat16)
    update_shard(
        SGD(lr=0.5),
        step=1,
        learning_rate=0.5,
        param=param,
        grad=torch.full((96,), 0.1),
        states={},
        compute_param=copy,
    )
    assert torch.equal(copy, param.bfloat16())
    assert not torch.equal(copy.float(), param)


class LargestResult(TorchDispatchMode):
    """Records the largest new tensor that any operation hands out."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in self.known
            ):
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "optimizer",
    [AdamW(weight_decay=0.1), SGD(momentum=0.9, nesterov=True, weight_decay=0.1), SGD()],
    ids=["adamw", "nesterov", "sgd"],
)
@pytest.mark.parametrize("step", [1, 2])
def test_allocates_nothing_of_the_shards_size(optimizer: AdamW | SGD, step: int) -> None:
    num_elements = 1 << 22
    param, grad = torch.ones(num_elements), torch.ones(num_elements)
    states = {name: torch.zeros(num_elements) for name in optimizer.state_names}
    copy = torch.zeros(num_elements, dtype=torch.bfloat16)
    copy.copy_(param)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with LargestResult([param, grad, copy, *states.values()]) as seen:
        update_shard(
            optimizer,
            step=step,
            learning_rate=1e-3,
            param=param,
            grad=grad,
            states=states,
            clip_coefficient=torch.tensor(0.5),
            compute_param=copy,
        )
    assert seen.largest_bytes <= 64
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < num_elements * 4 // 1024 // 4


def test_full_vectors_are_joined_and_tails_end_a_run() -> None:
    pieces = [(0, 64), (64, 96), (96, 97), (128, 160), (160, 160), (160, 223), (224, 256)]
    assert merge_pieces(pieces) == ((0, 97), (128, 223), (224, 256))
    with pytest.raises(ValueError, match="must start at a multiple of 32, at or after element 64"):
        merge_pieces([(0, 64), (32, 96)])
    with pytest.raises(ValueError, match="multiple of 32"):
        merge_pieces([(31, 64)])


def test_wrong_shards_are_refused() -> None:
    param = torch.zeros(32)
    with pytest.raises(ValueError, match="'exp_avg_sq' is missing; given: exp_avg"):
        update_shard(
            AdamW(),
            step=1,
            learning_rate=1.0,
            param=param,
            grad=param.clone(),
            states={"exp_avg": param.clone()},
        )
    with pytest.raises(ValueError, match=r"grad is torch.float32 of shape \(31,\)"):
        update_shard(SGD(), step=1, learning_rate=1.0, param=param, grad=param[:31], states={})
    with pytest.raises(ValueError, match="step is 0"):
        update_shard(SGD(), step=0, learning_rate=1.0, param=param, grad=param, states={})


def test_wrong_hyperparameters_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"lr is -1, it must be 0 or more"):
        AdamW(lr=-1)
    with pytest.raises(RecipeError, match="betas is"):
        AdamW(betas=(0.9, 1.0))
    with pytest.raises(RecipeError, match="above 0 with nesterov"):
        SGD(nesterov=True)
    with pytest.raises(RecipeError, match="sets 'momentum', which AdamW does not have"):
        AdamW(groups=(ParameterGroup(name="a", patterns=("*",), overrides={"momentum": 1.0}),))
    with pytest.raises(RecipeError, match="other optimizer states"):
        SGD(groups=(ParameterGroup(name="a", patterns=("*",), overrides={"momentum": 0.9}),))
    with pytest.raises(RecipeError, match="cannot be called 'no_decay'"):
        ParameterGroup(name="no_decay", patterns=("*",))
