"""What tracing a block gives: graphs that run without autograd, and what they cost.

In: nothing; these are the values that `joint` and `partition` make and the runtime reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from packhorse.graph.interpret import Noise
from packhorse.graph.liveness import HeapUse


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyArguments:
    """Fake inputs of a block, in the order of its placeholders."""

    parameters: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    num_step_inputs: int

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return (*self.parameters, *self.constants, *self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFlow:
    """Which gradients reach a block and where its parameters' gradients go.

    `tangents`: per output, whether later blocks send a gradient. `input_roots` and
    `parameter_roots`: whether later blocks already have a gradient of the same input or tied
    parameter. `sinks`: per parameter, whether this block adds the gradient into its chunk
    (otherwise it hands the running sum on). `loss` is the index of the loss output, if it is here.
    """

    tangents: tuple[bool, ...]
    input_roots: tuple[bool, ...]
    parameter_roots: tuple[bool, ...]
    sinks: tuple[bool, ...]
    loss: int | None


GradsOf = Sequence[tuple[str, int]]
"""For each gradient that a graph gives: ("parameter" | "input", index)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BareBackward:
    """A backward that returns every gradient; `flow` and `arguments` are those of its block."""

    graph: fx.GraphModule
    grads_of: GradsOf
    arguments: BodyArguments
    flow: GradientFlow


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardVariant:
    """One form of a backward.

    The graph's arguments are those that `BackwardCode` names, then the roots of
    `parameter_roots`, then the sinks of `sinks`: the gradients' places in chunk memory. It
    returns the gradients of the code's `input_grads`, then the running sums of `parameter_grads`.
    """

    graph: fx.GraphModule
    parameter_roots: tuple[int, ...]
    sinks: tuple[int, ...]
    parameter_grads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCode:
    """The backward of a body.

    Arguments of all variants begin with the saved values, then the named subsets of parameters,
    constants, inputs and outputs, the tangents that arrive, the input roots. `first` runs in
    micro-batch 0: it writes gradients into their chunks, and where later blocks have begun a tied
    parameter's gradient there, adds to it. `later` runs in the others: it adds to the chunks, and
    hands on the running sum of a tied parameter until its first user adds that. `apart_first` and
    `apart_later` are the same for a block that sums its own gradients of tied parameters. All are
    made from `bare`.

    A half of a backward is one too. An input half has no sinks, so its variants are the same; it
    returns the stash behind the gradients. The arguments of a weight half begin with the stash.
    """

    bare: BareBackward
    first: BackwardVariant
    later: BackwardVariant
    apart_first: BackwardVariant
    apart_later: BackwardVariant
    parameters: tuple[int, ...]
    constants: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tangents: tuple[int, ...]
    input_roots: tuple[int, ...]
    input_grads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCosts:
    """Bytes and FLOPs of a body, as `model.spec.Body` means them.

    `forward_heap` and `backward_heap` are what a run takes of the heap: workspace, and what it
    leaves.
    """

    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    forward_workspace_bytes: int
    discard_workspace_bytes: int
    backward_workspace_bytes: int
    first_backward_workspace_bytes: int
    forward_heap: HeapUse
    backward_heap: HeapUse


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesCode:
    """A backward cut in two, as `model.spec.Halves` means it.

    `kept_bytes` is the stash and whatever else of the block has to stay until the weight half: the
    values and gradients that it reads by name. `input_heap` and `weight_heap` are meant as in
    `BodyCosts`.
    """

    input: BackwardCode | None
    weight: BackwardCode | None
    stash_bytes: int
    kept_bytes: int
    input_workspace_bytes: int
    weight_workspace_bytes: int
    input_heap: HeapUse
    weight_heap: HeapUse


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLayout:
    """How saved values lie in storages of their own.

    `places` gives per value the index of its storage, None for a view of an argument or an output;
    `sizes_bytes` the size of each storage. They add up to the body's `saved_bytes`.
    """

    places: tuple[int | None, ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCode:
    """What runs: `keep` returns outputs then saved values, `discard` and `evaluate` outputs only.

    Their arguments are parameters, constants, inputs, noise. `evaluate` has no noise: dropout is
    off.
    """

    keep: fx.GraphModule
    discard: fx.GraphModule
    evaluate: fx.GraphModule
    backward: BackwardCode | None
    num_outputs: int
    num_inputs: int
    noise: tuple[Noise, ...]
    used_inputs: tuple[int, ...]
    saved: SavedLayout
    costs: BodyCosts
