"""Every error a person can meet, with the exit code it ends a command with.

    PackhorseError
      InputError             exit 2   something that was typed or given is wrong
        RecipeError                     a recipe key, value or combination
        DataError                       a data file, its rows or tokens
        ModelError                      a model that cannot be traced or loaded
        FileFormatError                 a file of ours: wrong kind, version, or damaged
          OtherVersionError               of a version that another Packhorse can still use
        MismatchError                   a plan, checkpoint or program of another model
      RefusedError           exit 3   it does not fit, or a rule rejects it
        DoesNotFitError                 need / have per tier and the smallest budget that works
        RuleError                       a verifier rule and the place that breaks it
      RunFailedError         exit 4   a run that was right ended wrong
        NonFiniteError                  NaN or infinity: step, micro-batch, block
        StorageError                    disk full, unwritable, truncated or changed under a run
        AuditError                      a task did what its program does not say
        StuckError                      no lane moves any more: a drive, a link or a peer is gone
        PeerLostError                   another rank has failed or is gone
      StoppedError           exit 75  a signal stopped the run; it can be resumed
    anything else is our own bug      exit 1

A message says what, the value, the limit, where, and what to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class PackhorseError(Exception):
    """Base of all errors that are meant for people.

    Args:
        what: one line, what is wrong, with the value and the limit.
        where: file, key, tier, lane or task (with its neighbours); may have several lines.
        fix: what to change.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines += ["  where: " + self.where.replace("\n", "\n         ")]
        if self.fix:
            lines += ["  fix:   " + self.fix.replace("\n", "\n         ")]
        return "\n".join(lines)


class InputError(PackhorseError):
    """Something that was typed or given is wrong; nothing was changed."""

    exit_code: ClassVar[int] = 2


class RecipeError(InputError):
    """A recipe key, value or combination is wrong."""


class DataError(InputError):
    """A data file is missing, empty, malformed or has tokens outside the vocabulary."""


class ModelError(InputError):
    """A model cannot be loaded or traced; names the module and the reason."""


class FileFormatError(InputError):
    """A file of ours has another kind, a newer version, or is damaged."""


class OtherVersionError(FileFormatError):
    """A file of ours has a version that this Packhorse does not read, but another one does."""


class MismatchError(InputError):
    """A plan, program or checkpoint belongs to another model; names the first difference."""


class RefusedError(PackhorseError):
    """The request is well formed, but it cannot be done as asked."""

    exit_code: ClassVar[int] = 3


class DoesNotFitError(RefusedError):
    """No plan fits the budget; gives need and have per tier and the smallest budget that works.

    Args:
        least_bytes: the budget to grant, by name of each tier that is short; empty if unknown.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        least_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.least_bytes = least_bytes
        super().__init__(what, where=where, fix=fix)


class RuleError(RefusedError):
    """A verifier rule rejects a program.

    Args:
        rule: the rule's name, for example `present`.
    """

    def __init__(
        self, what: str, *, rule: str, where: str | None = None, fix: str | None = None
    ) -> None:
        self.rule = rule
        super().__init__(f"rule {rule}: {what}", where=where, fix=fix)


class RunFailedError(PackhorseError):
    """A run that was right at the start ended wrong."""

    exit_code: ClassVar[int] = 4


class NonFiniteError(RunFailedError):
    """A loss or gradient became NaN or infinite; names step, micro-batch and block."""


class StorageError(RunFailedError):
    """A disk is full or unwritable, or a file was truncated or changed under the run."""


class AuditError(RunFailedError):
    """A task read, wrote or kept something that its program does not declare."""


class StuckError(RunFailedError):
    """No lane has moved for long; names the task, its buffers and its file."""


class PeerLostError(RunFailedError):
    """Another rank has failed or is gone; names what this one waited for.

    Args:
        peer: the rank that this one had to do with when it noticed; None where it was no single
            one.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        peer: int | None = None,
    ) -> None:
        self.peer = peer
        super().__init__(what, where=where, fix=fix)


class StoppedError(PackhorseError):
    """A signal stopped the run; it can be resumed."""

    exit_code: ClassVar[int] = 75
