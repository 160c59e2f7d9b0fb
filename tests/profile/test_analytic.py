from dataclasses import replace

import pytest

from packhorse.errors import InputError
from packhorse.machine.spec import Heap, Machine, MatmulPoint
from packhorse.profile.analytic import estimate_profile, estimate_rate, find_slowdown
from tests.support.models import make_model

MACHINE = Machine(
    name="toy",
    source="hand",
    fingerprint="",
    measured_at="",
    device="cpu",
    num_cores=2,
    num_threads=2,
    bf16_native=False,
    tiers=(),
    links=(),
    matmul=(
        MatmulPoint(dtype="float32", size=16, flops_per_s=1e9),
        MatmulPoint(dtype="float32", size=64, flops_per_s=3e9),
        MatmulPoint(dtype="float32", size=256, flops_per_s=4e9),
    ),
    memory_bytes_per_s=1e9,
    updates=(),
    heap=Heap(map_cost=0.0, keep_slack=0.0),
)


@pytest.mark.parametrize(
    ("size", "flops_per_s"),
    [(1, 1e9), (16, 1e9), (32, 2e9), (64, 3e9), (128, 3.5e9), (256, 4e9), (9999, 4e9)],
)
def test_the_rate_is_read_off_the_curve(size, flops_per_s):
    assert estimate_rate(MACHINE, "float32", size) == pytest.approx(flops_per_s, rel=1e-12)


def test_a_body_takes_its_flops_plus_its_bytes():
    # A layer's matrix is 32 x 32 and there are 32 tokens: a cube of 32, at 2 GFLOP/s.
    model = make_model(num_layers=1, hidden=32, rows=2, length=16)
    layer = model.blocks[1].body
    body = model.bodies[layer]
    time = estimate_profile(model, MACHINE).bodies[layer]
    assert time.forward_ns == pytest.approx(body.forward_flops / 2 + body.forward_bytes, abs=1)
    assert time.discard_ns == time.forward_ns
    assert time.backward_ns == pytest.approx(body.backward_flops / 2 + body.backward_bytes, abs=1)


def test_every_body_is_estimated_and_frozen_ones_have_no_backward():
    model = make_model(num_layers=3, frozen=("embed", "layers.1"))
    profile = estimate_profile(model, MACHINE)
    assert set(profile.bodies) == set(model.bodies)
    assert (profile.model, profile.rows, profile.length) == (model.fingerprint, 1, 8)
    assert profile.source == "analytic"
    assert profile.bodies[model.blocks[0].body].backward_ns == 0
    assert profile.bodies[model.blocks[-1].body].backward_ns > 0


def test_a_body_without_matrices_is_estimated_too():
    model = make_model(num_layers=1)
    norm = model.blocks[1].parameters[0]
    blocks = [replace(block, parameters=(norm,)) for block in model.blocks]
    profile = estimate_profile(replace(model, blocks=tuple(blocks)), MACHINE)
    assert all(time.forward_ns > 0 for time in profile.bodies.values())


def test_blocks_that_took_longer_than_the_rates_give_are_slowed_down_by_the_ratio():
    model = make_model(num_layers=3)
    alone = estimate_profile(model, MACHINE)
    slow = {
        body: replace(time, forward_ns=time.forward_ns * 7, backward_ns=time.backward_ns * 7)
        for body, time in alone.bodies.items()
    }
    assert find_slowdown(replace(alone, bodies=slow), model, MACHINE) == pytest.approx(7)
    assert find_slowdown(alone, model, MACHINE) == 1
    assert find_slowdown(alone, model, replace(MACHINE, matmul=())) == 1


def test_a_missing_curve_is_an_error_that_names_what_is_there():
    with pytest.raises(InputError) as caught:
        estimate_profile(make_model(dtype="bfloat16"), MACHINE)
    assert str(caught.value) == (
        "the machine has no matmul curve for bfloat16; it has: float32\n"
        "  where: machine toy\n"
        "  fix:   probe the machine again, or add points of that dtype to `matmul` of its file"
    )
