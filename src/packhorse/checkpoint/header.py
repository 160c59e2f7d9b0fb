"""Headers of safetensors files: names, dtypes, shapes and places.

In: specifications of tensors, or a file. Out: the bytes before the data, or where each tensor
lies. Data begins at a multiple of 4096 in what is written here, so that it can be read directly.

Format: 8 bytes little-endian length n, n bytes of JSON `{name: {dtype, shape, data_offsets}}`
padded with spaces, then the data without gaps. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from packhorse.checkpoint.json_values import JsonValue, is_object, parse_json
from packhorse.errors import FileFormatError
from packhorse.model.spec import ITEM_BYTES

DATA_ALIGN_BYTES: Final = 4096
_MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_CODES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES: Final[Mapping[str, str]] = {code: name for name, code in _CODES.items()}
_REPAIR: Final = "take another copy of the file, or an earlier checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of a file: its name, dtype (such as `bfloat16`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of scalars."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor lies in its file.

    `dtype` is a name of `ITEM_BYTES`, or the format's own code where this package cannot read
    the values (8-bit floats, for example).
    """

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    @property
    def num_elements(self) -> int:
        """Number of scalars."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A safetensors file before its data is there: leading bytes, places and total size."""

    head: bytes
    places: Mapping[str, TensorPlace]
    size_bytes: int


def lay_out_file(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    """Give each tensor its place, wide dtypes first so that each is aligned to its own size.

    Raises:
        ValueError: two tensors have one name.
    """
    ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    cursor = 0
    for spec in ordered:
        if spec.name in starts or spec.name == _METADATA:
            raise ValueError(f"two tensors of one file are called {spec.name!r}")
        starts[spec.name] = cursor
        stop = cursor + spec.size_bytes
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [cursor, stop],
        }
        cursor = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    data_start = -(-(_LENGTH_BYTES + len(text)) // DATA_ALIGN_BYTES) * DATA_ALIGN_BYTES
    text = text.ljust(data_start - _LENGTH_BYTES)
    places = {
        spec.name: TensorPlace(
            dtype=spec.dtype,
            shape=spec.shape,
            offset_bytes=data_start + starts[spec.name],
            size_bytes=spec.size_bytes,
        )
        for spec in ordered
    }
    return FileLayout(
        head=len(text).to_bytes(_LENGTH_BYTES, "little") + text,
        places=places,
        size_bytes=data_start + cursor,
    )


def read_header(path: Path) -> Mapping[str, TensorPlace]:
    """Read and check the header of a file against its size.

    Raises:
        FileFormatError: the file is missing, truncated, longer than its header says, or its
            header is damaged.
    """
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
                raise _damaged(
                    path, f"its header would take {length} bytes, the file has {file_bytes}"
                )
            text = file.read(length)
    except OSError as error:
        raise FileFormatError(
            f"cannot read {path.name}: {error.strerror}", where=str(path), fix=_REPAIR
        ) from error
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise _damaged(path, "its header is not JSON") from error
    if not is_object(entries):
        raise _damaged(path, "its header is not a JSON object")
    data_start = _LENGTH_BYTES + length
    places = {
        name: _read_place(path, name, entry, data_start)
        for name, entry in entries.items()
        if name != _METADATA
    }
    _check_places(path, places, data_start, file_bytes)
    return places


def _read_place(path: Path, name: str, entry: JsonValue, data_start: int) -> TensorPlace:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            lengths = tuple(size for size in shape if isinstance(size, int) and size >= 0)
        case _:
            raise _damaged(path, f"the entry of {name!r} is malformed")
    if len(lengths) != len(shape) or not 0 <= start <= stop:
        raise _damaged(path, f"the entry of {name!r} is malformed")
    dtype = _NAMES.get(code, code)
    if dtype in ITEM_BYTES and stop - start != prod(lengths) * ITEM_BYTES[dtype]:
        raise _damaged(
            path,
            f"{name!r} has {stop - start} bytes, {list(lengths)} of {dtype} takes"
            f" {prod(lengths) * ITEM_BYTES[dtype]}",
        )
    return TensorPlace(
        dtype=dtype, shape=lengths, offset_bytes=data_start + start, size_bytes=stop - start
    )


def _check_places(
    path: Path, places: Mapping[str, TensorPlace], data_start: int, file_bytes: int
) -> None:
    cursor = data_start
    for name, place in sorted(places.items(), key=lambda item: item[1].offset_bytes):
        if place.offset_bytes != cursor:
            raise _damaged(path, f"{name!r} leaves a gap or overlaps its neighbour")
        cursor += place.size_bytes
    if cursor != file_bytes:
        state = "truncated" if cursor > file_bytes else "too long"
        raise _damaged(path, f"it is {state}: {file_bytes} bytes, its header says {cursor}")


def _damaged(path: Path, how: str) -> FileFormatError:
    return FileFormatError(f"{path.name} is damaged: {how}", where=str(path), fix=_REPAIR)
