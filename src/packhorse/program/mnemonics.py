"""Tasks as lines: `F  block=3 mb=0  reads=param/3,value/h2@0  writes=value/h3@0  work=1536KiB`.

In: a task, or its line. Out: its words, or the task; `format_task` and `parse_task` are inverse.
A missing list of reads or writes is an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, assert_never

from packhorse.program.buffers import BufferId, ChunkId
from packhorse.program.declarations import TIERS
from packhorse.program.lines import Line, Names, NamesRead, escape_name, unescape_name
from packhorse.program.tasks import (
    Backward,
    BlockTask,
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
from packhorse.units import format_exact_bytes

BLOCK_TASKS: Final[Mapping[str, type[BlockTask]]] = MappingProxyType(
    {"F": Forward, "R": Recompute, "B": Backward, "I": InputGrad, "W": WeightGrad}
)
BUFFER_TASKS: Final[Mapping[str, type[Emit] | type[Import] | type[Export]]] = MappingProxyType(
    {"EMIT": Emit, "IMP": Import, "EXP": Export}
)
PEER_TASKS: Final[Mapping[str, type[Send] | type[Recv]]] = MappingProxyType(
    {"SEND": Send, "RECV": Recv}
)
LIST_TASKS: Final[Mapping[str, type[PackNorms] | type[PackLosses] | type[GradNorm]]] = (
    MappingProxyType({"PACKN": PackNorms, "PACKL": PackLosses, "NORM": GradNorm})
)
MNEMONICS: Final = (
    *BLOCK_TASKS,
    "FEED",
    "TIED",
    "SEG",
    *LIST_TASKS,
    "UPD",
    "CP",
    "FREE",
    *PEER_TASKS,
    *BUFFER_TASKS,
)
HEAD_WIDTH: Final = 18


def format_task(task: Task, names: Names) -> str:
    """Write a task as it stands on its line, without its number."""
    match task:
        case Feed():
            return _join("FEED", f"mb={task.microbatch}", names.field("writes", task.writes))
        case Forward():
            return _join("F", _block_of(task), _accesses_of(task, names))
        case Recompute():
            return _join("R", _block_of(task), _accesses_of(task, names))
        case Backward():
            return _join("B", _block_of(task), _accesses_of(task, names))
        case InputGrad():
            return _join("I", _block_of(task), _accesses_of(task, names))
        case WeightGrad():
            return _join("W", _block_of(task), _accesses_of(task, names))
        case SegmentNorm():
            return _join("SEG", f"chunk={task.chunk}", _accesses_of(task, names))
        case SumTied():
            head = f"parameter={escape_name(task.parameter)}"
            return _join("TIED", head, _lists_of(task, names))
        case PackNorms():
            return _join("PACKN", "", _lists_of(task, names))
        case PackLosses():
            return _join("PACKL", "", _lists_of(task, names))
        case GradNorm():
            return _join("NORM", "", _lists_of(task, names))
        case Update():
            head = f"chunk={task.chunk} at={task.where}"
            return _join("UPD", head, _accesses_of(task, names))
        case Copy():
            return _join("CP", names.escape(task.buffer), f"  {task.source}>{task.target}")
        case Free():
            return _join("FREE", names.escape(task.buffer), f"  {task.tier}")
        case Send():
            return _join("SEND", names.escape(task.buffer), f"  peer={task.peer}")
        case Recv():
            return _join("RECV", names.escape(task.buffer), f"  peer={task.peer}")
        case Emit():
            return _join("EMIT", names.escape(task.buffer), "")
        case Import():
            return _join("IMP", names.escape(task.buffer), "")
        case Export():
            return _join("EXP", names.escape(task.buffer), "")
        case _:
            assert_never(task)


def parse_task(line: Line, names: NamesRead) -> Task:
    """Read a task; a number at the start of its line is skipped."""
    if line.words and line.words[-1].isdecimal():
        line.words.pop()
    mnemonic = line.word("the task's mnemonic")
    task = _parse_by_mnemonic(mnemonic, line, names)
    line.finish()
    return task


def _join(mnemonic: str, head: str, rest: str) -> str:
    return f"{mnemonic:<4}  {head:<{HEAD_WIDTH}}{rest}".rstrip()


def _block_of(task: BlockTask) -> str:
    return f"block={task.block} mb={task.microbatch}"


def _accesses_of(task: BlockTask | SegmentNorm | Update, names: Names) -> str:
    reads = names.field("reads", task.reads)
    writes = names.field("writes", task.writes)
    return f"{reads}{writes}  work={format_exact_bytes(task.workspace_bytes)}"


def _lists_of(task: SumTied | PackNorms | PackLosses | GradNorm, names: Names) -> str:
    return names.field("reads", task.reads) + names.field("writes", task.writes)


def _parse_by_mnemonic(mnemonic: str, line: Line, names: NamesRead) -> Task:
    if mnemonic in BLOCK_TASKS:
        return BLOCK_TASKS[mnemonic](
            block=line.integer("block"),
            microbatch=line.integer("mb"),
            reads=_parse_list("reads", line, names),
            writes=_parse_list("writes", line, names),
            workspace_bytes=_parse_work(line),
        )
    if mnemonic in BUFFER_TASKS:
        return BUFFER_TASKS[mnemonic](buffer=_parse_buffer(line, names))
    if mnemonic in PEER_TASKS:
        buffer = _parse_buffer(line, names)
        return PEER_TASKS[mnemonic](buffer=buffer, peer=line.integer("peer"))
    if mnemonic in LIST_TASKS:
        reads = _parse_list("reads", line, names)
        return LIST_TASKS[mnemonic](reads=reads, writes=_parse_list("writes", line, names))
    match mnemonic:
        case "CP":
            buffer = _parse_buffer(line, names)
            source, arrow, target = line.word("source>target").partition(">")
            if not arrow:
                raise line.error(f"{source!r} has no '>'", fix="write it as device>disk")
            return Copy(
                buffer=buffer,
                source=line.as_choice(source, "the source tier", TIERS),
                target=line.as_choice(target, "the target tier", TIERS),
            )
        case "FREE":
            buffer = _parse_buffer(line, names)
            return Free(buffer=buffer, tier=line.as_choice(line.word("the tier"), "tier", TIERS))
        case "UPD":
            return Update(
                chunk=ChunkId(line.integer("chunk")),
                where=line.choice("at", TIERS),
                reads=_parse_list("reads", line, names),
                writes=_parse_list("writes", line, names),
                workspace_bytes=_parse_work(line),
            )
        case "FEED":
            microbatch = line.integer("mb")
            return Feed(microbatch=microbatch, writes=_parse_list("writes", line, names))
        case "SEG":
            return SegmentNorm(
                chunk=ChunkId(line.integer("chunk")),
                reads=_parse_list("reads", line, names),
                writes=_parse_list("writes", line, names),
                workspace_bytes=_parse_work(line),
            )
        case "TIED":
            return SumTied(
                parameter=unescape_name(line.field("parameter")),
                reads=_parse_list("reads", line, names),
                writes=_parse_list("writes", line, names),
            )
        case _:
            raise line.unknown(mnemonic, "the task's mnemonic", MNEMONICS)


def _parse_buffer(line: Line, names: NamesRead) -> BufferId:
    return names.unescape(line.word("the buffer's name"))


def _parse_list(key: str, line: Line, names: NamesRead) -> tuple[BufferId, ...]:
    words = line.optional(key)
    if words is None:
        return ()
    if not all(parts := words.split(",")):
        raise line.error(f"{key}={words} names an empty buffer", fix="take the comma out")
    return tuple(map(names.unescape, parts))


def _parse_work(line: Line) -> int:
    return line.as_bytes(line.field("work"), "work")
