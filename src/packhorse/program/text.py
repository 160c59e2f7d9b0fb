"""The text of a program: one line a task, to be read, diffed, edited and parsed back.

In: a `Program`, or its text. Out: the text, or the same `Program`: parsing what was formatted
gives an equal program, to the byte. The file has a first line with kind and version, then

    program    kind=train_step model=5f0c rank=0 microbatches=2 workspace=chunks
    pools      name, tier, capacity
    buffers    name, size, home, and its pool in each tier where it may lie
    dtypes     the dtype of each state
    chunks     number, start, elements, group, trained or frozen
    slots      parameter, start, elements, shape
    tasks      number, mnemonic, what it names
    end

F is Forward, R Recompute, B Backward, I InputGrad, W WeightGrad, TIED SumTied, SEG SegmentNorm,
PACKN PackNorms, PACKL PackLosses, NORM GradNorm, UPD Update, CP Copy, IMP Import, EXP Export. Task
numbers are for the reader: parsing skips them, so that lines can be moved, added and taken out.
Empty lines and lines that start with `#` are skipped. A character that would break a word is
written as `%` and two hexadecimal digits per byte of its UTF-8, an empty name as `''`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar, get_args

from packhorse.errors import FileFormatError
from packhorse.program import mnemonics
from packhorse.program.buffers import Layout, PoolId
from packhorse.program.declarations import (
    format_buffer,
    format_chunk,
    format_dtype,
    format_pool,
    format_slot,
    parse_buffer,
    parse_chunk,
    parse_dtype,
    parse_pool,
    parse_slot,
)
from packhorse.program.lines import Line, Names, NamesRead, escape_name, find_nearest, unescape_name
from packhorse.program.program import Program, ProgramKind
from packhorse.program.tasks import Task

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

FILE_KIND: Final = "packhorse/program"
FILE_VERSION: Final = 1
KINDS: Final[Mapping[str, ProgramKind]] = {kind: kind for kind in get_args(ProgramKind)}
SECTIONS: Final = ("program", "pools", "buffers", "dtypes", "chunks", "slots", "tasks", "end")


def format_program(program: Program) -> str:
    """Render a program; `parse_program` reads an equal one back."""
    layout = program.layout
    names = Names()
    width = len(str(max(len(program.tasks) - 1, 0)))
    head = (
        f"  kind={program.kind} model={escape_name(program.model)} rank={program.rank}"
        f" microbatches={program.num_microbatches} workspace={escape_name(program.workspace_pool)}"
    )
    parts = (
        (f"{FILE_KIND} {FILE_VERSION}", "", "program", head),
        ("", "pools", *_align(format_pool(pool) for pool in program.pools)),
        ("", "buffers", *_align(format_buffer(buffer) for buffer in program.buffers.values())),
        ("", "dtypes", *_align(format_dtype(*item) for item in layout.dtypes.items())),
        ("", "chunks", *_align(format_chunk(chunk) for chunk in layout.chunks)),
        ("", "slots", *_align(format_slot(slot) for slot in layout.slots.values())),
        ("", "tasks"),
        (
            f"  {index:>{width}}  {mnemonics.format_task(task, names)}"
            for index, task in enumerate(program.tasks)
        ),
        ("end", ""),
    )
    return "\n".join(line for part in parts for line in part)


def format_task(task: Task) -> str:
    """Render one task as it stands on its line, without its number."""
    return mnemonics.format_task(task, Names())


def parse_program(text: str) -> Program:
    """Read a program from its text.

    Raises:
        FileFormatError: another kind or a newer version of file, or a line that cannot be read;
            gives the line, what was found there and the nearest word that would be right.
    """
    sections = _split_sections(text)
    if len(sections["program"]) != 1:
        raise FileFormatError(
            f"the section 'program' has {len(sections['program'])} lines",
            where="the lines after 'program'",
            fix="give it one line: kind=... model=... rank=... microbatches=... workspace=...",
        )
    head = sections["program"][0]
    kind = head.choice("kind", KINDS)
    model = unescape_name(head.field("model"))
    rank = head.integer("rank")
    num_microbatches = head.integer("microbatches")
    workspace_pool = PoolId(unescape_name(head.field("workspace")))
    head.finish()
    names = NamesRead()
    return Program(
        kind=kind,
        model=model,
        rank=rank,
        num_microbatches=num_microbatches,
        pools=tuple(map(parse_pool, sections["pools"])),
        workspace_pool=workspace_pool,
        buffers=_collect(sections["buffers"], parse_buffer, lambda buffer: (buffer.id, buffer)),
        layout=Layout(
            chunks=tuple(map(parse_chunk, sections["chunks"])),
            slots=_collect(sections["slots"], parse_slot, lambda slot: (slot.parameter, slot)),
            dtypes=_collect(sections["dtypes"], parse_dtype, lambda item: item),
        ),
        tasks=tuple(mnemonics.parse_task(line, names) for line in sections["tasks"]),
    )


def _align(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    num_columns = max(map(len, table), default=0)
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(num_columns)]
    return [
        ("  " + "  ".join(word.ljust(widths[i]) for i, word in enumerate(row))).rstrip()
        for row in table
    ]


def _collect(
    lines: list[Line], parse: Callable[[Line], T], item_of: Callable[[T], tuple[K, V]]
) -> dict[K, V]:
    found: dict[K, V] = {}
    for line in lines:
        key, value = item_of(parse(line))
        if key in found:
            raise line.error(f"{key!r} is declared twice", fix="take one of the two out")
        found[key] = value
    return found


def _split_sections(text: str) -> dict[str, list[Line]]:
    lines = text.split("\n")
    _check_first_line(lines[0])
    sections: dict[str, list[Line]] = {}
    current: list[Line] | None = None
    for number, line in enumerate(lines[1:], start=2):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if line[0] in " \t" and current is not None and "end" not in sections:
            current.append(Line.from_text(number, stripped))
        else:
            wanted = SECTIONS[len(sections)] if len(sections) < len(SECTIONS) else None
            if stripped != wanted:
                raise _section_error(number, line, wanted)
            current = sections[stripped] = []
    if "end" not in sections:
        raise FileFormatError(
            f"the program's text is cut short: {SECTIONS[len(sections)]!r} never comes",
            where=f"line {len(lines)}: the end of the text",
            fix="take the whole file, or lower the plan again",
        )
    return sections


def _section_error(number: int, line: str, wanted: str | None) -> FileFormatError:
    shown = line if len(line) <= 100 else line[:97] + "..."
    where = f"line {number}: {shown}"
    if wanted is None:
        return FileFormatError("the text goes on after 'end'", where=where, fix="take it out")
    nearest = find_nearest(line.strip(), SECTIONS)
    hint = f"nearest: {nearest!r}; " if nearest else ""
    return FileFormatError(
        f"found {line.strip()[:40]!r} where the section {wanted!r} starts",
        where=where,
        fix=f"{hint}the sections are {', '.join(SECTIONS)}; their lines start with a blank",
    )


def _check_first_line(line: str) -> None:
    words = line.split()
    where = f"line 1: {line[:100]}"
    fix = f"the first line of a program is '{FILE_KIND} {FILE_VERSION}'"
    if not words or words[0] != FILE_KIND:
        found = repr(words[0]) if words else "an empty line"
        near = " (nearly right)" if words and find_nearest(words[0], (FILE_KIND,)) else ""
        raise FileFormatError(f"found {found}{near}, not {FILE_KIND!r}", where=where, fix=fix)
    version = words[1] if len(words) == 2 else ""
    if not (version.isascii() and version.isdecimal()) or int(version) < 1:
        raise FileFormatError("the version cannot be read", where=where, fix=fix)
    if int(version) > FILE_VERSION:
        raise FileFormatError(
            f"{FILE_KIND} {version} is newer than {FILE_KIND} {FILE_VERSION}, the newest that"
            " this packhorse reads",
            where=where,
            fix="update packhorse, or lower the plan again with this one",
        )
