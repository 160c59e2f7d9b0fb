"""How long do the bodies take on a machine that they never ran on?

In: a model and a machine. Out: a `Profile` with `source="analytic"`.

A body's time is its FLOPs at the machine's matmul rate plus its bytes at the machine's memory
bandwidth. The roofline model (Williams, Waterman, Patterson, CACM 2009) takes the larger of the
two, which is right for one kernel that overlaps both; a body is many operators that run one after
another, its matrix products bound by compute and the rest bound by memory, so their times add up.
The sum is too long by at most the traffic of the products themselves, never by more than a factor
of two.

The rate is read off the measured curve at the size of the products that the body really does: the
cube with as many operations as (tokens x rows x columns) of each weight matrix.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log
from typing import Final

from packhorse.errors import InputError
from packhorse.machine.spec import Machine, MatmulPoint
from packhorse.model.spec import Block, Body, Model, Parameter
from packhorse.profile.spec import BodyTime, Profile

_SPLIT_SHARE: Final = 0.05


def estimate_profile(model: Model, machine: Machine) -> Profile:
    """Estimate the times of all bodies of a model.

    Raises:
        InputError: the machine has no matmul curve for a dtype that the model computes in.
    """
    first_blocks = {block.body: block for block in reversed(model.blocks)}
    trained = {block.body for block in model.blocks if block.has_backward}
    return Profile(
        model=model.fingerprint,
        rows=model.rows,
        length=model.length,
        source="analytic",
        bodies={
            body.id: _estimate_body(
                model, machine, body, first_blocks[body.id], has_backward=body.id in trained
            )
            for body in model.bodies.values()
            if body.id in first_blocks
        },
        base_bytes=0,
    )


def find_slowdown(profile: Profile, model: Model, machine: Machine) -> float:
    """How many times as long as a machine's rates give all blocks of a step took; at least 1.

    1 where the machine has no rates for the model's dtype.
    """
    try:
        alone = estimate_profile(model, machine)
    except InputError:
        return 1.0
    took_ns, alone_ns = (
        sum(
            each.bodies[block.body].forward_ns + each.bodies[block.body].backward_ns
            for block in model.blocks
        )
        for each in (profile, alone)
    )
    return max(1.0, took_ns / alone_ns) if alone_ns else 1.0


def estimate_input_share(model: Model, machine: Machine, block: Block) -> float:
    """Estimate how much of the time of a block's backward its input half takes; 1 is all of it.

    Halves do the same work as the whole, so a measured backward can be shared out by this; what
    cutting it costs comes on top (`estimate_split_ns`).

    Raises:
        InputError: as `estimate_profile`.
    """
    body = model.bodies[block.body]
    halves = body.halves
    if halves is None or halves.input is None or halves.weight is None:
        return 0.0 if halves is not None and halves.input is None else 1.0
    parameters = [model.parameters[name] for name in block.parameters]
    ns_per_flop = _ns_per_flop(machine, body, parameters, model.rows * model.length)
    ns_per_byte = 1e9 / machine.memory_bytes_per_s
    first_ns, second_ns = (
        half.compute_flops * ns_per_flop + half.moved_bytes * ns_per_byte
        for half in (halves.input, halves.weight)
    )
    return first_ns / (first_ns + second_ns) if first_ns + second_ns else 1.0


def estimate_split_ns(input_ns: int, weight_ns: int) -> int:
    """Estimate what a backward in halves takes on top of the whole one; 0 where one is all of it.

    Measured: 2 to 8 % of it, the more the farther apart the halves run. What both read is read
    twice, and what one makes for the other waits in memory.
    """
    return round(_SPLIT_SHARE * (input_ns + weight_ns)) if input_ns and weight_ns else 0


def estimate_rate(machine: Machine, dtype: str, size: float) -> float:
    """Read the matmul rate in FLOP/s for a cube of `size`, between measured sizes by the logarithm.

    Outside the curve its nearest end is taken.

    Raises:
        InputError: the machine has no curve for the dtype.
    """
    curve = sorted((p for p in machine.matmul if p.dtype == dtype), key=lambda point: point.size)
    if not curve:
        known = ", ".join(sorted({point.dtype for point in machine.matmul})) or "none"
        raise InputError(
            f"the machine has no matmul curve for {dtype}; it has: {known}",
            where=f"machine {machine.name}",
            fix="probe the machine again, or add points of that dtype to `matmul` of its file",
        )
    if size <= curve[0].size:
        return curve[0].flops_per_s
    for low, high in pairwise(curve):
        if size <= high.size:
            return _between(low, high, size)
    return curve[-1].flops_per_s


def _estimate_body(
    model: Model, machine: Machine, body: Body, block: Block, *, has_backward: bool
) -> BodyTime:
    parameters = [model.parameters[name] for name in block.parameters]
    ns_per_flop = _ns_per_flop(machine, body, parameters, model.rows * model.length)
    ns_per_byte = 1e9 / machine.memory_bytes_per_s
    forward_ns = ceil(body.forward_flops * ns_per_flop + body.forward_bytes * ns_per_byte)
    backward_ns = ceil(body.backward_flops * ns_per_flop + body.backward_bytes * ns_per_byte)
    # Values that are not kept are computed all the same, so dropping them saves no time.
    return BodyTime(
        forward_ns=forward_ns,
        discard_ns=forward_ns,
        backward_ns=backward_ns if has_backward else 0,
    )


def _ns_per_flop(
    machine: Machine, body: Body, parameters: list[Parameter], num_tokens: int
) -> float:
    matrices = [parameter for parameter in parameters if len(parameter.shape) > 1]
    if not matrices:
        # No weights: one product that does all the work (2 operations per element of the cube).
        dtype = parameters[0].dtype if parameters else "float32"
        return 1e9 / estimate_rate(machine, dtype, (body.forward_flops / 2) ** (1 / 3))
    # Each matrix does a share of the operations in proportion to its elements.
    num_elements = sum(matrix.num_elements for matrix in matrices)
    return sum(
        matrix.num_elements
        / num_elements
        * 1e9
        / estimate_rate(machine, matrix.dtype, (num_tokens * matrix.num_elements) ** (1 / 3))
        for matrix in matrices
    )


def _between(low: MatmulPoint, high: MatmulPoint, size: float) -> float:
    share = log(size / low.size) / log(high.size / low.size)
    return low.flops_per_s + share * (high.flops_per_s - low.flops_per_s)
