"""Sources of weights, read parameter by parameter while an engine fills its chunks.

In: a module and where its values are: files, the module itself, or its own initialisation. Out: a
`WeightSource`: any range of elements of any parameter, by its canonical name. No source ever holds
more than the tensors of one module at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from packhorse.errors import ModelError
from packhorse.graph.export import describe_parameters


class WeightSource(Protocol):
    """Gives the values that a run begins with."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The dtype that each parameter has at the source, by canonical name."""
        ...

    def read_into(self, parameter: str, start: int, stop: int, destination: Tensor) -> None:
        """Write elements [start, stop) of a parameter into a 1-D float tensor."""
        ...

    def release(self) -> None:
        """Give memory back; more can be read afterwards."""
        ...

    def close(self) -> None:
        """Give files and memory back."""
        ...


class ModuleWeights:
    """The module's own values; it must not be on `meta`."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
        for name, tensor in self._tensors.items():
            if tensor.is_meta:
                raise ModelError(
                    f"the parameter {name!r} is on the meta device and has no values",
                    fix="give weights=FOLDER, or a module with real parameters",
                )

    @property
    def dtypes(self) -> Mapping[str, str]:
        """See WeightSource."""
        return {name: str(t.dtype).removeprefix("torch.") for name, t in self._tensors.items()}

    def read_into(self, parameter: str, start: int, stop: int, destination: Tensor) -> None:
        """See WeightSource."""
        destination.copy_(self._tensors[parameter].reshape(-1)[start:stop])

    def release(self) -> None:
        """See WeightSource; the values are the module's own."""

    def close(self) -> None:
        """Forget the values."""
        self._tensors = {}


class RandomWeights:
    """The model's own initialisation, module by module.

    A parameter's values depend on the seed and on the name of the module that owns it, never on
    the order of reading. An ancestor's initialisation may change them afterwards, as it does when
    the whole model is initialised; its other parameters stay on `meta` meanwhile.
    """

    def __init__(self, module: nn.Module, *, seed: int, dtype: str = "float32") -> None:
        self._module = module
        self._seed = seed
        self._dtype = dtype
        self._specs = describe_parameters(module)
        self._owner: str | None = None
        self._values: dict[str, Tensor] = {}

    @property
    def dtypes(self) -> Mapping[str, str]:
        """See WeightSource."""
        return dict.fromkeys(self._specs, self._dtype)

    def read_into(self, parameter: str, start: int, stop: int, destination: Tensor) -> None:
        """See WeightSource."""
        owner, _, leaf = parameter.rpartition(".")
        if owner != self._owner:
            self._values = {}
            self._values = self._initialise(owner)
            self._owner = owner
        destination.copy_(self._values[leaf].reshape(-1)[start:stop])

    def release(self) -> None:
        """See WeightSource."""
        self._values, self._owner = {}, None

    def close(self) -> None:
        """Forget the values."""
        self.release()

    @torch.no_grad()
    def _initialise(self, owner: str) -> dict[str, Tensor]:
        path = owner.split(".") if owner else []
        chain = [self._module.get_submodule(".".join(path[:n])) for n in range(len(path), -1, -1)]
        module = chain[0]
        slots = module._parameters  # pyright: ignore[reportPrivateUsage]  # swapped, not registered
        before = dict(slots)
        real = {
            name: nn.Parameter(torch.full(p.shape, float("nan")), requires_grad=False)
            for name, p in before.items()
            if p is not None
        }
        digest = hashlib.blake2b(f"{self._seed}/{owner}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            slots.update(real)
            try:
                _initialise_chain(chain)
                if any(bool(torch.isnan(value).any()) for value in real.values()):
                    _reset(module)
                    _initialise_chain(chain)
            finally:
                slots.update(before)
        for name, value in real.items():
            if bool(torch.isnan(value).any()):
                raise ModelError(
                    f"the model's initialisation leaves {owner}.{name} without values",
                    where=f"module {type(module).__name__}",
                    fix="begin from a folder with weights instead of a bare config.json",
                )
        return {name: value.detach() for name, value in real.items()}


def _initialise_chain(chain: Sequence[nn.Module]) -> None:
    """Initialise a module, then let each of its ancestors do what it does to its descendants."""
    for index, member in enumerate(chain):
        # The innermost model around a module decides how it is initialised.
        model = next((outer for outer in chain[index:] if hasattr(outer, "_init_weights")), None)
        if model is not None:
            init: Any = model._init_weights  # transformers' own method, untyped
            init(member)


def _reset(module: nn.Module) -> None:
    reset: Any = getattr(module, "reset_parameters", None)  # a convention of torch's layers
    if reset is not None:
        reset()
