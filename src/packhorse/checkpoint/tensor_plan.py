"""Which tensors a checkpoint holds, which state feeds each, and which file each goes to.

In: a model, a layout with its states, the dtypes of the source weights. Out: model tensors under
the model's own names, optimizer tensors as `<parameter>/<state>` in float32.

The model's tensors are filled from the exact parameters: the float32 master where there is one.
Where the model's file rounds them (it is bfloat16, training is float32), they are also kept as
`<parameter>/master`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from packhorse.checkpoint.header import TensorSpec, lay_out_file
from packhorse.checkpoint.tensor_writer import METADATA
from packhorse.model.spec import Model, Parameter
from packhorse.program.buffers import Layout

PARAM: Final = "param"
MASTER: Final = "master"
GRAD: Final = "grad"
DEFAULT_SHARD_BYTES: Final = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of a file, and the state of which parameter it is filled from."""

    spec: TensorSpec
    parameter: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """All tensors of a checkpoint, in the order in which they are laid out."""

    model: tuple[StateTensor, ...]
    optimizer: tuple[StateTensor, ...]

    @property
    def states(self) -> frozenset[tuple[str, str]]:
        """The (parameter, state) pairs that a save needs in full."""
        tensors = (*self.model, *self.optimizer)
        return frozenset((tensor.parameter, tensor.state) for tensor in tensors)

    def file_bytes(self, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> int:
        """Bytes of all tensor files with their headers."""
        return sum(
            lay_out_file([tensor.spec for tensor in tensors], METADATA).size_bytes
            for tensors in plan_shards(self, max_shard_bytes).values()
        )


def state_key(parameter: str, state: str) -> str:
    """Name the tensor of a parameter's state in the optimizer files."""
    return f"{parameter}/{state}"


def plan_tensors(
    model: Model, layout: Layout, *, saved_dtypes: Mapping[str, str] | None = None
) -> TensorPlan:
    """Decide what a checkpoint of a run holds.

    Every state of the layout but gradients is saved for trained parameters, `param` alone for
    frozen ones. Where trained parameters have a `master`, their `param` follows from it and is not
    asked for.

    Args:
        saved_dtypes: dtype in the model's file by parameter; by default the parameter's own.
    """
    wanted = saved_dtypes or {}
    states = tuple(s for s in layout.dtypes if s not in (PARAM, GRAD, MASTER))
    exact_state = MASTER if MASTER in layout.dtypes else PARAM
    exact_dtype = layout.dtypes.get(exact_state, "float32")
    models: list[StateTensor] = []
    optimizers: list[StateTensor] = []
    for parameter in model.parameters.values():
        dtype = wanted.get(parameter.name, parameter.dtype)
        if not parameter.trainable:
            models.append(_tensor(parameter, parameter.name, PARAM, dtype))
            continue
        models.append(_tensor(parameter, parameter.name, exact_state, dtype))
        if dtype != exact_dtype:
            key = state_key(parameter.name, MASTER)
            optimizers.append(_tensor(parameter, key, exact_state, exact_dtype))
        for state in states:
            key = state_key(parameter.name, state)
            optimizers.append(_tensor(parameter, key, state, layout.dtypes[state]))
    return TensorPlan(model=tuple(models), optimizer=tuple(optimizers))


def plan_shards(
    plan: TensorPlan, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Mapping[str, tuple[StateTensor, ...]]:
    """Give each file its tensors, in order; a tensor larger than a shard has one of its own."""
    files: dict[str, tuple[StateTensor, ...]] = {}
    for base, tensors in (("model", plan.model), ("optimizer", plan.optimizer)):
        shards = _fill_shards(tensors, max_shard_bytes)
        for number, shard in enumerate(shards, start=1):
            suffix = f"-{number:05d}-of-{len(shards):05d}"
            # transformers expects a model in one file to be called just so
            name = base if base == "model" and len(shards) == 1 else base + suffix
            files[f"{name}.safetensors"] = shard
    return files


def render_index(shards: Mapping[str, tuple[StateTensor, ...]]) -> str | None:
    """Render the index of a model in several files; None when it is in one."""
    files = {name: tensors for name, tensors in shards.items() if name.startswith("model-")}
    if not files:
        return None
    total_bytes = sum(tensor.spec.size_bytes for tensors in files.values() for tensor in tensors)
    places = {tensor.spec.name: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _tensor(parameter: Parameter, key: str, state: str, dtype: str) -> StateTensor:
    return StateTensor(
        spec=TensorSpec(name=key, dtype=dtype, shape=parameter.shape),
        parameter=parameter.name,
        state=state,
    )


def _fill_shards(
    tensors: tuple[StateTensor, ...], max_shard_bytes: int
) -> list[tuple[StateTensor, ...]]:
    shards: list[list[StateTensor]] = []
    filled_bytes = 0
    for tensor in tensors:
        if not shards or filled_bytes + tensor.spec.size_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.spec.size_bytes
    return [tuple(shard) for shard in shards]
