"""The exact values of frozen parameters that a run holds rounded, for what it saves.

In: a model, its layout, the parameters' dtypes at the source, and where the run's values came
from. Out: pieces for a save. A run in bfloat16 keeps frozen parameters in bfloat16 alone; from a
float32 source they are read again, so that nothing of them is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from packhorse.checkpoint.save import Piece
from packhorse.checkpoint.tensor_files import TensorFiles
from packhorse.checkpoint.tensor_plan import PARAM
from packhorse.checkpoint.tensor_writer import TORCH_DTYPES
from packhorse.model.spec import Model, Parameter
from packhorse.program.buffers import Layout

_BLOCK_ELEMENTS: Final = 1 << 18
# What float32 holds without rounding.
_WITHIN_FLOAT32: Final = ("float32", "bfloat16", "float16")


class ValueSource(Protocol):
    """Where a run's values came from: a `WeightSource`, or a checkpoint."""

    def read_into(self, parameter: str, start: int, stop: int, destination: Tensor, /) -> None:
        """Write elements [start, stop) of a parameter into a 1-D float tensor."""
        ...

    def release(self) -> None:
        """Give memory back; more can be read afterwards."""
        ...

    def close(self) -> None:
        """Give files and memory back."""
        ...


class SavedWeights:
    """The model's tensors of a checkpoint; readable until `close`, even if it is deleted."""

    def __init__(self, checkpoint: Path) -> None:
        self._files = TensorFiles.open(checkpoint)

    def read_into(self, parameter: str, start: int, stop: int, destination: Tensor, /) -> None:
        """See ValueSource."""
        self._files.read_into(parameter, start, stop, destination)

    def release(self) -> None:
        """See ValueSource; nothing is held."""

    def close(self) -> None:
        """See ValueSource."""
        self._files.close()


class FrozenValues:
    """Hands out the frozen parameters that the run holds rounded; see the module's docstring."""

    def __init__(
        self, model: Model, layout: Layout, dtypes: Mapping[str, str], source: ValueSource
    ) -> None:
        held = layout.dtypes[PARAM]
        self._dtypes = dtypes
        self._source = source
        self._parameters: tuple[Parameter, ...] = tuple(
            parameter
            for parameter in model.parameters.values()
            if not parameter.trainable and not _holds(held, dtypes[parameter.name])
        )

    @property
    def states(self) -> frozenset[tuple[str, str]]:
        """The (parameter, state) pairs that `hand_out` gives."""
        return frozenset((str(parameter.name), PARAM) for parameter in self._parameters)

    def hand_out(self, take: Callable[[Piece], None]) -> None:
        """Give every value, in its source's dtype, to `take`, which copies it."""
        for parameter in self._parameters:
            dtype = TORCH_DTYPES[self._dtypes[parameter.name]]
            num_elements = prod(parameter.shape)
            for start in range(0, num_elements, _BLOCK_ELEMENTS):
                stop = min(start + _BLOCK_ELEMENTS, num_elements)
                values = torch.empty(stop - start, dtype=dtype)
                self._source.read_into(parameter.name, start, stop, values)
                take(Piece(parameter=parameter.name, state=PARAM, start=start, values=values))
        self._source.release()

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _holds(dtype: str, source: str) -> bool:
    return source == dtype or (dtype == "float32" and source in _WITHIN_FLOAT32)
