"""Which buffers take turns in one place of the scratch file, and which lie there in parts.

In: the programs that run over the file, and the trace of their blocks. Out: `DiskPlaces`.

A value of a micro-batch (`value/h3@0`, `saved/3@0`) may give its place to the same value of a later
one (`value/h3@1`) where in every program no task between its first and its last touches the other.
Both are made and used on the compute lane, in order, so the last use of the one, and the read that
comes before it, are over before the other is made, and so before it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from packhorse.graph.code import SavedLayout
from packhorse.graph.trace import Traced
from packhorse.program.buffers import BufferId
from packhorse.program.program import Program
from packhorse.program.tasks import reads_of, writes_of
from packhorse.runtime.saved_values import find_saved_layouts

_TAKING_TURNS: Final = ("value", "saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlaces:
    """How buffers without a home lie on the disk.

    `saved` tells of what blocks save the storages, each a part of its place at an aligned offset;
    `turns` names for a buffer the one whose place it takes.
    """

    saved: Mapping[BufferId, SavedLayout]
    turns: Mapping[BufferId, BufferId]


NO_PLACES: Final = DiskPlaces(saved={}, turns={})


def find_places(traced: Traced, programs: Collection[Program]) -> DiskPlaces:
    """Find who takes turns, and how what blocks save lies in its storages."""
    buffers = [buffer for program in programs for buffer in program.buffers.values()]
    return DiskPlaces(saved=find_saved_layouts(traced, buffers), turns=find_turns(programs))


def find_turns(programs: Collection[Program]) -> Mapping[BufferId, BufferId]:
    """For each buffer that takes another's place in the file, that other one."""
    spans = [_find_spans(program) for program in programs]
    families: dict[str, list[BufferId]] = {}
    for name in dict.fromkeys(name for found in spans for name in found):
        families.setdefault(name.rpartition("@")[0], []).append(name)
    turns: dict[BufferId, BufferId] = {}
    for family in families.values():
        places: list[list[BufferId]] = []
        for name in sorted(family, key=_microbatch):
            free = (place for place in places if not _meets(name, place, spans))
            place = next(free, None)
            if place is None:
                places.append([name])
            else:
                turns[name] = place[0]
                place.append(name)
    return turns


def _find_spans(program: Program) -> Mapping[BufferId, tuple[int, int]]:
    # The first and the last task that touch a value that may lie on the disk.
    waiting = {
        name
        for name, buffer in program.buffers.items()
        if "disk" in buffer.pools and name.partition("/")[0] in _TAKING_TURNS
    }
    spans: dict[BufferId, tuple[int, int]] = {}
    if not waiting:
        return spans
    for position, task in enumerate(program.tasks):
        for name, _ in (*reads_of(task), *writes_of(task)):
            if name in waiting:
                spans[name] = (spans.get(name, (position,))[0], position)
    return spans


def _microbatch(name: BufferId) -> int:
    return int(name.rpartition("@")[2])


def _meets(
    name: BufferId, others: Iterable[BufferId], spans: Iterable[Mapping[BufferId, tuple[int, int]]]
) -> bool:
    found = [(spans_of[name], spans_of) for spans_of in spans if name in spans_of]
    return any(
        first <= spans_of[other][1] and spans_of[other][0] <= last
        for other in others
        for (first, last), spans_of in found
        if other in spans_of
    )
