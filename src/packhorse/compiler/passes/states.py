"""Load and save: every state with a home passes through the device, one at a time.

In: the states in order and the table of buffers. Out: the tasks of a load or save program. At
most one state that lives elsewhere is in the device tier at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packhorse.program.buffers import Buffer, BufferId
from packhorse.program.tasks import Copy, Export, Free, Import, Task


def order_load(states: Iterable[BufferId], buffers: Mapping[BufferId, Buffer]) -> tuple[Task, ...]:
    """Import every state and take it to its home."""
    tasks: list[Task] = []
    for state in states:
        tasks.append(Import(buffer=state))
        home = buffers[state].home
        if home is not None and home != "device":
            tasks.append(Copy(buffer=state, source="device", target=home))
            tasks.append(Free(buffer=state, tier="device"))
    return tuple(tasks)


def order_save(states: Iterable[BufferId], buffers: Mapping[BufferId, Buffer]) -> tuple[Task, ...]:
    """Bring every state from its home and export it."""
    tasks: list[Task] = []
    for state in states:
        home = buffers[state].home
        if home is None or home == "device":
            tasks.append(Export(buffer=state))
            continue
        tasks.append(Copy(buffer=state, source=home, target="device"))
        tasks.append(Export(buffer=state))
        tasks.append(Free(buffer=state, tier="device"))
    return tuple(tasks)
