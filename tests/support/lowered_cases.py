"""Random models with plans that can be lowered, for property tests of the torch-free half."""

from __future__ import annotations

from hypothesis import strategies as st
from models import make_model, make_plan

TIERS = st.lists(st.sampled_from(["device", "host", "disk"]), min_size=1, max_size=4)
FROZEN = ((), ("embed",), ("embed", "layers.1"), ("layers",), ("head", "layers.2"), ("shared",))


@st.composite
def models(draw, *, halved=False):
    """Draw a small model: tied, skipping, frozen, sometimes with parameters that are cut."""
    num_layers = draw(st.integers(1, 4))
    layers = st.integers(1, num_layers)
    hidden, vocabulary = draw(st.sampled_from([(32, 64), (1024, 1200)]))
    tied_head = draw(st.booleans())
    frozen = draw(st.sampled_from(FROZEN))
    if tied_head and num_layers == 1 and frozen == ("embed", "layers.1"):
        frozen = ("embed",)  # else nothing is left to train
    return make_model(
        num_layers=num_layers,
        hidden=hidden,
        vocabulary=vocabulary,
        tied_head=tied_head,
        shared_layers=draw(st.sets(layers, max_size=3)),
        skips=draw(st.lists(st.tuples(st.integers(0, num_layers), st.integers(1, num_layers + 1)))),
        frozen=frozen,
        saves=draw(st.booleans()),
        halved=halved,
    )


@st.composite
def cases(draw):
    """Draw a model and a plan for it, with every mix of tiers, activations and heaps."""
    model = draw(models())
    return model, draw(plans(model))


@st.composite
def plans(draw, model):
    """Draw a plan for a model."""
    master = draw(st.booleans())
    order = draw(st.sampled_from(["depth_first", "layered"]))
    tied_sums = ["per_step"] if order == "layered" else ["per_microbatch", "per_step"]
    return make_plan(
        model,
        chunk_bytes=draw(st.sampled_from([4096, 8192, 1 << 21, 1 << 22])),
        parameters=draw(TIERS),
        gradients=draw(TIERS),
        optimizer=draw(TIERS),
        update=draw(st.lists(st.sampled_from(["device", "host"]), min_size=1, max_size=3)),
        stride=draw(st.integers(0, 4)),
        activations=draw(
            st.lists(st.sampled_from(["keep", "recompute", "offload"]), min_size=1, max_size=3)
        ),
        num_microbatches=draw(st.integers(1, 3)),
        compute_dtype="bfloat16" if master else "float32",
        clips=draw(st.booleans()),
        states=draw(st.sampled_from([("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ()])),
        heap=draw(st.sampled_from(["map", "keep"])),
        heap_slack=0.25,
        order=order,
        boundaries=draw(st.sampled_from(["device", "host", "disk"])),
        offload=draw(st.sampled_from(["host", "disk"])),
        tied_sum=draw(st.sampled_from(tied_sums)),
    )
