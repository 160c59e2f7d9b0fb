"""Rule `reads`: each task declares exactly what the model makes it read and write.

Only what is declared is there when a body runs, so a missing name would fail and one too many
would hold memory for nothing. Also: a task has the workspace that its body needs, and every
buffer the bytes that the model gives it. Which states an update has is read off the program:
those of the chunk that have a home. So is how tied parameters are summed: once a step, if the
program has a sum of that kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from packhorse.errors import RuleError
from packhorse.model.spec import Body, Model, ParameterName
from packhorse.program.buffers import (
    LOSSES,
    NORM,
    NORM_WORKSPACE_BYTES,
    BufferId,
    ChunkId,
    norm_id,
    packed_norms_id,
    saved_id,
    state_id,
    tied_sum_id,
    value_id,
)
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Emit,
    Export,
    Feed,
    Forward,
    Free,
    GradNorm,
    Import,
    InputGrad,
    PackLosses,
    PackNorms,
    Recompute,
    Recv,
    SegmentNorm,
    Send,
    SumTied,
    Update,
    WeightGrad,
    workspace_of,
)
from packhorse.verifier.failures import make_error, suggest
from packhorse.verifier.lives import FIRST_RANK, count_packed_segments, shared_users
from packhorse.verifier.needs import Needs, chunks_by_parameter, derive_needs, derive_sizes
from packhorse.verifier.outline import Outline

RULE: Final = "reads"
NUM_SHOWN: Final = 5


def check_reads(outline: Outline) -> None:
    """Check sizes of buffers, then reads, writes and workspace of every task, with a model."""
    program, model = outline.program, outline.model
    _check_updates(program)
    if model is None:
        return
    _check_sizes(program, model)
    needs = derive_needs(model, program.layout, last_summed=_find_last_summed(program, model))
    begun: set[BufferId] = set()
    for index, task in enumerate(program.tasks):
        match task:
            case Copy() | Free() | Send() | Recv() | Emit() | Import() | Export() | Update():
                continue
            case SumTied(parameter=name):
                chunks = chunks_by_parameter(program.layout)[name]
                sums = _sums_in_order(model, name)
                _compare(program, index, "read", task.reads, sums)
                grads = {state_id("grad", chunk) for chunk in chunks}
                _compare(program, index, "write", task.writes, grads)
                if task.reads != sums:
                    what = f"adds in another order than {', '.join(sums)}"
                    raise make_error(program, RULE, index, what)
            case PackNorms():
                norms = {norm_id(chunk) for chunk in outline.segment_norms}
                _compare(program, index, "read", task.reads, norms)
                _compare(program, index, "write", task.writes, {packed_norms_id(program.rank)})
            case PackLosses():
                losses = [value_id(model.loss, each) for each in range(program.num_microbatches)]
                _compare(program, index, "read", task.reads, losses)
                _compare(program, index, "write", task.writes, {LOSSES})
                if list(task.reads) != losses:
                    what = "packs losses in another order than that of the micro-batches"
                    raise make_error(program, RULE, index, what)
            case Feed(microbatch=microbatch):
                _compare(program, index, "write", task.writes, needs.fed(microbatch))
            case Forward():
                _check_forward(program, model, needs, index, task)
            case Recompute(block=block, microbatch=microbatch):
                _compare(program, index, "read", task.reads, needs.forward_reads(block, microbatch))
                _compare(program, index, "write", task.writes, {saved_id(block, microbatch)})
                ran = model.blocks[block]
                # The outputs are made again and dropped.
                dropped = sum(model.values[value].size_bytes for value in ran.outputs)
                held = model.body_of(ran.id).forward_workspace_bytes + dropped
                _check_workspace(program, index, held)
            case Backward(block=block, microbatch=microbatch):
                reads = needs.backward_reads(block, microbatch, begun)
                _compare(program, index, "read", task.reads, reads)
                _compare(
                    program, index, "write", task.writes, needs.backward_writes(block, microbatch)
                )
                begun |= needs.gradients_at(block, microbatch)
                body = model.body_of(model.blocks[block].id)
                own_bytes = body.workspace_of_backward(microbatch)
                more_bytes = needs.backward_workspace_bytes(block, microbatch)
                _check_workspace(program, index, own_bytes + more_bytes)
            case InputGrad(block=block, microbatch=microbatch):
                reads = needs.input_reads(block, microbatch)
                writes = needs.input_writes(block, microbatch)
                _compare(program, index, "read", task.reads, reads)
                _compare(program, index, "write", task.writes, writes)
                _check_workspace(program, index, needs.input_half(block).workspace_bytes)
            case WeightGrad(block=block, microbatch=microbatch):
                reads = needs.weight_reads(block, microbatch, begun)
                writes = needs.parameter_grads_written(block, microbatch)
                _compare(program, index, "read", task.reads, reads)
                _compare(program, index, "write", task.writes, writes)
                begun |= needs.gradients_at(block, microbatch)
                more_bytes = needs.backward_workspace_bytes(block, microbatch)
                held = needs.weight_half(block).workspace_bytes + more_bytes
                _check_workspace(program, index, held)
            case SegmentNorm(chunk=chunk):
                _compare(program, index, "read", task.reads, {state_id("grad", chunk)})
                _compare(program, index, "write", task.writes, {norm_id(chunk)})
                _check_workspace(program, index, NORM_WORKSPACE_BYTES)
            case GradNorm():
                norms = {norm_id(chunk) for chunk in outline.segment_norms} | _packed(model)
                _compare(program, index, "read", task.reads, norms)
                _compare(program, index, "write", task.writes, {NORM})


def _packed(model: Model) -> set[BufferId]:
    if model.part is None:
        return set()
    ranks = count_packed_segments(model.part)
    return {packed_norms_id(rank) for rank in ranks if rank != FIRST_RANK}


def _sums_in_order(model: Model, name: str) -> tuple[BufferId, ...]:
    # The last user's first.
    if model.part is None:
        return ()
    users = shared_users(model.part, model.part.whole.parameters[ParameterName(name)])
    return tuple(tied_sum_id(name, user) for user in users)


def _find_last_summed(program: Program, model: Model) -> int | None:
    # Those of parameters that several ranks use are always summed so.
    sums = (
        tied_sum_id(name, block if model.part is None else model.part.blocks[block])
        for name in model.summed_parameters
        if not _sums_in_order(model, name)
        for block in model.parameters[name].blocks
    )
    found = any(name in program.buffers for name in sums)
    return program.num_microbatches - 1 if found else None


def _check_forward(program: Program, model: Model, needs: Needs, index: int, task: Forward) -> None:
    block, microbatch = task.block, task.microbatch
    body = model.body_of(model.blocks[block].id)
    saved = saved_id(block, microbatch)
    writes = needs.forward_writes(block, microbatch)
    saves = body.saved_bytes > 0 and saved in task.writes
    if saves:
        writes.add(saved)
    _compare(program, index, "read", task.reads, needs.forward_reads(block, microbatch))
    _compare(program, index, "write", task.writes, writes)
    _check_workspace(program, index, _forward_workspace(body, saves))


def _forward_workspace(body: Body, saves: bool) -> int:
    if saves:
        return body.forward_workspace_bytes
    if body.saved_bytes == 0:
        return min(body.forward_workspace_bytes, body.discard_workspace_bytes)
    return body.discard_workspace_bytes


def _check_updates(program: Program) -> None:
    # The states of a chunk are those with a home; all updates clip, or none does.
    states: dict[ChunkId, set[BufferId]] = {}
    dtypes = program.layout.dtypes
    clips: bool | None = None
    for chunk in program.layout.chunks:
        names = (state_id(state, chunk.id) for state in dtypes if state != "grad")
        states[chunk.id] = {
            name for name in names if name in program.buffers and program.buffers[name].home
        }
    for index, task in enumerate(program.tasks):
        if not isinstance(task, Update):
            continue
        own = states[task.chunk]
        reads = {*own, state_id("grad", task.chunk)}
        if (
            state_id("master", task.chunk) in own
            and state_id("param", task.chunk) not in task.reads
        ):
            reads.discard(state_id("param", task.chunk))
        if clips is None:
            clips = NORM in task.reads
        if clips:
            reads.add(NORM)
        _compare(program, index, "read", task.reads, reads)
        # Clipping scales the gradient in place.
        writes = {*own, state_id("grad", task.chunk)} if clips else own
        _compare(program, index, "write", task.writes, writes)


def _compare(
    program: Program,
    index: int,
    verb: str,
    found: tuple[BufferId, ...],
    wanted: Collection[str],
) -> None:
    # No name is twice in its list.
    if len(found) == len(wanted) and set(found).issuperset(wanted):
        return
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted]
    parts = [f"does not {verb} {_list(missing)}, which it needs"] if missing else []
    parts += [f"{verb}s {_list(surplus)}, which it does not need"] if surplus else []
    raise make_error(program, RULE, index, " and ".join(parts))


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:NUM_SHOWN])
    rest = len(ordered) - NUM_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _check_workspace(program: Program, index: int, need_bytes: int) -> None:
    have_bytes = workspace_of(program.tasks[index])
    if have_bytes < need_bytes:
        what = f"has {have_bytes} bytes of workspace; its body needs {need_bytes}"
        raise make_error(program, RULE, index, what)


def _check_sizes(program: Program, model: Model) -> None:
    sizes = derive_sizes(model, program.layout, program.num_microbatches)
    known = tuple(sizes)
    for name, buffer in program.buffers.items():
        if name not in sizes:
            raise _unknown(program, name, known)
        if buffer.size_bytes != sizes[name]:
            what = f"buffer {name} has {buffer.size_bytes} bytes; the model gives it {sizes[name]}"
            raise make_error(program, RULE, None, what)


def _unknown(program: Program, name: BufferId, known: tuple[str, ...]) -> RuleError:
    near = suggest(name, known).replace("declared buffer", "name of this model")
    return make_error(program, RULE, None, f"buffer {name} is nothing of this model{near}")
