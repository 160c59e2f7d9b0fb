"""Writes a safetensors file whose tensors arrive piece by piece, in any order.

In: the specifications of all tensors at once, then pieces with the element where they begin. Out:
a file on the disk and its checksum. Memory: one block of 1 MiB, whatever the tensors' sizes; the
page cache is emptied on the way, so that a container's limit is not filled by a save.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from packhorse.checkpoint.checksums import RangeChecksum
from packhorse.checkpoint.header import FileLayout, TensorPlace, TensorSpec, lay_out_file
from packhorse.checkpoint.manifest import FileEntry
from packhorse.model.spec import ITEM_BYTES
from packhorse.storage.space import explain_failure
from packhorse.units import MIB, format_bytes

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
BLOCK_BYTES: Final = MIB
_SYNC_BYTES: Final = 64 * MIB
METADATA: Final[Mapping[str, str]] = {"format": "pt"}  # transformers asks for it


class TensorFileWriter:
    """An open safetensors file.

    The room is allocated at once, so a full disk shows before the first piece. Not to be shared
    between threads. Leaving the `with` block closes the file; `finish` makes it durable.

    Args:
        path: must not exist.

    Raises:
        StorageError: the disk is full or unwritable.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self._path = path
        self._layout: FileLayout = lay_out_file(specs, METADATA)
        self._checksum = RangeChecksum()
        self._unsynced_bytes = 0
        self._descriptor = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o666)
            os.posix_fallocate(self._descriptor, 0, self._layout.size_bytes)
        except OSError as error:
            self.close()
            doing = f"allocate {format_bytes(self._layout.size_bytes)}"
            raise explain_failure(error, path, doing) from error
        self._write_block(memoryview(self._layout.head), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Name of the file in its folder."""
        return self._path.name

    @property
    def places(self) -> Mapping[str, TensorPlace]:
        """Where each tensor lies."""
        return self._layout.places

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write a piece of a tensor, converted to the file's dtype on the way.

        Blocks until the bytes are handed to the system; `values` may change afterwards.

        Args:
            start: element of the flat tensor where the piece begins.
            values: contiguous, of any dtype and device.

        Raises:
            StorageError: the disk is full or fails.
            ValueError: no such tensor, or the piece lies outside of it or was written before.
        """
        place = self._layout.places.get(name)
        if place is None:
            raise ValueError(f"{self._path.name} has no tensor {name!r}")
        flat = values.detach().reshape(-1)
        if start < 0 or start + flat.numel() > place.num_elements:
            raise ValueError(
                f"elements {start} to {start + flat.numel()} are outside of {name!r}, which has"
                f" {place.num_elements}"
            )
        item_bytes = ITEM_BYTES[place.dtype]
        block = bytearray(min(BLOCK_BYTES, max(1, flat.numel() * item_bytes)))
        if not flat.numel():
            return
        staged = torch.frombuffer(block, dtype=TORCH_DTYPES[place.dtype])
        for first in range(0, flat.numel(), staged.numel()):
            part = flat[first : first + staged.numel()]
            staged[: part.numel()].copy_(part)
            view = memoryview(block)[: part.numel() * item_bytes]
            self._write_block(view, place.offset_bytes + (start + first) * item_bytes)

    def finish(self) -> FileEntry:
        """Bring the file to the disk and close it.

        Raises:
            StorageError: the disk fails.
            ValueError: part of a tensor was never written.
        """
        gap = self._checksum.find_gap(self._layout.size_bytes)
        if gap is not None:
            raise ValueError(self._explain_gap(*gap))
        self._sync()
        self.close()
        return FileEntry(
            name=self._path.name,
            size_bytes=self._layout.size_bytes,
            crc32=self._checksum.result(),
        )

    def close(self) -> None:
        """Close the file as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_block(self, view: memoryview, offset_bytes: int) -> None:
        self._checksum.add(offset_bytes, view)
        cursor = 0
        try:
            while cursor < len(view):
                cursor += os.pwrite(self._descriptor, view[cursor:], offset_bytes + cursor)
        except OSError as error:
            doing = f"write {format_bytes(len(view))} at byte {offset_bytes}"
            raise explain_failure(error, self._path, doing) from error
        self._unsynced_bytes += len(view)
        if self._unsynced_bytes >= _SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise explain_failure(error, self._path, "bring written data to the disk") from error
        self._unsynced_bytes = 0

    def _explain_gap(self, start: int, stop: int) -> str:
        for name, place in self._layout.places.items():
            if place.offset_bytes <= start < place.offset_bytes + place.size_bytes:
                item_bytes = ITEM_BYTES[place.dtype]
                first = (start - place.offset_bytes) // item_bytes
                last = (min(stop, place.offset_bytes + place.size_bytes) - place.offset_bytes) - 1
                return (
                    f"{self._path.name} is not complete: elements {first} to"
                    f" {last // item_bytes} of {name!r} were never written"
                )
        return f"{self._path.name} is not complete: bytes {start} to {stop} were never written"
