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
from typing import Final, Self, cast

import torch
from torch import Tensor

from packhorse.checkpoint.json_values import JsonObject, JsonValue, is_object
from packhorse.checkpoint.manifest import RunState, run_from_json, run_to_json
from packhorse.checkpoint.tensor_plan import GRAD, MASTER, PARAM
from packhorse.checkpoint.tensor_writer import TORCH_DTYPES
from packhorse.errors import FileFormatError, MismatchError
from packhorse.model.spec import ITEM_BYTES, Model
from packhorse.program.buffers import ChunkId, Layout, state_id
from packhorse.storage.extents import ALIGNMENT_BYTES
from packhorse.storage.kept_check import find_stale
from packhorse.storage.kept_layout import is_count
from packhorse.storage.kept_state import KeptState, name_owner, open_kept
from packhorse.storage.record import Json

_BLOCK_ELEMENTS: Final = 1 << 20
_MOST_ELEMENTS: Final = 1 << 60


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    model: str
    dtypes: dict[str, str]
    chunks: list[tuple[ChunkId, int, int]]
    slots: dict[str, tuple[int, tuple[int, ...]]]


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
        if self._run.step != kept.entry.step:
            raise _damaged(kept, f"it is of step {kept.entry.step} and of {self._run.step}")
        self._header = _read_header(kept)
        self._slot_of = dict(zip(kept.layout.in_slots, kept.entry.slots, strict=True))
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
            state_id(found, chunk) in self._kept.layout.buffers
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
        _, *offsets = self._kept.layout.buffers[buffer]
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
        return MASTER if state_id(MASTER, chunk) in self._kept.layout.buffers else PARAM

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


def verify_kept(kept: KeptState) -> None:
    """Check that kept state is what was written; reads all of it once.

    Raises:
        FileFormatError: its record does not say what it must, or a buffer is not what was written.
        StorageError: a part of its file is gone, or the disk fails.
    """
    with KeptRun(kept):
        stale = find_stale(kept)
    if stale is not None:
        raise FileFormatError(
            f"the scratch file is damaged: {stale} is not what was written",
            where=str(kept.file),
            fix="resume from a checkpoint; packhorse clean removes the scratch file",
        )


def _read_header(kept: KeptState) -> _Header:
    written = cast("JsonObject", kept.header)  # it was read as JSON
    match written:
        case {"model": str(model), "dtypes": dtypes, "chunks": chunks, "slots": slots}:
            if not is_object(dtypes) or not isinstance(chunks, list) or not is_object(slots):
                raise _damaged(kept, "dtypes, chunks or slots have another type")
            header = _Header(
                model=model,
                dtypes={state: _read_dtype(kept, dtype) for state, dtype in dtypes.items()},
                chunks=[_read_chunk(kept, chunk) for chunk in chunks],
                slots={name: _read_slot(kept, slot) for name, slot in slots.items()},
            )
            _check_sizes(kept, header)
            return header
        case _:
            raise _damaged(kept, "model, dtypes, chunks or slots are missing")


def _check_sizes(kept: KeptState, header: _Header) -> None:
    for chunk, _, count in header.chunks:
        for state, dtype in header.dtypes.items():
            size_bytes, *_ = kept.layout.buffers.get(state_id(state, chunk), (None,))
            if size_bytes not in (None, count * ITEM_BYTES[dtype]):
                raise _damaged(kept, f"{state} of chunk {chunk} has {size_bytes} bytes")


def _read_dtype(kept: KeptState, dtype: JsonValue) -> str:
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES.keys() & TORCH_DTYPES:
        raise _damaged(kept, f"a dtype is {dtype!r:.80}")
    return dtype


def _read_chunk(kept: KeptState, chunk: JsonValue) -> tuple[ChunkId, int, int]:
    match chunk:
        case [int(number), int(start), int(count)] if start >= 0 and count >= 0:
            return ChunkId(number), start, count
        case _:
            raise _damaged(kept, f"a chunk is {chunk!r:.80}")


def _read_slot(kept: KeptState, slot: JsonValue) -> tuple[int, tuple[int, ...]]:
    match slot:
        case [int(start), [*shape]] if start >= 0:
            sizes = tuple(size for size in shape if is_count(size, _MOST_ELEMENTS))
            if len(sizes) == len(shape):
                return start, sizes
        case _:
            pass
    raise _damaged(kept, f"a slot is {slot!r:.80}")


def _damaged(kept: KeptState, how: str) -> FileFormatError:
    return FileFormatError(
        f"the record of the scratch file is damaged: {how}",
        where=str(kept.record),
        fix="resume from a checkpoint; packhorse clean removes the scratch file",
    )
