"""What rows are made of: the label without a loss, and the two shapes of parsed JSON."""

from __future__ import annotations

from typing import Final, TypeGuard

IGNORED_LABEL: Final = -100
"""The label of a token that no loss counts, as torch's cross-entropy has it."""


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Tell whether a parsed JSON value is an object; its keys are strings always."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    """Tell whether a parsed JSON value is a list."""
    return isinstance(value, list)
