"""Machines that are known by name, for planning without having them.

In: a name such as `rtx-4090`. Out: a `Machine` with `source="catalogue"`; or, where a path is given
for a name, the machine of that file. The files lie in the folder `known/` beside this module; each
says which data sheet figures it uses and by how much they were lowered to what programs reach.
"""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path
from typing import Final

from packhorse.errors import InputError
from packhorse.machine.files import parse_machine, read_machine
from packhorse.machine.spec import Machine

_FOLDER: Final = "known"
_SUFFIX: Final = ".yaml"


def load_machine(name: str, *, folder: Path | None = None) -> Machine:
    """Load a machine from a file, or from the catalogue.

    Args:
        folder: what paths are relative to; None for the working folder.

    Raises:
        InputError: there is neither.
        FileFormatError: the file is damaged.
    """
    path = Path(name) if folder is None else folder / name
    is_path = path.suffix in (".json", ".yaml", ".yml") or len(Path(name).parts) > 1
    if is_path or path.is_file():
        return read_machine(path)
    return load_known_machine(name)


def list_known_machines() -> tuple[str, ...]:
    """List the names in the catalogue, sorted."""
    folder = files("packhorse.machine") / _FOLDER
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def load_known_machine(name: str) -> Machine:
    """Load a machine from the catalogue.

    Raises:
        InputError: there is none of that name; names the nearest.
    """
    known = list_known_machines()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        raise InputError(
            f"there is no machine named {name!r} in the catalogue",
            fix=(f"did you mean {near[0]!r}? " if near else "")
            + f"known: {', '.join(known)}; or give the path of a machine file",
        )
    text = (files("packhorse.machine") / _FOLDER / (name + _SUFFIX)).read_text()
    return parse_machine(text, where=f"catalogue machine {name}")
