"""JSON that people read: whatever fits on a line stays on one line.

In: dicts, lists and scalars. Out: indented JSON, ASCII, at most `WIDTH` columns where possible.
"""

from __future__ import annotations

import json
from typing import Final

from packhorse.plan.fields import as_list, as_mapping

WIDTH: Final = 100


def format_json(value: object, *, indent: int = 0, lead: int = 0) -> str:
    """Render a value; containers that fit in the rest of a line are not broken.

    Args:
        value: what `json.dumps` takes; no NaN.
        indent: columns before the lines of the closing bracket.
        lead: columns that the first line has already used, a key for example.
    """
    flat = json.dumps(value, allow_nan=False)
    # One column is left for the comma.
    if max(indent, lead) + len(flat) < WIDTH or not value:
        return flat
    inner = indent + 2
    pad = " " * inner
    lines: list[str] = []
    if (content := as_mapping(value)) is not None:
        for key, item in content.items():
            head = f"{pad}{json.dumps(str(key))}: "
            lines.append(head + format_json(item, indent=inner, lead=len(head)))
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    if (items := as_list(value)) is not None:
        lines = [pad + format_json(item, indent=inner, lead=inner) for item in items]
        return "[\n" + ",\n".join(lines) + "\n" + " " * indent + "]"
    return flat
