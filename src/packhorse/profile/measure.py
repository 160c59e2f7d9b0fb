"""How long do the bodies take here? Run each distinct one, with real tensors.

In: a traced model, the machine (for the order of what is run, and for what there is no time to
run), a limit of seconds. Out: a `Measurement`: a `Profile` with `source="measured"`, and which
bodies were run. A body runs once to warm up and then three times, and its time is the middle one:
the least is what a step hardly ever sees. One that there is less time for runs once. Bodies that
the time or the memory does not allow take the analytic estimate, multiplied by what measured bodies
of about their size needed of theirs.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

import torch
from torch import Tensor, fx

from packhorse.graph.direct import make_direct
from packhorse.graph.joint import BodyCode
from packhorse.graph.trace import Traced
from packhorse.machine.spec import Machine
from packhorse.model.spec import BlockId, Body, BodyId, Model
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.scaling import find_ratio, find_ratio_near, scale_time, total_ns
from packhorse.profile.spec import BodyTime, Profile

# Called before each body with its name, its index and the number of bodies.
Progress = Callable[[str, int, int], None]

RUNS: Final = 3
# A body is not begun unless it may take this much of the time that is left.
_SHARE_OF_REST: Final = 0.8
_SCALE: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A profile, and how far it was measured; `num_measured` counts distinct bodies."""

    profile: Profile
    num_measured: int
    num_bodies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    parameters: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    noise: tuple[Tensor, ...]

    @property
    def flat(self) -> tuple[Tensor, ...]:
        return (*self.parameters, *self.constants, *self.inputs, *self.noise)


