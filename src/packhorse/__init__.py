"""Packhorse trains models that do not fit the machine.

In: a PyTorch model, a batch, a machine. Out: a plan that is proved to fit, and the run of it.
Importing this package loads no torch; a name that needs torch loads it when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packhorse.api import SGD, AdamW, Run, find_plan, probe, simulate

__version__ = "0.1.0.dev0"

__all__ = ["SGD", "AdamW", "Run", "__version__", "find_plan", "probe", "simulate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    from packhorse import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return list(__all__)
