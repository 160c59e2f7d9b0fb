"""The parameters of a module change hands: to the run, and back.

In: a module. Out: the same module with its parameters on `meta`, or with the values that it is
given. Ties stay ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  # os.PathLike has no argument there
from torch import Tensor, nn

from packhorse.graph.export import describe_parameters


def move_to_meta(module: nn.Module) -> None:
    """Replace all parameters by ones on `meta`; their values are dropped."""
    parameters = dict(module.named_parameters())
    give_back(module, {name: tensor.detach().to("meta") for name, tensor in parameters.items()})


def give_back(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace all parameters by ones that share the memory of `values`, by canonical name."""
    for spec in describe_parameters(module).values():
        parameter = nn.Parameter(values[spec.name], requires_grad=spec.trainable)
        for name in (spec.name, *spec.aliases):
            owner, _, leaf = name.rpartition(".")
            # Swapped, not registered: the module must not take it for a new parameter.
            slots = module.get_submodule(owner)._parameters  # pyright: ignore[reportPrivateUsage]  # no public way
            slots[leaf] = parameter


def map_saved(folder: Path) -> dict[str, Tensor]:
    """Map the tensors of a saved model; a page is read when it is used, written ones are copied.

    The files may be replaced or deleted meanwhile, but not changed in place.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors
