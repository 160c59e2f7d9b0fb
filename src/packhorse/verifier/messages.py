"""Rule `messages`: what crosses between ranks does so once, in its turn, and to the right one.

On one rank, with a model: every buffer that another rank makes or needs has the life that the whole
model gives it, and nothing else is sent or received. Over all ranks: the sends of a channel and the
receives that answer them name the same buffers of the same size, one to one, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Final

from packhorse.program.buffers import BufferId
from packhorse.program.program import Program
from packhorse.program.tasks import Recv, Send, accesses_of
from packhorse.verifier.failures import make_error
from packhorse.verifier.lives import MADE, Event, Life, derive_lives
from packhorse.verifier.outline import Outline

RULE: Final = "messages"


def check_lives(outline: Outline) -> None:
    """Check each message of a program against the model, if it is known."""
    program, model = outline.program, outline.model
    if model is None:
        return
    if model.part is None:
        crossing = [at for at, task in enumerate(program.tasks) if isinstance(task, Send | Recv)]
        if crossing:
            what = "is a message, but the whole model is on one rank"
            raise make_error(program, RULE, crossing[0], what)
        return
    wanted = derive_lives(model.part, program.kind, program.num_microbatches)
    found: dict[BufferId, list[tuple[Event, int]]] = {name: [] for name in wanted}
    for index, task in enumerate(program.tasks):
        if isinstance(task, Send | Recv):
            if task.buffer not in found:
                what = f"names {task.buffer}, which does not cross between these ranks"
                raise make_error(program, RULE, index, what)
            happening = "sent" if isinstance(task, Send) else "received"
            found[task.buffer].append((Event(happening, task.peer), index))
            continue
        _, _, _, written = accesses_of(task)
        for buffer in written:
            if buffer in found:
                found[buffer].append((MADE, index))
    # Most micro-batches are alike.
    agreed: set[tuple[Life, Life]] = set()
    for buffer, life in wanted.items():
        pair = (life, tuple([event for event, _ in found[buffer]]))
        if pair not in agreed:
            _compare(program, buffer, life, found[buffer])
            agreed.add(pair)


def check_channels(programs: Sequence[Program]) -> None:
    """Check that both ends of every channel have the same messages in the same order."""
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for program in programs:
        for index, task in enumerate(program.tasks):
            match task:
                case Send():
                    _check_peer(programs, program, index, task.peer)
                    sent.setdefault((program.rank, task.peer), []).append(index)
                case Recv():
                    _check_peer(programs, program, index, task.peer)
                    received.setdefault((task.peer, program.rank), []).append(index)
                case _:
                    pass
    for channel in {**sent, **received}:
        source, target = programs[channel[0]], programs[channel[1]]
        for at, answer in zip_longest(sent.get(channel, ()), received.get(channel, ())):
            _check_pair(source, target, at, answer)


def _check_peer(programs: Sequence[Program], program: Program, index: int, peer: int) -> None:
    if peer == program.rank or not 0 <= peer < len(programs):
        what = f"names rank {peer}; from rank {program.rank} of {len(programs)} there is none"
        raise make_error(program, RULE, index, what)


def _check_pair(source: Program, target: Program, at: int | None, answer: int | None) -> None:
    if at is None:
        assert answer is not None
        what = f"waits for a message that rank {source.rank} never sends"
        raise make_error(target, RULE, answer, what)
    name = _buffer_at(source, at)
    if answer is None:
        what = f"sends {name}, which rank {target.rank} never takes"
        raise make_error(source, RULE, at, what)
    other = _buffer_at(target, answer)
    if name != other:
        what = (
            f"takes {other}, but the message that rank {source.rank} sends in that place is {name}"
        )
        raise make_error(target, RULE, answer, what)
    sizes = source.buffers[name].size_bytes, target.buffers[name].size_bytes
    if sizes[0] != sizes[1]:
        what = f"takes {name} in {sizes[1]} bytes; rank {source.rank} sends {sizes[0]}"
        raise make_error(target, RULE, answer, what)


def _buffer_at(program: Program, index: int) -> BufferId:
    task = program.tasks[index]
    assert isinstance(task, Send | Recv)
    return task.buffer


def _compare(
    program: Program, buffer: BufferId, life: Life, found: Sequence[tuple[Event, int]]
) -> None:
    # A value goes to several ranks in any order.
    events = [event for event, _ in found]
    if _in_order(events) == _in_order(life):
        return
    at = next(
        (
            index
            for place, (event, index) in enumerate(found)
            if place >= len(life) or event not in life[place:]
        ),
        found[-1][1] if found else None,
    )
    what = (
        f"is where the life of {buffer} goes wrong: it is {_words(events)}; it has to be"
        f" {_words(life)}"
    )
    if at is None:
        what = f"{buffer} is never there; it has to be {_words(life)}"
    raise make_error(program, RULE, at, what)


def _in_order(life: Sequence[Event]) -> list[Event]:
    ordered: list[Event] = []
    run: list[Event] = []
    for event in (*life, None):
        if event is not None and event.happening == "sent":
            run.append(event)
            continue
        ordered += sorted(run, key=lambda each: each.peer or 0)
        run = []
        if event is not None:
            ordered.append(event)
    return ordered


def _words(life: Sequence[Event]) -> str:
    if not life:
        return "nothing"
    names: Mapping[str, str] = {"sent": "sent to", "received": "received from"}
    return ", ".join(
        event.happening if event.peer is None else f"{names[event.happening]} {event.peer}"
        for event in life
    )
