"""The two shapes of parsed JSON that rows are made of, as the type checker sees them."""

from __future__ import annotations

from typing import TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Tell whether a parsed JSON value is an object; its keys are strings always."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    """Tell whether a parsed JSON value is a list."""
    return isinstance(value, list)