def measure_profile(
    traced: Traced,
    machine: Machine,
    *,
    limit_s: float,
    memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Run the distinct bodies of a model with `machine.num_threads` threads.

    Those go first that a step spends the most time in. What is not run is estimated, and scaled by
    what bodies of about its size took.

    Args:
        limit_s: seconds in all; a body is begun only when its estimate fits into what is left. One
            that could not run four times runs once.
        memory_bytes: bodies that hold more than this while they run are not run.
        progress: called before each body.
    """
    model = traced.model
    estimated = estimate_profile(model, machine).bodies
    deadline = time.monotonic() + limit_s
    counts = Counter(block.body for block in model.blocks)
    order = sorted(estimated, key=lambda body: -counts[body] * total_ns(estimated[body]))
    measured: dict[BodyId, BodyTime] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(machine.num_threads)
    try:
        for index, body in enumerate(order):
            rest_ns = (deadline - time.monotonic()) * 1e9 * _SHARE_OF_REST
            ratio = max(1.0, find_ratio(measured, estimated))
            expected_ns = total_ns(estimated[body]) * ratio
            if expected_ns > rest_ns:
                continue
            num_runs = RUNS if expected_ns * (RUNS + 1) <= rest_ns else 0
            if memory_bytes is not None and _peak_bytes(model, body) > memory_bytes:
                continue
            if progress is not None:
                progress(_name_of(model, body), index, len(order))
            measured[body] = _measure_body(traced, body, num_runs)
            gc.collect()
    finally:
        torch.set_num_threads(threads)
    bodies = {
        body: measured[body]
        if body in measured
        else scale_time(found, find_ratio_near(found, measured, estimated))
        for body, found in estimated.items()
    }
    profile = Profile(
        model=model.fingerprint,
        rows=model.rows,
        length=model.length,
        source="measured" if measured else "analytic",
        bodies=bodies,
        base_bytes=0,
    )
    return Measurement(profile=profile, num_measured=len(measured), num_bodies=len(bodies))


def _measure_body(traced: Traced, body: BodyId, num_runs: int) -> BodyTime:
    block = next(b for b in traced.model.blocks if b.body == body)
    code = traced.code[body]
    with torch.no_grad():
        device = _device_of(code)
        generator = torch.Generator(device).manual_seed(0)
        arguments = _make_arguments(traced, block.id, code, generator)
        keep, discard = make_direct(code.keep), make_direct(code.discard)
        keep_ns, results = _time(lambda: keep(*arguments.flat), device, num_runs)
        discard_ns, _ = _time(lambda: discard(*arguments.flat), device, num_runs)
        backward_ns = 0
        backward = code.backward
        if backward is not None:
            flat = _backward_arguments(code, arguments, results, generator)
            first = make_direct(backward.first.graph)
            backward_ns, _ = _time(lambda: first(*flat), device, num_runs)
    return BodyTime(forward_ns=keep_ns, discard_ns=discard_ns, backward_ns=backward_ns)


def _device_of(code: BodyCode) -> torch.device:
    """Where a body runs: its graph was traced for that device."""
    holders = (node for node in code.keep.graph.nodes if node.op == "placeholder")
    fake: Tensor = next(holders).meta["val"]
    return fake.device


def _time(
    run: Callable[[], Sequence[Tensor]], device: torch.device, num_runs: int
) -> tuple[int, Sequence[Tensor]]:
    """Give the middle one of some runs after one that warms up; without any, what that one took."""
    warm_ns, results = _run_once(run, device)
    taken_ns: list[int] = []
    for _ in range(num_runs):
        del results
        again_ns, results = _run_once(run, device)
        taken_ns.append(again_ns)
    return median_low(taken_ns or [warm_ns]), results


def _run_once(
    run: Callable[[], Sequence[Tensor]], device: torch.device
) -> tuple[int, Sequence[Tensor]]:
    _finish(device)
    begin_ns = time.perf_counter_ns()
    results = run()
    _finish(device)
    return time.perf_counter_ns() - begin_ns, results


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _make_arguments(
    traced: Traced, block: BlockId, code: BodyCode, generator: torch.Generator
) -> _Arguments:
    holders = [node for node in code.keep.graph.nodes if node.op == "placeholder"]
    constants = tuple(tensor.to(generator.device) for tensor in traced.constants[block])
    num_parameters = len(traced.model.blocks[block].parameters)
    first_input, first_noise = num_parameters + len(constants), len(holders) - len(code.noise)
    return _Arguments(
        parameters=tuple(_make_like(node, generator) for node in holders[:num_parameters]),
        constants=constants,
        inputs=tuple(_make_like(node, generator) for node in holders[first_input:first_noise]),
        noise=tuple(_make_like(node, generator) for node in holders[first_noise:]),
    )


def _backward_arguments(
    code: BodyCode, arguments: _Arguments, results: Sequence[Tensor], generator: torch.Generator
) -> list[Tensor]:
    backward = code.backward
    assert backward is not None
    outputs, saved = results[: code.num_outputs], results[code.num_outputs :]
    holders = [node for node in backward.first.graph.graph.nodes if node.op == "placeholder"]
    known = [
        *saved,
        *(arguments.parameters[index] for index in backward.parameters),
        *(arguments.constants[index] for index in backward.constants),
        *(arguments.inputs[index] for index in backward.inputs),
        *(outputs[index] for index in backward.outputs),
    ]
    return [*known, *(_make_like(node, generator) for node in holders[len(known) :])]


def _make_like(node: fx.Node, generator: torch.Generator) -> Tensor:
    """Small random numbers; zeros for integers, which are valid tokens and labels everywhere."""
    fake: Tensor = node.meta["val"]
    made = torch.zeros(fake.shape, dtype=fake.dtype, device=generator.device)
    if not fake.is_floating_point():
        return made
    if not fake.dim():
        return made.fill_(1.0)
    return made.normal_(generator=generator).mul_(_SCALE)


def _peak_bytes(model: Model, body: BodyId) -> int:
    found = model.bodies[body]
    block = next(b for b in model.blocks if b.body == body)
    num_elements = sum(model.parameters[name].num_elements for name in block.parameters)
    crossing = sum(model.values[v].size_bytes for v in (*block.inputs, *block.outputs))
    return 8 * num_elements + 2 * crossing + _own_bytes(found)


def _own_bytes(body: Body) -> int:
    return body.saved_bytes + max(
        body.forward_workspace_bytes, body.backward_workspace_bytes, body.discard_workspace_bytes
    )


def _name_of(model: Model, body: BodyId) -> str:
    users = [block.name for block in model.blocks if block.body == body]
    return users[0] if len(users) == 1 else f"{users[0]} (and {len(users) - 1} alike)"
