"""Machines that are known by name, for planning without having them.

In: a name such as `rtx-4090`. Out: a `Machine` with `source="catalogue"`. The files lie in the
folder `known/` beside this module; each says which data sheet figures it uses and by how much they
were lowered to what programs reach.
"""

from __future__ import annotations

import difflib
from importlib.resources import files
from typing import Final

from packhorse.errors import InputError
from packhorse.machine.files import parse_machine
from packhorse.machine.spec import Machine

_FOLDER: Final = "known"
_SUFFIX: Final = ".yaml"


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
