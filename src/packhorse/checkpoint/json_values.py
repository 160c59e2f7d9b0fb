"""JSON as typed values, so that what was read is checked where it is used.

In: a file's bytes. Out: a value whose shape a `match` can ask for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeGuard

JsonValue: TypeAlias = (
    "Mapping[str, JsonValue] | Sequence[JsonValue] | str | int | float | bool | None"
)
JsonObject: TypeAlias = Mapping[str, JsonValue]


def parse_json(content: bytes) -> JsonValue:
    """Parse UTF-8 JSON.

    Raises:
        ValueError: it is not JSON.
    """
    return json.loads(content)


def is_object(value: JsonValue) -> TypeGuard[JsonObject]:
    """Tell a JSON object."""
    return isinstance(value, dict)
