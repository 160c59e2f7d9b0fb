"""Whether the name of a model is a path, and what to say when nothing lies there.

In: `model_name_or_path`. Out: yes or no, or the error. Needs no torch: `packhorse check` asks too.
"""

from __future__ import annotations

from pathlib import Path

from packhorse.errors import ModelError


def names_a_path(name_or_path: str) -> bool:
    """Whether a model's name is meant as a path rather than as a Hub id."""
    path = Path(name_or_path)
    looks_like_path = path.is_absolute() or name_or_path.startswith((".", "~"))
    if looks_like_path or name_or_path.count("/") > 1 or path.suffix == ".json":
        return True
    return path.exists()


def check_model_path(name_or_path: str) -> None:
    """Refuse a path at which there is nothing; Hub ids are left alone.

    Raises:
        ModelError: says from where relative paths count.
    """
    if not names_a_path(name_or_path) or Path(name_or_path).expanduser().exists():
        return
    raise ModelError(
        f"there is no model at {name_or_path}",
        where="model_name_or_path",
        fix="name a folder with config.json and safetensors, a config.json, or a Hub id;\nor make"
        " it first, as the comments of the recipe may say; relative paths count from\n"
        f"{Path.cwd()}",
    )
