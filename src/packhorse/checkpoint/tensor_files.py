"""Reads tensors from safetensors files, any range of elements at a time.

In: a folder with model.safetensors or its shards, or files by path. Out: ranges of tensors in the
caller's memory and dtype. Memory: one block of 1 MiB for each call; files are read, not mapped, so
what is read does not count as this process's memory afterwards.

Tied names: a file may hold a tied tensor under any one of its names. One that holds several with
different values is refused, because a tied model has no place for two values.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from packhorse.checkpoint.checksums import expect_sequential_reads
from packhorse.checkpoint.header import TensorPlace, read_header
from packhorse.checkpoint.json_values import is_object, parse_json
from packhorse.checkpoint.tensor_writer import BLOCK_BYTES, TORCH_DTYPES
from packhorse.errors import FileFormatError
from packhorse.model.spec import ITEM_BYTES

MODEL_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
_PICKLE_NAMES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor and the open file that holds it."""

    path: Path
    descriptor: int
    place: TensorPlace


class TensorFiles:
    """Open safetensors files, read as one. May be shared between threads.

    Leaving the `with` block closes the files.
    """

    def __init__(self, paths: Iterable[Path], *, ties: Mapping[str, Sequence[str]]) -> None:
        """Open files and check their headers.

        Args:
            paths: each tensor lies in one of them.
            ties: the other names of a tensor, by the name that it is asked by.

        Raises:
            FileFormatError: a file is missing or damaged, a tensor is in two files, or tied names
                hold different values.
        """
        self._exit = ExitStack()
        self._stored: dict[str, _Stored] = {}
        with ExitStack() as on_failure:
            on_failure.callback(self._exit.close)
            for path in paths:
                self._add(path)
            for name, others in ties.items():
                self._tie(name, others)
            on_failure.pop_all()

    @classmethod
    def open(cls, folder: Path, *, ties: Mapping[str, Sequence[str]] | None = None) -> Self:
        """Open a model folder, or a single safetensors file.

        Raises:
            FileFormatError: there are no safetensors files, one is missing or damaged, or tied
                names hold different values.
        """
        return cls(find_model_files(folder), ties=ties or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._exit.close()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that can be read."""
        return tuple(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def place(self, name: str) -> TensorPlace:
        """Give dtype, shape and place of a tensor.

        Raises:
            FileFormatError: there is no such tensor.
        """
        return self._find(name).place

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a tensor of another shape.

        Raises:
            FileFormatError: there is no such tensor, or its shape differs.
        """
        stored = self._find(name)
        if stored.place.shape != tuple(shape):
            raise FileFormatError(
                f"tensor {name!r} has shape {list(stored.place.shape)}, the model needs"
                f" {list(shape)}",
                where=str(stored.path),
                fix="use weights and a config of the same model",
            )

    def read_into(self, name: str, start: int, stop: int, destination: Tensor) -> None:
        """Read elements `start` to `stop` of the flat tensor, converted to the destination's dtype.

        Blocks until they are there.

        Args:
            destination: contiguous, `stop - start` elements, any float dtype and device.

        Raises:
            FileFormatError: there is no such tensor, the file became shorter, or its values are
                of a dtype that cannot be converted.
            ValueError: the range lies outside of the tensor, or the destination has another size.
        """
        stored = self._find(name)
        place = stored.place
        if not 0 <= start <= stop <= place.num_elements or destination.numel() != stop - start:
            raise ValueError(
                f"cannot read elements {start} to {stop} of {name!r} ({place.num_elements}) into"
                f" {destination.numel()} elements"
            )
        if place.dtype not in TORCH_DTYPES:
            raise FileFormatError(
                f"tensor {name!r} is stored as {place.dtype}, which cannot be read",
                where=str(stored.path),
                fix="use the model's float32, bfloat16 or float16 weights",
            )
        if start == stop:
            return
        item_bytes = ITEM_BYTES[place.dtype]
        flat = destination.detach().view(-1)
        block = bytearray(min(BLOCK_BYTES, (stop - start) * item_bytes))
        staged = torch.frombuffer(block, dtype=TORCH_DTYPES[place.dtype])
        for first in range(0, stop - start, staged.numel()):
            size = min(staged.numel(), stop - start - first)
            view = memoryview(block)[: size * item_bytes]
            _read_exactly(stored, view, place.offset_bytes + (start + first) * item_bytes)
            flat[first : first + size].copy_(staged[:size])

    def _add(self, path: Path) -> None:
        places = read_header(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._exit.callback(os.close, descriptor)
        expect_sequential_reads(descriptor)
        for name, place in places.items():
            if name in self._stored:
                raise FileFormatError(
                    f"tensor {name!r} is in two files",
                    where=f"{self._stored[name].path}\n{path}",
                    fix="remove the files that do not belong to this model",
                )
            self._stored[name] = _Stored(path=path, descriptor=descriptor, place=place)

    def _tie(self, name: str, others: Sequence[str]) -> None:
        present = [other for other in (name, *others) if other in self._stored]
        for other in present[1:]:
            self._check_same(present[0], other)
        if present:
            for other in (name, *others):
                self._stored.setdefault(other, self._stored[present[0]])

    def _check_same(self, first: str, second: str) -> None:
        one, two = self._stored[first], self._stored[second]
        same = one.place.shape == two.place.shape and one.place.dtype == two.place.dtype
        if same:
            blocks = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
            for offset in range(0, one.place.size_bytes, BLOCK_BYTES):
                size = min(BLOCK_BYTES, one.place.size_bytes - offset)
                views = memoryview(blocks[0])[:size], memoryview(blocks[1])[:size]
                _read_exactly(one, views[0], one.place.offset_bytes + offset)
                _read_exactly(two, views[1], two.place.offset_bytes + offset)
                if views[0] != views[1]:
                    same = False
                    break
        if not same:
            raise FileFormatError(
                f"{first!r} and {second!r} are one parameter of the model, but have different"
                " values here",
                where=str(one.path) if one.path == two.path else f"{one.path}\n{two.path}",
                fix="set tie_word_embeddings to false in config.json, or remove one of the two",
            )

    def _find(self, name: str) -> _Stored:
        stored = self._stored.get(name)
        if stored is None:
            paths = sorted({str(found.path) for found in self._stored.values()})
            near = difflib.get_close_matches(name, self._stored, n=1)
            raise FileFormatError(
                f"tensor {name!r} is missing",
                where="\n".join(paths[:4]),
                fix=f"the nearest name there is {near[0]!r}"
                if near
                else "use weights of the model",
            )
        return stored


def find_model_files(folder: Path) -> tuple[Path, ...]:
    """List the safetensors files of a model folder, or the one file that `folder` is.

    Raises:
        FileFormatError: there are none, or a shard of the index is missing.
    """
    if folder.is_file() or folder.suffix == ".safetensors":
        return (folder,)
    if (folder / MODEL_NAME).exists():
        return (folder / MODEL_NAME,)
    index = folder / INDEX_NAME
    if index.exists():
        return _read_index(index)
    pickles = [name for name in _PICKLE_NAMES if (folder / name).exists()]
    if pickles:
        raise FileFormatError(
            f"{pickles[0]} holds pickled weights, which run code when they are opened",
            where=str(folder),
            fix="convert once where you trust the file: from transformers import"
            " AutoModelForCausalLM;"
            f'\nAutoModelForCausalLM.from_pretrained("{folder}").save_pretrained("NEW_FOLDER")',
        )
    raise FileFormatError(
        f"there is no {MODEL_NAME} and no {INDEX_NAME}",
        where=str(folder),
        fix="name a folder that save_pretrained wrote",
    )


def _read_index(index: Path) -> tuple[Path, ...]:
    try:
        parsed = parse_json(index.read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{index.name} is not JSON", where=str(index)) from error
    places = parsed.get("weight_map") if is_object(parsed) else None
    if not is_object(places):
        raise FileFormatError(f"{index.name} has no weight_map", where=str(index))
    names = sorted({str(file) for file in places.values()})
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise FileFormatError(
                f"{index.name} names the shard {name!r}, which is missing",
                where=str(index.parent),
                fix="download or copy the missing file",
            )
    return tuple(index.parent / name for name in names)


def _read_exactly(stored: _Stored, view: memoryview, offset_bytes: int) -> None:
    cursor = 0
    while cursor < len(view):
        try:
            count = os.preadv(stored.descriptor, [view[cursor:]], offset_bytes + cursor)
        except OSError as error:
            raise FileFormatError(
                f"cannot read {stored.path.name}: {error.strerror}", where=str(stored.path)
            ) from error
        if not count:
            raise FileFormatError(
                f"{stored.path.name} became shorter while it was read",
                where=f"{stored.path}, byte {offset_bytes + cursor}",
                fix="keep the files unchanged while they are in use",
            )
        cursor += count
