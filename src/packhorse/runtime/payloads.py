"""What buffers hold that are no states of chunks: values, saved tensors, norms.

In: buffers as tasks create, write, copy and free them. Out: their tensors by name and tier; of one
that lies on the disk its shape alone. Nothing is reserved here, the ledger has done that. Lanes may
call at the same time. In an audit every payload is measured against its declared size, and what is
freed is filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from mmap import mmap
from threading import Lock

import torch
from torch import Tensor

from packhorse.errors import AuditError
from packhorse.graph.code import SavedLayout
from packhorse.graph.liveness import storages_of
from packhorse.program.buffers import Buffer, BufferId, TierName
from packhorse.program.tasks import Copy, Task
from packhorse.runtime.disk import DiskTier
from packhorse.runtime.saved_values import (
    Payload,
    SpareMemory,
    empty_parts,
    map_parts,
    own_tensors,
    put_together,
    take_apart,
)

Place = tuple[BufferId, TierName]


class Payloads:
    """The tensors of buffers, where they lie.

    Args:
        device: of the device tier; the host tier is this process's memory.
        disk: the disk tier.
        room: entered with a task that copies a value to memory while its bytes are taken.
        audit: measure what is kept, spoil what is freed.
        saved: how what blocks save lies in its storages, where it may leave the device.
        spare: where the memory of what came back from the disk goes, and comes from.
    """

    def __init__(
        self,
        device: torch.device,
        disk: DiskTier,
        room: Callable[[Task], AbstractContextManager[None]],
        *,
        audit: bool,
        saved: Mapping[BufferId, SavedLayout],
        spare: SpareMemory,
    ) -> None:
        self._disk = disk
        self._spare = spare
        self._room = room
        self._saved = saved
        self._devices: Mapping[TierName, torch.device] = {
            "device": device,
            "host": torch.device("cpu"),
        }
        self._audit = audit
        self._held: dict[Place, tuple[Tensor, ...]] = {}
        self._lock = Lock()

    def create(self, buffer: BufferId, tier: TierName) -> None:
        """Make an empty place, which is written next."""
        with self._lock:
            self._held[buffer, tier] = ()

    def is_present(self, buffer: BufferId, tier: TierName) -> bool:
        """Whether a tier holds a buffer."""
        return (buffer, tier) in self._held

    def get(self, buffer: BufferId, tier: TierName = "device") -> tuple[Tensor, ...]:
        """The tensors of a buffer that is present."""
        return self._held[buffer, tier]

    def keep(self, buffer: Buffer, payload: tuple[Tensor, ...], tier: TierName = "device") -> None:
        """Write a buffer that was created.

        Raises:
            AuditError: it was not, or its bytes are not those that the program declares.
        """
        if not self.is_present(buffer.id, tier):
            raise AuditError(
                f"{buffer.id} was made by a task that does not declare it",
                fix="this is a bug in the compiler, or the program was changed by hand",
            )
        with self._lock:
            self._held[buffer.id, tier] = payload
        if self._audit:
            self._measure(buffer, payload, tier)

    def copy(self, buffer: Buffer, task: Copy) -> None:
        """Copy a buffer to another tier; blocks until it is there.

        To the disk may go what a block saved, and a single tensor with bytes of its own, such as a
        value.

        Raises:
            AuditError: the source does not hold it.
        """
        if not self.is_present(task.buffer, task.source):
            raise AuditError(
                f"{task.buffer} is copied from {task.source}, but it is not there",
                fix="run the program that was verified",
            )
        if task.target == "disk":
            self._copy(buffer, task)
            return
        layout = self._saved.get(task.buffer) if task.source == "disk" else None
        memory = None if layout is None else self._spare.take(layout)
        if memory is not None:
            # It takes no room that the process does not have already.
            self._copy(buffer, task, memory)
            return
        with self._room(task):
            self._copy(buffer, task)

    def _copy(self, buffer: Buffer, task: Copy, memory: mmap | None = None) -> None:
        source = self.get(task.buffer, task.source)
        if task.buffer in self._saved:
            moved = self._move_saved(task, source, self._saved[task.buffer], memory)
            self.keep(buffer, moved, task.target)
            return
        if task.target == "disk":
            (tensor,) = source
            self._write(buffer, tensor)
            return
        device = self._devices[task.target]
        if task.source == "disk":
            (shape,) = source
            found = torch.empty_like(shape, device="cpu")
            self._disk.read(buffer.id, found.data_ptr())
            self.keep(buffer, (found.to(device),), task.target)
            return
        self.keep(buffer, tuple(_copy_tensor(tensor, device) for tensor in source), task.target)

    def _move_saved(
        self, task: Copy, source: Payload, layout: SavedLayout, memory: mmap | None
    ) -> Payload:
        """Copy the storages that a buffer owns, each once, and lay its tensors over the copies."""
        if task.source == "disk":
            whole, parts = map_parts(layout, self._spare, memory)
            self._disk.read_parts(task.buffer, whole.data_ptr())
            parts = tuple(part.to(self._devices[task.target]) for part in parts)
            return put_together(source, layout, parts)
        parts = take_apart(task.buffer, source, layout)
        if task.target != "disk":
            device = self._devices[task.target]
            return put_together(source, layout, [_copy_tensor(part, device) for part in parts])
        for index, part in enumerate(parts):
            here = part.cpu()
            self._disk.write_part(task.buffer, index, here.data_ptr())
        return put_together(source, layout, empty_parts(layout, torch.device("meta")))

    def _write(self, buffer: Buffer, tensor: Tensor) -> None:
        assert tensor.storage_offset() == 0, f"{buffer.id} does not begin with its bytes"
        assert tensor.untyped_storage().nbytes() == buffer.size_bytes, f"{buffer.id} is a part"
        here = tensor.cpu()
        self._disk.write(buffer.id, here.data_ptr())
        self.keep(buffer, (torch.empty_like(here, device="meta"),), "disk")

    def free(self, buffer: BufferId, tier: TierName) -> None:
        """Drop a buffer that is present."""
        with self._lock:
            payload = self._held.pop((buffer, tier))
        if self._audit:
            self._spoil(buffer, payload)
        # With the last name of them its tensors go.
        del payload
        self._spare.settle()

    def _spoil(self, buffer: BufferId, payload: Payload) -> None:
        shared = self._storages_beside()
        for tensor in own_tensors(payload, self._saved.get(buffer)):
            own = not any(key in shared for key, _ in storages_of(tensor))
            if tensor.is_floating_point() and own:
                tensor.fill_(float("nan"))

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._held.clear()

    def _measure(self, buffer: Buffer, payload: tuple[Tensor, ...], tier: TierName) -> None:
        others = self._storages_beside((buffer.id, tier), (_giver_of(buffer.id), tier))
        own = own_tensors(payload, self._saved.get(buffer.id))
        sizes = {key: size for tensor in own for key, size in storages_of(tensor)}
        held = sum(size for key, size in sizes.items() if key not in others)
        if held != buffer.size_bytes:
            raise AuditError(
                f"{buffer.id} holds {held} bytes, its program declares {buffer.size_bytes}",
                fix="trace the model and make the plan again",
            )

    def _storages_beside(self, *places: Place) -> set[int]:
        with self._lock:
            payloads = [payload for held, payload in self._held.items() if held not in places]
        tensors: list[Tensor] = [tensor for payload in payloads for tensor in payload]
        return {key for tensor in tensors for key, _ in storages_of(tensor)}


def _giver_of(buffer: BufferId) -> BufferId:
    """Whose bytes a buffer may take over: a stash has some of what the block saved."""
    kind, _, rest = buffer.partition("/")
    return BufferId(f"saved/{rest}") if kind == "stash" else buffer


def _copy_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    # To and from pinned memory a copy runs at the link's rate, beside what the device computes.
    pinned = tensor.is_cuda and device.type == "cpu"
    return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)
