"""How each rank plans: the ways that tests of several ranks go through."""

from __future__ import annotations

from bench.planned import Ways

WAYS = {
    "kept": Ways(tied_sum="per_step"),
    "recomputed": Ways(tied_sum="per_step", activations=("recompute",)),
    "on disk": Ways(
        tied_sum="per_step",
        parameters=("disk",),
        gradients=("disk",),
        optimizer=("disk",),
        activations=("keep", "recompute"),
    ),
    "offloaded": Ways(tied_sum="per_step", optimizer=("disk",), activations=("offload", "keep")),
}
