"""Where a long text may be cut so that its tokens stay what they were.

In: text. Out: stretches of about SEGMENT_CHARS that are tokenised one by one, so that a document of
any length needs bounded memory. The joined stretches are the text. Cuts lie after a line end,
else before a space, where tokenizers split in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

SEGMENT_CHARS: Final = 1024**2


def find_cut(text: str, limit: int) -> int:
    """Find the best place to cut within the first `limit` characters (all, if it is shorter)."""
    if len(text) <= limit:
        return len(text)
    end = limit
    while (newline := text.rfind("\n", 0, end)) > 0:
        if not text[newline + 1].isspace():
            return newline + 1
        end = newline
    space = text.rfind(" ", 1, limit)
    return space if space > 0 else limit


def split_text(text: str, limit: int = SEGMENT_CHARS) -> Iterator[str]:
    """Cut a text into stretches of at most `limit` characters."""
    start = 0
    while start < len(text):
        window = text[start : start + limit + 1]
        cut = find_cut(window, limit)
        yield window[:cut]
        start += cut
