from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.optim.norm import (
    SCRATCH_BYTES,
    SEGMENT_ELEMENTS,
    clip_coefficient,
    combine_norm,
    count_segments,
    global_norm,
    segment_squares,
)
from packhorse.program.buffers import NORM_SEGMENT_ELEMENTS


def grads(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(size, generator=generator) * 10.0 ** (i % 5 - 1) for i, size in enumerate(sizes)
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int64), b.view(torch.int64))


def test_segments_are_those_of_the_program() -> None:
    assert SEGMENT_ELEMENTS == NORM_SEGMENT_ELEMENTS
    assert [count_segments(n) for n in (0, 1, 16_384, 16_385)] == [0, 1, 1, 2]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(1, 10 * SEGMENT_ELEMENTS),
    st.lists(st.integers(0, 10).map(lambda n: n * SEGMENT_ELEMENTS), max_size=4),
)
def test_cuts_do_not_change_a_bit(size: int, cuts: list[int]) -> None:
    (grad,) = grads(size)
    whole = segment_squares([grad])
    edges = [0, *sorted(cut for cut in cuts if cut < size), size]
    pieces = [grad[a:b] for a, b in itertools.pairwise(edges)]
    assert same_bits(segment_squares(pieces), whole)
    apart = [segment_squares([piece]) for piece in pieces]
    assert same_bits(combine_norm(apart), combine_norm([whole]))
    assert same_bits(combine_norm([whole]), global_norm([grad]))


def test_threads_and_batches_do_not_change_a_bit() -> None:
    some = grads(1_000_003, 17, 65_536)
    before = torch.get_num_threads()
    norms = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        norms.append(global_norm(some))
        norms.append(combine_norm([segment_squares(some)]))
    torch.set_num_threads(before)
    assert all(same_bits(norm, norms[0]) for norm in norms)


# A sum of n positive terms in float64 is at most n roundings of 2**-53 away from the exact sum.
ROUNDING = SEGMENT_ELEMENTS * 2.0**-53


def test_segment_is_the_square_of_its_float64_norm() -> None:
    (grad,) = grads(SEGMENT_ELEMENTS - 5)
    exact = math.fsum(x * x for x in grad.tolist())
    assert abs(segment_squares([grad]).item() / exact - 1) < ROUNDING
    assert segment_squares([grad]).item() == torch.linalg.vector_norm(grad.double()).item() ** 2


def test_accuracy_against_float64() -> None:
    some = grads(300_001, 16_384, 5)
    # The square of a float32 is exact in float64, and fsum rounds once.
    exact = math.sqrt(math.fsum(x * x for g in some for x in g.tolist()))
    assert abs(global_norm(some).item() / exact - 1) < ROUNDING


def test_none_and_nothing() -> None:
    assert global_norm([None]).item() == 0.0
    assert global_norm([torch.tensor([3.0]), None, torch.tensor([4.0])]).item() == 5.0
    assert segment_squares([]).shape == (0,)


def test_large_values_do_not_overflow_and_nan_shows() -> None:
    assert global_norm([torch.full((2,), 1e38)]).isfinite()
    assert global_norm([torch.tensor([1.0, float("nan")])]).isnan()


def test_many_small_pieces_keep_their_places() -> None:
    some = grads(*([40_000, 3, 16_384, 70_001] * 20))
    together = segment_squares(some)
    apart = torch.cat([segment_squares([grad]) for grad in some])
    assert same_bits(together, apart)


def test_the_scratch_is_small_and_pieces_are_contiguous() -> None:
    assert SCRATCH_BYTES <= 544 * 1024
    with pytest.raises(ValueError, match="not contiguous"):
        segment_squares([torch.zeros(4, 4).T])


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e9])
def test_coefficient_is_torchs(max_norm: float) -> None:
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads(1000, 77)]
    for param, grad in zip(params, grads(1000, 77), strict=True):
        param.grad = grad.clone()
    norm = global_norm(param.grad for param in params)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm.float())
    coefficient = clip_coefficient(norm, max_norm)
    assert coefficient.dtype == torch.float32
    for param, grad in zip(params, grads(1000, 77), strict=True):
        assert torch.equal(grad.mul_(coefficient), param.grad)


def test_close_to_torchs_own_norm() -> None:
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads(100_000, 77)]
    for param, grad in zip(params, grads(100_000, 77), strict=True):
        param.grad = grad
    own = torch.nn.utils.clip_grad_norm_(params, 1e9)
    assert global_norm(grads(100_000, 77)).item() == pytest.approx(own.item(), rel=1e-4)
