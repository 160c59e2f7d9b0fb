"""The digest of a program: ranks compare it before step 1, a proof names it.

In: a program. Out: 32 hexadecimal digits, equal for equal programs only.

What is digested is all that a program says, as tuples of words and numbers written in ASCII. Words
are quoted and escaped there, so no two programs are written alike; that is several times as fast as
the text for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from hashlib import blake2b
from operator import attrgetter
from typing import Final, get_args

from packhorse.program.buffers import Chunk, Pool, Slot
from packhorse.program.program import Program
from packhorse.program.tasks import Task

VERSION: Final = 2
"""Of what is digested: programs have equal digests only by the same version."""

# Tasks are written so many at a time.
_BATCH: Final = 1024


def digest_program(program: Program) -> str:
    """Digest a program: BLAKE2b of all that it says, 16 bytes, in hexadecimal."""
    digest = blake2b(digest_size=16)
    for part in _list_parts(program):
        digest.update(ascii(part).encode("ascii"))
    return digest.hexdigest()


def _list_parts(program: Program) -> Iterator[tuple[object, ...]]:
    layout = program.layout
    yield (
        "packhorse/program",
        VERSION,
        program.kind,
        program.model,
        program.rank,
        program.num_microbatches,
        program.workspace_pool,
    )
    yield tuple(map(_fields_of(Pool), program.pools))
    yield tuple(
        (name, each.id, each.size_bytes, each.home, *each.pools.items())
        for name, each in program.buffers.items()
    )
    yield tuple(layout.dtypes.items())
    yield tuple(map(_fields_of(Chunk), layout.chunks))
    yield tuple(zip(layout.slots, map(_fields_of(Slot), layout.slots.values()), strict=True))
    tasks = program.tasks
    for first in range(0, len(tasks), _BATCH):
        yield tuple([_WORDS_OF[type(task)](task) for task in tasks[first : first + _BATCH]])


def _fields_of(kind: type) -> Callable[[object], object]:
    return attrgetter(*(field.name for field in fields(kind)))


def _words_of(kind: type[Task]) -> Callable[[Task], object]:
    values = _fields_of(kind)
    name = kind.__name__
    return lambda task: (name, values(task))


_WORDS_OF: Final[Mapping[type[Task], Callable[[Task], object]]] = {
    kind: _words_of(kind) for kind in get_args(Task)
}
