"""Weights of a Hugging Face folder, under the names that the module gives its parameters.

In: a module and a folder with safetensors. Out: a `WeightSource`. Most parameters lie in the files
under their own names and are read in place, range by range. Where transformers names or cuts them
otherwise in its files (experts that are stored one by one, for example), its own conversion is
applied, to one parameter at a time.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from packhorse.checkpoint.tensor_files import TensorFiles
from packhorse.errors import ModelError
from packhorse.graph.export import TracedParameter, describe_parameters, is_transformers_model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Converted:
    """A parameter that is made from other tensors: (name in the files, pattern it fits)."""

    converter: Any  # transformers' WeightConverter, which has no public type
    first: str
    sources: tuple[tuple[str, str], ...]


class FolderWeights:
    """Reads a folder's weights; see the module's docstring.

    Raises:
        ModelError: a parameter has no tensor in the files, or one of another shape.
        FileFormatError: a file is missing or damaged.
    """

    def __init__(self, module: nn.Module, folder: Path) -> None:
        self._module = module
        self._specs = describe_parameters(module)
        ties = {spec.name: spec.aliases for spec in self._specs.values() if spec.aliases}
        self._files = TensorFiles.open(folder, ties=ties)
        try:
            self._names, self._converted = self._find_places(folder)
        except ModelError:
            self._files.close()
            raise
        self._cached: tuple[str, Tensor] | None = None

    @property
    def dtypes(self) -> Mapping[str, str]:
        """See WeightSource."""
        first = {name: made.sources[0][0] for name, made in self._converted.items()}
        places = {**self._names, **first}
        return {name: self._files.place(places[name]).dtype for name in self._specs}

    def read_into(self, parameter: str, start: int, stop: int, destination: Tensor) -> None:
        """See WeightSource."""
        stored = self._names.get(parameter)
        if stored is not None:
            self._files.read_into(stored, start, stop, destination)
            return
        if self._cached is None or self._cached[0] != parameter:
            self._cached = None
            self._cached = (parameter, self._convert(parameter))
        destination.copy_(self._cached[1].reshape(-1)[start:stop])

    def release(self) -> None:
        """See WeightSource."""
        self._cached = None

    def close(self) -> None:
        """Close the files."""
        self.release()
        self._files.close()

    def _find_places(self, folder: Path) -> tuple[dict[str, str], dict[str, _Converted]]:
        names = {name: name for name in self._specs if name in self._files}
        converted: dict[str, _Converted] = {}
        if len(names) < len(self._specs) and is_transformers_model(self._module):
            renamed, converted = self._find_conversions()
            for spec in self._specs.values():
                for known in (spec.name, *spec.aliases):
                    if spec.name not in names and known in renamed:
                        names[spec.name] = renamed[known]
        converted = {name: made for name, made in converted.items() if name not in names}
        for name, spec in self._specs.items():
            if name in names:
                self._files.check_shape(names[name], spec.shape)
            elif name not in converted:
                raise self._missing(spec, folder)
        return names, converted

    def _find_conversions(self) -> tuple[dict[str, str], dict[str, _Converted]]:
        """Ask transformers which parameter each tensor of the files belongs to."""
        mapping: Any = importlib.import_module("transformers.conversion_mapping")  # untyped
        loading: Any = importlib.import_module("transformers.core_model_loading")  # untyped
        transforms = mapping.get_model_conversion_mapping(self._module)
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix: str | None = getattr(self._module, "base_model_prefix", None)
        state: dict[str, object] = dict(self._module.state_dict())
        renamed: dict[str, str] = {}
        sources: dict[str, list[tuple[str, str]]] = {}
        for stored in sorted(self._files.names, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(stored, renamings, converters, prefix, state)
            if pattern is None:
                renamed[name] = stored
            else:
                sources.setdefault(name, []).append((stored, pattern))
        made: dict[str, _Converted] = {}
        for first, found in sources.items():
            converter = by_pattern[found[0][1]]
            for target in converter.target_patterns:
                # Tensors of one conversion are collected under its first target's name.
                name = first.replace(converter.target_patterns[0], target, 1)
                made[name] = _Converted(converter=converter, first=first, sources=tuple(found))
        return renamed, made

    def _convert(self, parameter: str) -> Tensor:
        made = self._converted[parameter]
        converter = copy.deepcopy(made.converter)
        for stored, pattern in made.sources:
            place = self._files.place(stored)
            tensor = torch.empty(place.shape, dtype=torch.float32)
            self._files.read_into(stored, 0, place.num_elements, tensor)
            converter.add_tensor(made.first, stored, pattern, tensor)
        config: Any = getattr(self._module, "config", None)  # a transformers model has one
        results: Mapping[str, object] = converter.convert(
            made.first, model=self._module, config=config
        )
        value = results.get(parameter)
        if isinstance(value, list):
            value = cast("list[object]", value)[0]  # of transformers' conversion; checked below
        if not isinstance(value, Tensor) or value.shape != self._specs[parameter].shape:
            found = list(value.shape) if isinstance(value, Tensor) else "nothing"
            raise ModelError(
                f"the files' tensors for {parameter!r} convert to {found}, the model needs"
                f" {list(self._specs[parameter].shape)}",
                where=made.sources[0][0],
                fix="use weights and a config of the same model",
            )
        return value

    def _missing(self, spec: TracedParameter, folder: Path) -> ModelError:
        near = get_close_matches(spec.name, self._files.names, n=1)
        return ModelError(
            f"the files have no tensor for the parameter {spec.name!r}",
            where=str(folder),
            fix="use weights and a config of the same model"
            + (f"; the nearest name in the files is {near[0]!r}" if near else ""),
        )
