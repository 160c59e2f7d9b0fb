"""Opens the state that a scratch folder keeps, to go on from it under any plan.

In: kept state. Out: the run's state besides its tensors, and any range of any state of any
parameter, by name: the layout that wrote it is in its record. What lies there in place for the
same plan is not read by this.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypedDict, cast

import torch
from torch import Tensor

from packhorse.checkpoint.json_values import JsonObject
from packhorse.checkpoint.manifest import RunState, run_from_json, run_to_json
from packhorse.checkpoint.tensor_plan import GRAD, MASTER, PARAM
from packhorse.checkpoint.tensor_writer import TORCH_DTYPES
from packhorse.errors import FileFormatError, MismatchError
from packhorse.model.spec import ITEM_BYTES, Model
from packhorse.program.buffers import ChunkId, Layout, state_id
from packhorse.storage.extents import ALIGNMENT_BYTES
from packhorse.storage.kept_state import KeptState, name_owner, open_kept
from packhorse.storage.record import Json

_BLOCK_ELEMENTS: Final = 1 << 20


def describe_kept(owner: Path, model: Model, layout: Layout) -> Json:
    """What the record of a scratch file says beside its extents."""
    return {
        "owner": name_owner(owner),
        "model": model.fingerprint,
        "dtypes": dict(layout.dtypes),
        "chunks": [[int(chunk.id), chunk.start, chunk.num_elements] for chunk in layout.chunks],
        "slots": {name: [slot.start, list(slot.shape)] for name, slot in layout.slots.items()},
    }


def kept_state_of(run: RunState) -> Json:
    """What an entry of the record says of the run."""
    return cast("Json", run_to_json(run))  # both are JSON objects


class _Written(TypedDict):
    model: str
    dtypes: dict[str, str]
    chunks: list[tuple[int, int, int]]
    slots: dict[str, tuple[int, list[int]]]
    buffers: dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    model: str
    dtypes: dict[str, str]
    chunks: list[tuple[ChunkId, int, int]]
    slots: dict[str, tuple[int, tuple[int, ...]]]
    buffers: dict[str, list[int]]


class KeptRun:
    """Open kept state; leaving the `with` block closes it.

    Raises:
        FileFormatError: its record does not say what it must.
        StorageError: its file is gone.
    """

    def __init__(self, kept: KeptState) -> None:
        self._kept = kept
        state = cast("JsonObject", kept.entry.state)  # it was read as JSON
        self._run = run_from_json(state, where=kept.record)
        self._header = _read_header(kept)
        self._slot_of = dict(zip(_with_slots(self._header), kept.entry.slots, strict=True))
        self._file = open_kept(kept)

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
        """Close the file and keep it."""
        self._file.close()

    @property
    def run(self) -> RunState:
        """The run's state besides its tensors."""
        return self._run

    def check_model(self, model: Model, layout: Layout) -> None:
        """Refuse the state of another model, or one without a state that the plan needs.

        Raises:
            MismatchError: names the first difference.
            FileFormatError: a state of a trained parameter is not kept.
        """
        for parameter in model.parameters.values():
            _, shape = self._header.slots.get(parameter.name, (0, None))
            if shape != parameter.shape:
                found = "is missing" if shape is None else f"has shape {list(shape)}"
                raise self._mismatch(f"{parameter.name!r} {found} there")
            if parameter.trainable:
                for state in layout.dtypes:
                    if state != GRAD and not self.holds(parameter.name, state):
                        raise self._missing(parameter.name, state)
        if model.fingerprint != self._header.model:
            raise self._mismatch(f"its fingerprint is {self._header.model}")

    def holds(self, parameter: str, state: str) -> bool:
        """Whether a state of a parameter is there; frozen parameters in memory are not."""
        begin, shape = self._header.slots[parameter]
        stop = begin + prod(shape)
        found = self._state(parameter, state)
        return all(
            state_id(found, chunk) in self._header.buffers
            for chunk, start, count in self._header.chunks
            if start < stop and begin < start + count
        )

    def read_into(
        self, parameter: str, state: str, start: int, stop: int, destination: Tensor
    ) -> None:
        """Read elements `start` to `stop` of a parameter's state into a 1-D tensor.

        `param` comes from `master`, the exact values, where that is kept.
        """
        begin, _ = self._header.slots[parameter]
        state = self._state(parameter, state)
        for chunk, first, count in self._header.chunks:
            low = max(begin + start, first)
            high = min(begin + stop, first + count)
            for at in range(low, high, _BLOCK_ELEMENTS):
                end = min(at + _BLOCK_ELEMENTS, high)
                values = self._read(state, chunk, at - first, end - first)
                destination[at - begin - start : end - begin - start].copy_(values)

    def _read(self, state: str, chunk: ChunkId, start: int, stop: int) -> Tensor:
        buffer = state_id(state, chunk)
        _, *offsets = self._header.buffers[buffer]
        dtype = self._header.dtypes[state]
        begin = offsets[self._slot_of.get(buffer, 0)] + start * ITEM_BYTES[dtype]
        end = begin + (stop - start) * ITEM_BYTES[dtype]
        page = begin // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        content = bytearray(end - page)
        self._file.read_into(content, page, len(content))
        return torch.frombuffer(
            content, dtype=TORCH_DTYPES[dtype], count=stop - start, offset=begin - page
        )

    def _state(self, parameter: str, state: str) -> str:
        if state not in (PARAM, MASTER):
            return state
        begin, _ = self._header.slots[parameter]
        chunk = next(c for c, start, n in self._header.chunks if start <= begin < start + n)
        return MASTER if state_id(MASTER, chunk) in self._header.buffers else PARAM

    def _mismatch(self, difference: str) -> MismatchError:
        return MismatchError(
            f"the kept state belongs to another model: {difference}",
            where=str(self._kept.record),
            fix="resume with the model that the run began with",
        )

    def _missing(self, parameter: str, state: str) -> FileFormatError:
        return FileFormatError(
            f"the scratch file has no {state} of {parameter!r}",
            where=str(self._kept.record),
            fix="resume with the same optimizer and freeze patterns",
        )


def _with_slots(header: _Header) -> list[str]:
    return [name for name, (_, *offsets) in header.buffers.items() if len(offsets) > 1]


def _read_header(kept: KeptState) -> _Header:
    if not set(_Written.__annotations__) <= set(kept.header):
        raise FileFormatError(
            "the record of the scratch file does not say how it is laid out",
            where=str(kept.record),
            fix="resume from a checkpoint; packhorse clean removes the scratch file",
        )
    written = cast("_Written", kept.header)  # as it was written, under the header's checksum
    return _Header(
        model=written["model"],
        dtypes=written["dtypes"],
        chunks=[(ChunkId(chunk), start, count) for chunk, start, count in written["chunks"]],
        slots={name: (start, tuple(shape)) for name, (start, shape) in written["slots"].items()},
        buffers=written["buffers"],
    )
