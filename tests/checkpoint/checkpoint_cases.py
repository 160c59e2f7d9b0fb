"""A small model's states for the checkpoint tests, and the pieces that any cut of them gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from packhorse.checkpoint.manifest import RunState
from packhorse.checkpoint.save import Piece
from packhorse.checkpoint.tensor_plan import TensorPlan, plan_tensors
from packhorse.model.spec import BlockId, Model, Parameter, ParameterName, ValueId
from packhorse.program.buffers import Chunk, ChunkId, Layout, Slot

STATES = ("exp_avg", "exp_avg_sq")
SHAPES = {"embed.weight": (37, 16), "block.weight": (24, 16), "block.bias": (24,), "norm": (16,)}
FROZEN = "norm"


def make_model(dtype: str = "float32", *, fingerprint: str = "f00d") -> Model:
    parameters = {
        ParameterName(name): Parameter(
            name=ParameterName(name),
            shape=shape,
            dtype=dtype,
            trainable=name != FROZEN,
            group="decay",
            aliases=(),
            blocks=(BlockId(0),),
        )
        for name, shape in SHAPES.items()
    }
    return Model(
        name="tiny",
        fingerprint=fingerprint,
        rows=1,
        length=4,
        loss=ValueId("loss"),
        blocks=(),
        bodies={},
        values={},
        parameters=parameters,
    )


def make_layout(chunk_elements: int, *, param: str = "float32") -> Layout:
    """Lay out the parameters one after the other and cut the space every `chunk_elements`."""
    slots: dict[str, Slot] = {}
    cursor = 0
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        slots[name] = Slot(parameter=name, start=cursor, shape=shape, num_elements=size)
        cursor += -(-size // 32) * 32
    chunks = tuple(
        Chunk(
            id=ChunkId(index),
            start=start,
            num_elements=min(chunk_elements, cursor - start),
            group="decay",
            trainable=True,
        )
        for index, start in enumerate(range(0, cursor, chunk_elements))
    )
    dtypes = {"param": param, "grad": "float32", **dict.fromkeys(STATES, "float32")}
    if param != "float32":
        dtypes["master"] = "float32"
    return Layout(chunks=chunks, slots=slots, dtypes=dtypes)


def make_values(step: int = 0, *, param: str = "float32") -> dict[tuple[str, str], torch.Tensor]:
    """Give every state of every parameter its own values."""
    generator = torch.Generator().manual_seed(step)
    values: dict[tuple[str, str], torch.Tensor] = {}
    for name, shape in SHAPES.items():
        exact = torch.randn(shape, generator=generator)
        if name == FROZEN:
            exact = exact.bfloat16().float()
        values[name, "param"] = exact if param == "float32" else exact.bfloat16()
        if name == FROZEN:
            continue
        if param != "float32":
            values[name, "master"] = exact
        for state in STATES:
            values[name, state] = torch.rand(shape, generator=generator)
    return values


def cut_pieces(
    values: dict[tuple[str, str], torch.Tensor], layout: Layout, *, backwards: bool = False
) -> Iterator[Piece]:
    """Give all states of all chunks, as a runtime would hand them out."""
    chunks = layout.chunks[::-1] if backwards else layout.chunks
    for state in sorted({state for _, state in values}):
        for chunk in chunks:
            for slot in layout.slots_of(chunk):
                if (slot.parameter, state) not in values:
                    continue
                first = max(chunk.start, slot.start) - slot.start
                last = min(chunk.start + chunk.num_elements, slot.stop) - slot.start
                flat = values[slot.parameter, state].view(-1)
                yield Piece(
                    parameter=slot.parameter, state=state, start=first, values=flat[first:last]
                )


def make_run(step: int, *, model: str = "f00d") -> RunState:
    return RunState(
        model=model,
        step=step,
        workers=1,
        data_position={"epoch": 0, "row": step * 8},
        random={"seed": 42},
        numerics={"dtype": "float32", "threads": 1},
        optimizer={"kind": "AdamW", "states": list(STATES)},
        trainer={},
    )


def make_plan(layout: Layout, dtype: str = "float32") -> TensorPlan:
    return plan_tensors(make_model(dtype), layout)


def add_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "tiny"}\n')
