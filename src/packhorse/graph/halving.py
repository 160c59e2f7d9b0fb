"""Give a traced model the halves of its backwards, for schedules that run them apart.

In: a `Traced`. Out: the same with the code of both halves of every body, and what they cost in its
model. Whoever asks pays: a trace without halves takes no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from packhorse.graph.code import BackwardCode, BodyCode, HalvesCode
from packhorse.graph.flops import count_flops
from packhorse.graph.halves import cut_backward
from packhorse.graph.liveness import moved_bytes
from packhorse.graph.trace import Traced
from packhorse.model.spec import BodyId, Half, Halves


def halve_backwards(traced: Traced) -> Traced:
    """Cut the backward of every body."""
    halves: dict[BodyId, HalvesCode] = {}
    for body, code in traced.code.items():
        found = cut_backward(code)
        if found is not None:
            halves[body] = found
    bodies = {
        body: replace(spec, halves=_describe(traced.code[body], halves[body]))
        if body in halves
        else spec
        for body, spec in traced.model.bodies.items()
    }
    return replace(traced, model=replace(traced.model, bodies=bodies), halves=halves)


def _describe(code: BodyCode, halves: HalvesCode) -> Halves:
    renumber = {old: new for new, old in enumerate(code.used_inputs)}
    return Halves(
        stash_bytes=halves.stash_bytes,
        input=_describe_half(halves.input, renumber, halves.input_workspace_bytes),
        weight=_describe_half(halves.weight, renumber, halves.weight_workspace_bytes),
    )


def _describe_half(
    half: BackwardCode | None, renumber: Mapping[int, int], workspace_bytes: int
) -> Half | None:
    if half is None:
        return None
    graph = half.bare.graph.graph
    return Half(
        compute_flops=count_flops(graph),
        moved_bytes=moved_bytes(graph),
        workspace_bytes=workspace_bytes,
        parameters=half.parameters,
        inputs=tuple(renumber[index] for index in half.inputs),
        outputs=half.outputs,
        tangents=half.tangents,
    )
