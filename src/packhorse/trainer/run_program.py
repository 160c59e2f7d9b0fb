"""A program together with the model that it was compiled for.

In: what a run lowered. Out: everything that a simulation needs beside a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.model.spec import Model
from packhorse.program.program import Program
from packhorse.program.text import format_program


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgram:
    """A program of a run; `print(run.programs["train_step"])` shows its text."""

    program: Program
    model: Model

    def __str__(self) -> str:
        return format_program(self.program)
