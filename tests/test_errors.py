"""Pins the text and the exit code of every error type."""

from __future__ import annotations

import inspect

import pytest

from packhorse import errors

PINNED: dict[type[errors.PackhorseError], tuple[int, str]] = {
    errors.PackhorseError: (1, ""),
    errors.InputError: (2, ""),
    errors.RecipeError: (2, ""),
    errors.DataError: (2, ""),
    errors.ModelError: (2, ""),
    errors.FileFormatError: (2, ""),
    errors.OtherVersionError: (2, ""),
    errors.MismatchError: (2, ""),
    errors.RefusedError: (3, ""),
    errors.DoesNotFitError: (3, ""),
    errors.RuleError: (3, "rule present: "),
    errors.RunFailedError: (4, ""),
    errors.NonFiniteError: (4, ""),
    errors.StorageError: (4, ""),
    errors.AuditError: (4, ""),
    errors.StuckError: (4, ""),
    errors.PeerLostError: (4, ""),
    errors.StoppedError: (75, ""),
}
TEXT = """\
{prefix}need 2.1 GiB, have 1.0 GiB
  where: tier device
         step 3
  fix:   raise the budget
         or recompute"""


def build_error(
    kind: type[errors.PackhorseError], *, where: str | None, fix: str | None
) -> errors.PackhorseError:
    what = "need 2.1 GiB, have 1.0 GiB"
    if issubclass(kind, errors.RuleError):
        return kind(what, rule="present", where=where, fix=fix)
    return kind(what, where=where, fix=fix)


def test_every_type_is_pinned() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert defined == set(PINNED)


@pytest.mark.parametrize("kind", PINNED, ids=lambda kind: kind.__name__)
def test_text_and_exit_code(kind: type[errors.PackhorseError]) -> None:
    exit_code, prefix = PINNED[kind]
    error = build_error(kind, where="tier device\nstep 3", fix="raise the budget\nor recompute")
    assert str(error) == TEXT.format(prefix=prefix)
    assert error.exit_code == exit_code
    assert str(build_error(kind, where=None, fix=None)) == f"{prefix}need 2.1 GiB, have 1.0 GiB"


def test_the_docstring_draws_the_tree() -> None:
    tree = errors.__doc__ or ""
    for kind in PINNED:
        assert kind.__name__ in tree
    codes = {
        kind.__name__: code
        for kind, (code, _) in PINNED.items()
        if kind.__base__ is errors.PackhorseError
    }
    for name, code in codes.items():
        (line,) = [line for line in tree.splitlines() if name in line]
        assert f"exit {code}" in " ".join(line.split())
