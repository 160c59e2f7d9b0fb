"""Rule `coverage`: everything that the program is for happens, exactly once.

    train_step   per micro-batch: one Feed, each block's Forward, Backward of each block that has
                 one, or in its place both halves of it (InputGrad only where gradients flow to
                 inputs, WeightGrad only where parameters are trained), the loss emitted; Recompute
                 only for a block whose Forward did not save, once, between the two; each trained
                 chunk that gets a gradient: one SegmentNorm and one Update after its last gradient;
                 one GradNorm, the norm emitted; frozen chunks never
    evaluate     per micro-batch: one Feed, each block's Forward, the loss emitted
    Of several ranks each has its own blocks, chunks and step inputs. A parameter that several hold
    gets one SumTied on each and counts in the norm of the first; one rank has the GradNorm, and all
    others emit what they are sent.

    load, save   each state with a home imported (exported) once
    persist      each state of a trained chunk whose home is in memory exported once
    restore      each state whose home is in memory imported once

Without a model the blocks are those that the program itself names, and which chunks get gradients
is read off its tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, assert_never

from packhorse.errors import RuleError
from packhorse.model.spec import Model
from packhorse.program.buffers import (
    LOSSES,
    NORM,
    BufferId,
    ChunkId,
    saved_id,
    state_id,
    value_id,
)
from packhorse.program.program import Program, ProgramKind
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
    Task,
    Update,
    WeightGrad,
)
from packhorse.verifier.failures import make_error, name_task
from packhorse.verifier.lives import FIRST_RANK, counting_rank, shared_users
from packhorse.verifier.needs import chunks_by_parameter
from packhorse.verifier.outline import BlockTable, Indices, Outline

RULE: Final = "coverage"
TASKS_OF: Final[Mapping[ProgramKind, tuple[type[Task], ...]]] = {
    "train_step": (
        Feed,
        Forward,
        Recompute,
        Backward,
        InputGrad,
        WeightGrad,
        SumTied,
        SegmentNorm,
        PackNorms,
        PackLosses,
        GradNorm,
        Update,
        Copy,
        Free,
        Send,
        Recv,
        Emit,
    ),
    "evaluate": (Feed, Forward, Copy, Free, Send, Recv, Emit),
    "load": (Import, Copy, Free),
    "save": (Export, Copy, Free),
    "persist": (Export, Copy, Free),
    "restore": (Import, Copy, Free),
}


def check_coverage(outline: Outline) -> None:
    """Check kinds of tasks, then that nothing is missing or done twice."""
    program = outline.program
    allowed = TASKS_OF[program.kind]
    for index, task in enumerate(program.tasks):
        if type(task) not in allowed:
            kind = type(task).__name__
            raise make_error(program, RULE, index, f"is {kind}: a {program.kind} program has none")
    _check_once(outline)
    match program.kind:
        case "train_step":
            _check_forwards(outline)
            _check_backwards(outline)
            _check_recomputes(outline)
            _check_saving(outline)
            _check_chunks(outline)
            _check_emits(outline)
        case "evaluate":
            _check_forwards(outline)
            _check_saving(outline)
            _check_emits(outline)
        case "load":
            _check_states(outline, outline.imports, "IMP", _states(program))
        case "save":
            _check_states(outline, outline.exports, "EXP", _states(program))
        case "persist":
            changed = _states(program) & _states_in_memory(program) & _trained_states(program)
            _check_states(outline, outline.exports, "EXP", changed)
        case "restore":
            _check_states(outline, outline.imports, "IMP", _states_in_memory(program))
        case _:
            assert_never(program.kind)


def _check_once(outline: Outline) -> None:
    tables: tuple[Iterable[Indices], ...] = (
        outline.feeds.values(),
        outline.forwards.values(),
        outline.recomputes.values(),
        outline.backwards.values(),
        outline.input_grads.values(),
        outline.weight_grads.values(),
        outline.tied_sums.values(),
        outline.segment_norms.values(),
        outline.packs.values(),
        (outline.grad_norms,),
        outline.updates.values(),
        outline.emits.values(),
        outline.imports.values(),
        outline.exports.values(),
    )
    for table in tables:
        for indices in table:
            if len(indices) > 1:
                first = name_task(outline.program, indices[0])
                what = f"does again what {first} did; it must happen exactly once"
                raise make_error(outline.program, RULE, indices[1], what)


def _check_forwards(outline: Outline) -> None:
    program, model = outline.program, outline.model
    microbatches = range(program.num_microbatches)
    fed = outline.feeds or not outline.receives if model is None else model.step_inputs
    for microbatch in microbatches if fed else ():
        if microbatch not in outline.feeds:
            raise _missing(program, f"FEED mb={microbatch}")
    for microbatch, indices in outline.feeds.items():
        if microbatch not in microbatches:
            raise _no_such_microbatch(program, indices[0])
    blocks = _blocks_of(model, outline.forwards)
    _check_table(program, outline.forwards, blocks, "F")


def _check_backwards(outline: Outline) -> None:
    program, model = outline.program, outline.model
    begun = outline.begun
    if model is None:
        blocks = _blocks_of(None, begun)
    else:
        blocks = [block.id for block in model.blocks if block.has_backward]
    _check_table(program, begun, blocks, "B")
    _check_halves(outline)
    for key, (index,) in begun.items():
        block, microbatch = key
        forward = outline.forwards.get(key, (len(program.tasks),))[0]
        if forward > index:
            what = f"comes before the Forward of block {block} for micro-batch {microbatch}"
            raise make_error(program, RULE, index, what)
        saved = saved_id(block, microbatch)
        needs = model.body_of(model.blocks[block].id).saved_bytes > 0 if model else False
        if needs and saved not in _writes_at(program, forward) and key not in outline.recomputes:
            what = (
                f"needs {saved}, but {name_task(program, forward)} does not save it, and"
                f" R block={block} mb={microbatch} is missing"
            )
            raise make_error(program, RULE, index, what)


def _check_halves(outline: Outline) -> None:
    program, model = outline.program, outline.model
    tables = {"I": outline.input_grads, "W": outline.weight_grads}
    needed = {mnemonic: {block for block, _ in table} for mnemonic, table in tables.items()}
    split = sorted({*outline.input_grads, *outline.weight_grads})
    for key in split:
        block, microbatch = key
        found = {mnemonic: table[key][0] for mnemonic, table in tables.items() if key in table}
        index = min(found.values())
        if key in outline.backwards:
            what = (
                f"is half of what {name_task(program, outline.backwards[key][0])} does as a whole"
            )
            raise make_error(program, RULE, index, what)
        wanted = {mnemonic: block in blocks for mnemonic, blocks in needed.items()}
        if model is not None:
            halves = model.body_of(model.blocks[block].id).halves
            if halves is None:
                what = f"is half of a backward, but the model gives block {block} no halves"
                raise make_error(program, RULE, index, what)
            wanted = {"I": halves.input is not None, "W": halves.weight is not None}
        for mnemonic, is_wanted in wanted.items():
            if is_wanted and mnemonic not in found:
                raise _missing(program, f"{mnemonic} block={block} mb={microbatch}")
            if mnemonic in found and not is_wanted:
                what = f"has nothing to do: the other half of block {block} is its whole backward"
                raise make_error(program, RULE, found[mnemonic], what)


def _check_saving(outline: Outline) -> None:
    program, begun = outline.program, outline.begun
    for (block, microbatch), (index,) in outline.forwards.items():
        saved = saved_id(block, microbatch)
        saves = saved in _writes_at(program, index)
        if saves and (block, microbatch) not in begun:
            what = f"saves {saved}, but block {block} has no Backward of micro-batch {microbatch}"
            raise make_error(program, RULE, index, what)


def _check_recomputes(outline: Outline) -> None:
    program, model, begun = outline.program, outline.model, outline.begun
    for key, (index,) in outline.recomputes.items():
        block, microbatch = key
        forward = outline.forwards.get(key, (None,))[0]
        backward = begun.get(key, (None,))[0]
        if forward is None or backward is None:
            missing = "Forward" if forward is None else "Backward"
            what = f"recomputes what no {missing} of block {block} mb={microbatch} goes with"
            raise make_error(program, RULE, index, what)
        saved = saved_id(block, microbatch)
        if saved in _writes_at(program, forward):
            what = f"recomputes {saved}, which {name_task(program, forward)} saves"
            raise make_error(program, RULE, index, what)
        if model is not None and model.body_of(model.blocks[block].id).saved_bytes == 0:
            what = f"recomputes block {block}, which has nothing to save"
            raise make_error(program, RULE, index, what)
        if not forward < index < backward:
            what = (
                f"does not lie between {name_task(program, forward)} and"
                f" {name_task(program, backward)}"
            )
            raise make_error(program, RULE, index, what)


def _check_chunks(outline: Outline) -> None:
    program = outline.program
    chunks = {chunk.id: chunk for chunk in program.layout.chunks}
    for table in (outline.segment_norms, outline.updates):
        for chunk_id, (index,) in table.items():
            if chunk_id not in chunks:
                what = f"names chunk {chunk_id}, which the layout does not have"
                raise make_error(program, RULE, index, what)
            if not chunks[chunk_id].trainable:
                what = f"touches chunk {chunk_id}, which is frozen"
                raise make_error(program, RULE, index, what)
    for chunk_id, indices in outline.gradients.items():
        if not chunks[chunk_id].trainable:
            what = f"writes a gradient of chunk {chunk_id}, which is frozen"
            raise make_error(program, RULE, indices[0], what)
    _check_tied_sums(outline)
    counted = _chunks_that_count(outline)
    for chunk_id in outline.segment_norms.keys() - counted:
        (index,) = outline.segment_norms[chunk_id]
        what = f"counts chunk {chunk_id} in the norm, which another rank counts"
        raise make_error(program, RULE, index, what)
    for chunk_id in sorted(_chunks_with_gradient(outline)):
        if chunk_id not in outline.gradients:
            raise _missing(program, f"a Backward that writes grad/{chunk_id}")
        if chunk_id not in outline.segment_norms and chunk_id in counted:
            raise _missing(program, f"SEG chunk={chunk_id}")
        if chunk_id not in outline.updates:
            raise _missing(program, f"UPD chunk={chunk_id}")
        last, update = outline.gradients[chunk_id][-1], outline.updates[chunk_id][0]
        if update < last:
            what = (
                f"updates chunk {chunk_id} before its last gradient, which"
                f" {name_task(program, last)} writes"
            )
            raise make_error(program, RULE, update, what)
    for table in (outline.segment_norms, outline.updates):
        for chunk_id, (index,) in table.items():
            if chunk_id not in outline.gradients:
                what = f"needs the gradient of chunk {chunk_id}, which no Backward writes"
                raise make_error(program, RULE, index, what)
    makes_norm = _makes_norm(outline)
    if makes_norm and not outline.grad_norms:
        raise _missing(program, "NORM")
    if outline.grad_norms and not makes_norm:
        what = "makes the global norm, which another rank makes"
        raise make_error(program, RULE, outline.grad_norms[0], what)


def _check_emits(outline: Outline) -> None:
    program, model = outline.program, outline.model
    needed: list[BufferId] = [NORM] if outline.grad_norms else []
    if model is not None:
        losses = [value_id(model.loss, mb) for mb in range(program.num_microbatches)]
        if model.part is not None and program.kind == "train_step":
            needed = [NORM]
            losses = losses if model.loss in model.values else [LOSSES]
        needed += losses
    for buffer in needed:
        if buffer not in outline.emits:
            raise _missing(program, f"EMIT {buffer}")
    if model is not None:
        for buffer, (index,) in outline.emits.items():
            if buffer not in needed:
                what = f"emits {buffer}, which is neither a loss nor the norm"
                raise make_error(program, RULE, index, what)


def _check_tied_sums(outline: Outline) -> None:
    program, model = outline.program, outline.model
    wanted: set[str] = set()
    if model is not None and model.part is not None:
        whole = model.part.whole.parameters
        wanted = {name for name in model.parameters if shared_users(model.part, whole[name])}
    for name in sorted(wanted):
        if name not in outline.tied_sums:
            raise _missing(program, f"TIED parameter={name}")
    for name, (index,) in outline.tied_sums.items():
        if model is not None and name not in wanted:
            what = f"sums {name}, which is not a trained parameter of several ranks"
            raise make_error(program, RULE, index, what)


def _chunks_that_count(outline: Outline) -> set[ChunkId]:
    # The chunks whose gradients count in the norm on this rank.
    model = outline.model
    if model is None and outline.receives:
        return set(outline.segment_norms)
    if model is None or model.part is None:
        return {chunk.id for chunk in outline.program.layout.chunks}
    chunks_of = chunks_by_parameter(outline.program.layout)
    whole = model.part.whole.parameters
    return {
        chunk
        for name, parameter in model.parameters.items()
        if parameter.blocks and counting_rank(model.part, whole[name]) == model.part.rank
        for chunk in chunks_of[name]
    }


def _makes_norm(outline: Outline) -> bool:
    if outline.model is None or outline.model.part is None:
        return bool(outline.gradients) and NORM not in outline.receives
    return outline.model.part.rank == FIRST_RANK


def _check_states(
    outline: Outline, table: Mapping[BufferId, Indices], mnemonic: str, wanted: set[BufferId]
) -> None:
    program = outline.program
    for name in program.buffers:
        if name in wanted and name not in table:
            raise _missing(program, f"{mnemonic} {name}")
    for name, (index,) in table.items():
        if program.buffers[name].home is None:
            what = f"hands over {name}, which has no home: it is no state"
            raise make_error(program, RULE, index, what)
        if name not in wanted:
            what = f"hands over {name}, which a {program.kind} program leaves alone"
            raise make_error(program, RULE, index, what)


def _states(program: Program) -> set[BufferId]:
    return {name for name, buffer in program.buffers.items() if buffer.home is not None}


def _states_in_memory(program: Program) -> set[BufferId]:
    homes = {name: buffer.home for name, buffer in program.buffers.items()}
    return {name for name, home in homes.items() if home in ("device", "host")}


def _trained_states(program: Program) -> set[BufferId]:
    trained = {chunk.id for chunk in program.layout.chunks if chunk.trainable}
    return {state_id(state, chunk) for state in program.layout.dtypes for chunk in trained}


def _check_table(program: Program, table: BlockTable, blocks: Iterable[int], mnemonic: str) -> None:
    wanted = set(blocks)
    has_halves = mnemonic == "B" and any(
        isinstance(program.tasks[index], InputGrad | WeightGrad) for (index,) in table.values()
    )
    for (block, microbatch), (index,) in table.items():
        if not 0 <= microbatch < program.num_microbatches:
            raise _no_such_microbatch(program, index)
        if block not in wanted:
            kind = {"F": "Forward", "B": "Backward"}[mnemonic]
            raise make_error(
                program, RULE, index, f"names block {block}, which has no {kind} in this model"
            )
    for block in sorted(wanted):
        for microbatch in range(program.num_microbatches):
            if (block, microbatch) not in table:
                place = f"block={block} mb={microbatch}"
                halves = f", whole or as I {place} and W {place}," if has_halves else ""
                raise _missing(program, f"{mnemonic} {place}{halves}")


def _blocks_of(model: Model | None, table: BlockTable) -> list[int]:
    if model is None:
        return sorted({block for block, _ in table})
    return [block.id for block in model.blocks]


def _chunks_with_gradient(outline: Outline) -> set[ChunkId]:
    if outline.model is None:
        return set(outline.gradients)
    chunks_of = chunks_by_parameter(outline.program.layout)
    return {
        chunk
        for name, parameter in outline.model.parameters.items()
        if parameter.trainable and parameter.blocks
        for chunk in chunks_of[name]
    }


def _writes_at(program: Program, index: int) -> tuple[BufferId, ...]:
    task = program.tasks[index]
    return task.writes if isinstance(task, Forward) else ()


def _missing(program: Program, task: str) -> RuleError:
    return make_error(program, RULE, None, f"{task} is missing; it must happen exactly once")


def _no_such_microbatch(program: Program, index: int) -> RuleError:
    what = f"names a micro-batch outside 0 to {program.num_microbatches - 1}"
    return make_error(program, RULE, index, what)
