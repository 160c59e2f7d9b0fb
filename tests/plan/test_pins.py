"""Pins from a recipe: what they say about blocks and chunks, and what is refused."""

from __future__ import annotations

import pytest

from packhorse.errors import RecipeError
from packhorse.plan.pins import Pins, read_pins
from packhorse.plan.spec import Piece
from tests.support.models import make_model


def pieces(*names):
    return tuple(Piece(parameter=name, start=0, stop=8) for name in names)


def test_nothing_pinned():
    pins = read_pins({})
    assert pins == Pins()
    assert pins.names == ()
    assert pins.activation_of("layers.1") is None
    assert pins.tier_of("optimizer", pieces("a")) is None


@pytest.mark.parametrize(
    ("value", "first", "second"),
    [
        ("all", "recompute", "recompute"),
        ("none", "keep", "keep"),
        (["layers.1"], "recompute", "keep"),
        (["layers.*"], "recompute", "recompute"),
    ],
)
def test_recompute(value, first, second):
    pins = read_pins({"recompute": value})
    assert pins.activation_of("layers.1") == first
    assert pins.activation_of("layers.2") == second
    assert pins.names == ("recompute",)


def test_tiers_by_pattern_first_fit_wins():
    pins = read_pins({"optimizer": {"embed.*": "device", "*": "disk"}, "parameters": "disk"})
    assert pins.tier_of("optimizer", pieces("embed.weight")) == "device"
    assert pins.tier_of("optimizer", pieces("layers.1.proj.weight")) == "disk"
    assert pins.tier_of("parameters", pieces("embed.weight")) == "disk"
    assert pins.tier_of("gradients", pieces("embed.weight")) is None
    assert pins.names == ("parameters", "optimizer")


def test_where_chunks_are_updated():
    pins = read_pins({"update": {"embed.*": "device", "*": "host"}, "stride": 0})
    assert pins.tier_of("update", pieces("embed.weight")) == "device"
    assert pins.tier_of("update", pieces("layers.1.proj.weight")) == "host"
    assert pins.stride == 0
    assert pins.names == ("update", "stride")


def test_scalars_and_numerics():
    pins = read_pins(
        {
            "heap": "map",
            "chunk_bytes": "16MiB",
            "microbatch_rows": 4,
            "loss_chunk_tokens": "whole",
            "numerics": {"tied_sum": "per_step", "num_threads": 2},
        }
    )
    assert pins.heap == "map"
    assert pins.chunk_bytes == 16 * 1024**2
    assert pins.microbatch_rows == 4
    assert pins.loss_chunk_tokens == "whole"
    assert (pins.tied_sum, pins.num_threads) == ("per_step", 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"recompte": "all"}, ["'recompte'", "nearest choice is 'recompute'"]),
        ({"numerics": {"tied": 1}}, ["'tied'", "'tied_sum'", "plan.numerics.tied"]),
        ({"numerics": 3}, ["numerics is pinned to 3"]),
        ({"tied_sum": "per_step", "numerics": {"tied_sum": "per_microbatch"}}, ["pinned twice"]),
        ({"heap": "keeep"}, ["'keeep'", "keep, map"]),
        ({"optimizer": "dsk"}, ["'dsk'", "device, host, disk"]),
        ({"optimizer": {"a.*": "ram"}}, ["optimizer.a.*", "'ram'"]),
        ({"update": "disk"}, ["update is pinned to 'disk'", "one of device, host"]),
        ({"stride": -1}, ["stride is pinned to -1", "at least 0"]),
        ({"recompute": "some"}, ["'some'", "list of block names"]),
        ({"recompute": [1]}, ["recompute is pinned to 1"]),
        ({"microbatch_rows": 0}, ["0", "at least 1"]),
        ({"chunk_bytes": "big"}, ["'big'", "16MiB"]),
        ({"chunk_bytes": 0}, ["above 0"]),
        ({"loss_chunk_tokens": "half"}, ["'half'", "whole"]),
        ({"schedule": "zb-w"}, ["'zb-w'", "file.py:function"]),
    ],
)
def test_refused(content, words):
    with pytest.raises(RecipeError) as caught:
        read_pins(content)
    for word in [*words, "plan."]:
        assert word in str(caught.value)


def test_a_contradiction_inside_a_chunk():
    pins = read_pins({"optimizer": {"a*": "disk", "*": "device"}})
    with pytest.raises(RecipeError, match="a and b share a chunk"):
        pins.tier_of("optimizer", pieces("a", "b"))


def test_patterns_must_fit_something():
    model = make_model()
    read_pins({"recompute": ["layers.*"], "optimizer": {"embed.*": "disk"}}).check(model)
    with pytest.raises(RecipeError) as caught:
        read_pins({"recompute": ["layer.1"]}).check(model)
    assert "fits no block" in str(caught.value)
    assert "'layers.1'" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        read_pins({"optimizer": {"embed.wieght": "disk"}}).check(model)
    assert "'embed.weight'" in str(caught.value)


def test_activations_may_be_pinned_by_the_name_in_plan_files():
    assert read_pins({"activations": "recompute"}) == read_pins({"recompute": "all"})
    assert read_pins({"activations": "keep"}) == read_pins({"recompute": "none"})
    with pytest.raises(RecipeError, match="one choice"):
        read_pins({"activations": "keep", "recompute": "all"})


def test_blocks_may_offload_by_pattern_and_the_rest_is_free():
    pins = read_pins(
        {"activations": {"layers.1": "keep", "layers.*": "offload"}, "offload": "host"}
    )
    assert pins.activation_of("layers.1") == "keep"
    assert pins.activation_of("layers.2") == "offload"
    assert pins.activation_of("embed") is None
    assert pins.offload == "host"
    assert pins.names == ("activations", "offload")
    assert read_pins({"activations": "offload"}).activation_of("head") == "offload"
    with pytest.raises(RecipeError, match="one choice"):
        read_pins({"activations": {"layers.1": "offload"}, "recompute": "all"})
    with pytest.raises(RecipeError, match="keep, recompute, offload"):
        read_pins({"activations": {"layers.1": "swap"}})
    with pytest.raises(RecipeError, match="keep, recompute, offload"):
        read_pins({"activations": "swap"})
    with pytest.raises(RecipeError, match="one of host, disk"):
        read_pins({"offload": "device"})
    with pytest.raises(RecipeError, match=r"nearest block is 'layers\.1'"):
        read_pins({"activations": {"layer.1": "offload"}}).check(make_model())


def test_several_workers_are_refused_where_there_is_one():
    assert read_pins({"num_workers": 1}).num_workers == 1
    with pytest.raises(RecipeError, match="one process is one worker"):
        read_pins({"numerics": {"num_workers": 2}})
