"""What the search may choose between: the model traced and timed at several micro-batch sizes.

In: a module, an example batch, the rows of a step, what is pinned. Out: `Candidates`: for each
number of rows, and with and without a chunked loss, the traced model and its profile. The module
is exported once, with a dynamic batch where it allows one, and traced for each candidate.

The smallest micro-batch is measured, then the larger ones, the largest first, as far as the time
goes; the others are scaled by their analytic estimates from what is nearest to them in size.
`notes` says in words what was not measured.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor, nn

from packhorse.errors import InputError
from packhorse.graph.export import Exported, export_module, is_transformers_model
from packhorse.graph.trace import Traced, trace_blocks
from packhorse.machine.contention import read_core_clocks
from packhorse.machine.process_memory import resident_bytes
from packhorse.machine.spec import Machine
from packhorse.model.spec import Model
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.measure import Measurement, measure_profile
from packhorse.profile.scaling import find_ratio, scale_profile, total_ns
from packhorse.profile.spec import Profile
from packhorse.runtime.memory.heap import set_heap_mode, trim_heap
from packhorse.trainer.device_memory import measure_device_base
from packhorse.units import KIB, MIB, format_ns

# Called with what is done next, its index, and the number of parts.
Progress = Callable[[str, int, int], None]

LOSS_CHUNK_TOKENS: Final = 1024
# Chunking costs a second product with the head; below this the whole logits are cheaper to keep.
LARGE_LOGITS_BYTES: Final = 32 * MIB
MEASURE_LIMIT_S: Final = 10.0
# What measuring may hold at a time, of what the device's budget leaves.
_MEASURE_SHARE: Final = 0.7
# What comes after tracing, whatever the step: code and libraries that measuring, the search and the
# first step load. Measured: 8 to 33 MiB, 13 MiB more with evaluations (125 M parameters).
LATER_BYTES: Final = 32 * MIB
# What evaluations load and leave, the one before the first step at first.
EVALUATION_BYTES: Final = 16 * MIB
# What the tasks of one block in one micro-batch come to, about six: in programs and their proofs,
# in how they are issued, in timelines and the text of those. Measured: 13 KiB a task.
BLOCK_RUN_BYTES: Final = 72 * KIB
# Logits, their log-softmax and its gradient exist together in float32.
_LOGITS_BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCandidate:
    """One micro-batch size and loss setting."""

    traced: Traced
    profile: Profile
    loss_chunk_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All of them, smallest micro-batch first, and what the numerics of a plan say of them."""

    entries: tuple[TracedCandidate, ...]
    exported: Exported
    attention: Literal["causal", "eager", "native"]
    notes: tuple[str, ...]

    def find(self, *, rows: int, loss_chunk_tokens: int | None) -> TracedCandidate:
        """Find the candidate that a plan chose.

        Raises:
            InputError: there is none; names those that there are.
        """
        for entry in self.entries:
            key = (entry.traced.model.rows, entry.loss_chunk_tokens)
            if key == (rows, loss_chunk_tokens):
                return entry
        have = ", ".join(
            f"{e.traced.model.rows} rows, loss {e.loss_chunk_tokens or 'whole'}"
            for e in self.entries
        )
        raise InputError(
            f"the model was not traced for micro-batches of {rows} rows with loss"
            f" {loss_chunk_tokens or 'whole'}",
            where=f"traced: {have}",
            fix="trace the model as the plan says",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingRequest:
    """How a module is traced, whatever the micro-batch.

    `groups` gives the optimizer group of each parameter by canonical name; `device` is where the
    bodies are to run. For a device that torch does not have here they are traced for the CPU.
    """

    name: str
    groups: Mapping[str, str]
    compute_dtype: torch.dtype
    device: str = "cpu"


def trace_candidates(
    module: nn.Module,
    example: Mapping[str, Tensor],
    request: TracingRequest,
    machine: Machine,
    *,
    global_rows: int,
    microbatch_rows: int | None = None,
    loss_chunk_tokens: int | Literal["whole"] | None = None,
    limit_s: float = MEASURE_LIMIT_S,
    baseline_bytes: int | None = None,
    evaluates: bool = True,
    progress: Progress | None = None,
) -> Candidates:
    """Trace and time a module for every micro-batch that a step can be cut into.

    Args:
        module: as for `export_module`; its parameters may be on `meta`.
        example: rows first; only names, dtypes and what follows the rows are used.
        machine: whose device the bodies run on; here they are measured on its threads.
        global_rows: rows of a step.
        microbatch_rows: pinned rows of a micro-batch.
        loss_chunk_tokens: pinned chunk of the loss, "whole", or None to offer both.
        limit_s: seconds that measuring may take; 0, a machine that is not this one, or a device
            that is not here take analytic estimates.
        baseline_bytes: `measure_baseline()` of before; without it `base_bytes` stays 0.
        evaluates: whether the run may evaluate, which adds to its base.
        progress: called before each part.

    Raises:
        ModelError: the module cannot be traced.
        InputError: the pinned rows do not divide the rows of a step.
    """
    rows = choose_rows(global_rows, microbatch_rows)
    tell = progress or _ignore_progress
    tell("exporting the model", 0, len(rows) + 2)
    small = {name: tensor[: rows[0]] for name, tensor in example.items()}
    exported = export_module(
        module, small, compute_dtype=request.compute_dtype, device=_here(request.device)
    )
    notes: list[str] = []
    if not exported.batch_is_dynamic and len(rows) > 1:
        rows = rows[:1]
        notes.append(
            "the model does not allow its number of rows to vary, so only micro-batches of"
            f" {rows[0]} rows were considered"
        )
    traced: list[tuple[Traced, int | None]] = []
    for index, count in enumerate(rows):
        tell(f"tracing {count} rows", index + 1, len(rows) + 2)
        traced += _trace_rows(exported, request, count, loss_chunk_tokens)
    tell("measuring", len(rows) + 1, len(rows) + 2)
    # Traced graphs refer to themselves: what is not kept goes now.
    gc.collect()
    trim_heap()
    # From before measuring, so that it does not depend on what there was time and room for.
    base = 0
    if baseline_bytes is not None:
        base = _measure_base(exported.device, baseline_bytes, evaluates=evaluates)
    profiles, said = _profile_all([t for t, _ in traced], machine, limit_s, base_bytes=base)
    trim_heap()
    if exported.device != "cpu":
        torch.cuda.empty_cache()
    return Candidates(
        entries=tuple(
            TracedCandidate(
                traced=found,
                profile=replace(
                    profile,
                    base_bytes=base and base + find_task_bytes(found.model, global_rows),
                ),
                loss_chunk_tokens=chunk,
            )
            for (found, chunk), profile in zip(traced, profiles, strict=True)
        ),
        exported=exported,
        attention=find_attention(module),
        notes=(*notes, *said),
    )


def trace_plan(
    module: nn.Module,
    example: Mapping[str, Tensor],
    request: TracingRequest,
    *,
    rows: int,
    loss_chunk_tokens: int | None,
) -> Traced:
    """Trace a module exactly as a plan says, without measuring anything.

    Raises:
        ModelError: the module cannot be traced.
    """
    small = {name: tensor[:rows] for name, tensor in example.items()}
    exported = export_module(
        module, small, compute_dtype=request.compute_dtype, device=_here(request.device)
    )
    return _trace(exported, request, rows, loss_chunk_tokens)


def find_task_bytes(model: Model, global_rows: int) -> int:
    """What the tasks of a whole step take: the smaller its micro-batches, the more there are."""
    return len(model.blocks) * (global_rows // model.rows) * BLOCK_RUN_BYTES


def choose_rows(global_rows: int, pinned: int | None = None) -> tuple[int, ...]:
    """List the micro-batch sizes to consider: a few divisors of the step, or the pinned.

    Each is the largest divisor up to a power of two; the whole step is always one of them.

    Raises:
        InputError: the pinned rows do not divide the rows of a step.
    """
    if pinned is not None:
        if global_rows % pinned:
            raise InputError(
                f"a step of {global_rows} rows cannot be cut into micro-batches of {pinned}",
                where="microbatch_rows",
                fix=f"choose a divisor of {global_rows}",
            )
        return (pinned,)
    limits = [1 << power for power in range(global_rows.bit_length() + 1)]
    found = (
        next(rows for rows in range(min(limit, global_rows), 0, -1) if global_rows % rows == 0)
        for limit in limits
    )
    return tuple(dict.fromkeys(found))


def find_attention(module: nn.Module) -> Literal["causal", "eager", "native"]:
    """Name the attention path of the traced model, as `Numerics` means it."""
    if not is_transformers_model(module):
        return "native"
    config: object = getattr(module, "config", None)
    return "eager" if getattr(config, "_attn_implementation", None) == "eager" else "causal"


def measure_baseline() -> int:
    """Tell the memory of a process that has loaded what training needs, and nothing else yet."""
    if importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers")
    trim_heap()
    gc.collect()
    return resident_bytes()


def _trace_rows(
    exported: Exported,
    request: TracingRequest,
    rows: int,
    pinned: int | Literal["whole"] | None,
) -> list[tuple[Traced, int | None]]:
    if isinstance(pinned, int):
        return [(_trace(exported, request, rows, pinned), pinned)]
    whole = _trace(exported, request, rows, None)
    found: list[tuple[Traced, int | None]] = [(whole, None)]
    if pinned is None and whole.loss_can_be_chunked and whole.vocabulary is not None:
        num_tokens = rows * exported.length
        logits_bytes = num_tokens * whole.vocabulary * _LOGITS_BYTES_PER_TOKEN
        chunk = min(LOSS_CHUNK_TOKENS, num_tokens // 2)
        if logits_bytes > LARGE_LOGITS_BYTES and chunk:
            found.append((_trace(exported, request, rows, chunk), chunk))
    return found


def _trace(
    exported: Exported, request: TracingRequest, rows: int, loss_chunk_tokens: int | None
) -> Traced:
    return trace_blocks(
        exported,
        rows=rows,
        chunk_tokens=loss_chunk_tokens,
        groups=request.groups,
        name=request.name,
        compute_dtype=request.compute_dtype,
    )


def _measure_base(device: str, baseline_bytes: int, *, evaluates: bool) -> int:
    """What the device tier holds beside the ledger: of this process, or of a GPU's own memory."""
    if device != "cpu":
        return measure_device_base(torch.device(device))
    gc.collect()
    later_bytes = LATER_BYTES + (EVALUATION_BYTES if evaluates else 0)
    return max(0, resident_bytes() - baseline_bytes) + later_bytes


def _profile_all(
    traced: Sequence[Traced], machine: Machine, limit_s: float, *, base_bytes: int
) -> tuple[list[Profile], list[str]]:
    estimated = [estimate_profile(found.model, machine) for found in traced]
    is_here = machine.source == "probe" and _here(machine.device) == machine.device
    if limit_s <= 0 or not is_here:
        return estimated, ["block times are estimated from the machine's rates, not measured"]
    device = machine.tier("device")
    memory_bytes = None
    if device is not None:
        memory_bytes = max(0, int((device.budget_bytes - base_bytes) * _MEASURE_SHARE))
    deadline = time.monotonic() + limit_s
    # Around all of them: one alone may be over before the clocks have ticked.
    began = read_core_clocks()
    set_heap_mode("keep")
    measured: dict[int, Measurement] = {}
    # The smallest micro-batch is soon measured. The larger ones are taken the rather, and tell of
    # those beside them.
    for index in (0, *range(len(traced) - 1, 0, -1)):
        rest_s = deadline - time.monotonic()
        if measured and _once_s(estimated[index], measured[0], estimated[0]) > rest_s:
            continue
        measured[index] = measure_profile(
            traced[index], machine, limit_s=rest_s, memory_bytes=memory_bytes
        )
    # One that was cut short says less than others, scaled.
    known = {at: found.profile for at, found in measured.items() if _is_complete(found)}
    num_complete = len(known)
    known = known or {0: measured[0].profile}
    rows = [found.model.rows for found in traced]
    profiles = [
        known[index] if index in known else _scale_nearest(known, estimated, rows, index)
        for index in range(len(traced))
    ]
    busy_share = read_core_clocks().share_since(began, machine.num_threads)
    profiles = [
        replace(profile, busy_share=busy_share if profile.source == "measured" else 0.0)
        for profile in profiles
    ]
    if num_complete == len(traced):
        return profiles, []
    return profiles, [_say_measured(measured[0], num_complete, len(traced), limit_s)]


def _once_s(estimated: Profile, first: Measurement, estimated_first: Profile) -> float:
    """How long one run of each body takes, by what the first that were measured took."""
    ratio = find_ratio(first.profile.bodies, estimated_first.bodies)
    return ratio * sum(map(total_ns, estimated.bodies.values())) / 1e9


def _is_complete(measured: Measurement) -> bool:
    return measured.num_measured == measured.num_bodies


def _scale_nearest(
    known: Mapping[int, Profile], estimated: Sequence[Profile], rows: Sequence[int], index: int
) -> Profile:
    """Estimate a micro-batch by the measured one that is nearest to it in size."""
    near = min(known, key=lambda at: max(rows[at], rows[index]) / min(rows[at], rows[index]))
    return scale_profile(known[near], estimated[near], estimated[index])


def _say_measured(
    first: Measurement, num_complete: int, num_candidates: int, limit_s: float
) -> str:
    limit = format_ns(limit_s * 1e9)
    if num_complete:
        return (
            f"of {num_candidates} ways to cut the step {_count_were(num_complete)} measured in"
            f" {limit}; the times of the others are scaled from those nearest in size"
        )
    ran, num_bodies = first.num_measured, first.num_bodies
    return (
        f"of {num_bodies} kind{'' if num_bodies == 1 else 's'} of blocks {_count_were(ran)}"
        f" measured in {limit}, for the smallest micro-batch; other times are the machine's rates"
        + (", scaled by what those blocks took" if ran else "")
    )


def _count_were(count: int) -> str:
    return {0: "none was", 1: "1 was"}.get(count, f"{count} were")


def _here(device: str) -> str:
    """The device if torch has it in this process, else the CPU: its shapes are the same."""
    return device if device == "cpu" or torch.cuda.is_available() else "cpu"


def _ignore_progress(what: str, index: int, num_parts: int) -> None:
    """Take the place of a progress display that nobody asked for."""
