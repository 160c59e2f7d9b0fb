"""Where a model comes from: a folder, a config.json, or a Hub id in huggingface_hub's cache.

In: `model_name_or_path`. Out: a `ModelSource` with the folder of its files, or an error that says
what is missing. Nothing is fetched when the Hub client is told to stay offline.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from packhorse.checkpoint.tensor_files import find_model_files
from packhorse.errors import FileFormatError, InputError, ModelError
from packhorse.trainer.model_paths import check_model_path

CONFIG_NAME: Final = "config.json"
_HUB_FILES: Final = (
    "*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "*.tiktoken", "*.txt",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's files.

    `folder` holds config.json; `weights` is the folder with safetensors, or None for random
    weights.
    """

    name: str
    folder: Path
    config: Path
    weights: Path | None


def find_model(name_or_path: str) -> ModelSource:
    """Find a model and check that what it needs is there.

    Raises:
        ModelError: there is no such folder or Hub model, or it has no config or is quantised.
        FileFormatError: a folder has no safetensors.
        InputError: a Hub id is given and huggingface_hub is not installed.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        _check_config(path)
        return ModelSource(name=path.parent.name, folder=path.parent, config=path, weights=None)
    if path.is_dir():
        return _find_in_folder(path, path.resolve().name)
    check_model_path(name_or_path)
    return _find_in_folder(find_on_hub(name_or_path), name_or_path.rpartition("/")[2])


def find_on_hub(repository: str) -> Path:
    """Give the folder of a Hub repository in huggingface_hub's cache, filling it when allowed.

    Raises:
        ModelError: it is in no cache and cannot be fetched.
        InputError: huggingface_hub is not installed.
    """
    try:
        hub: Any = importlib.import_module("huggingface_hub")  # partly untyped
        errors: Any = importlib.import_module("huggingface_hub.errors")  # partly untyped
    except ImportError as error:
        raise InputError(
            f"{repository} is no local folder, and a Hub id needs huggingface_hub:"
            " pip install 'packhorse[hf]'"
        ) from error
    known = (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError)
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
    except (*known, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"{repository} is neither a local folder nor a model that the Hub client can get",
            where=f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__,
            fix="check the spelling; offline, download it elsewhere and name the folder",
        ) from error


def read_config(path: Path) -> Mapping[str, object]:
    """Read a config.json.

    Raises:
        ModelError: it is no JSON object.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} is no JSON object", where=str(path))
    return cast("dict[str, object]", content)  # keys of a JSON object are texts


def _find_in_folder(folder: Path, name: str) -> ModelSource:
    config = folder / CONFIG_NAME
    if not config.is_file():
        raise ModelError(
            f"the folder has no {CONFIG_NAME}",
            where=str(folder),
            fix="name a folder that save_pretrained wrote",
        )
    _check_config(config)
    try:
        find_model_files(folder)
    except FileFormatError as error:
        raise FileFormatError(
            error.what,
            where=error.where,
            fix=f"{error.fix}\nor, for random weights, name {config}",
        ) from error
    return ModelSource(name=name, folder=folder, config=config, weights=folder)


def _check_config(path: Path) -> None:
    content = read_config(path)
    if "model_type" not in content:
        raise ModelError(
            "the config names no model_type, so it is no model that transformers knows",
            where=str(path),
            fix="use the config.json that save_pretrained writes",
        )
    quantised = content.get("quantization_config")
    if quantised:
        method = cast("dict[str, object]", quantised).get("quant_method", "unknown")  # JSON
        raise ModelError(
            f"the checkpoint is quantised ({method}), and quantised weights cannot be trained",
            where=str(path),
            fix="use the model's float32, bfloat16 or float16 weights",
        )
