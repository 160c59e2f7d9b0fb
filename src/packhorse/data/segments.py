"""Where a long text may be cut so that its tokens stay what they were.

In: text. Out: stretches of at most SEGMENT_CHARS that are tokenised one by one, so that a document
of any length needs bounded memory. The joined stretches are the text. A cut lies between a letter
or digit and the white space after it, where tokenizers split in any case; they join white space
with what follows it, and some join punctuation with a line end. (A tokenizer needs some 300 bytes a
character while it works.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

SEGMENT_CHARS: Final = 64 * 1024
_LOOK_BACK_CHARS: Final = 4096
_AFTER_WORD: Final = re.compile(r"[^\W_](?=\s)")
_AFTER_MARK: Final = re.compile(r"\S(?=\s)")


def find_cut(text: str, limit: int) -> int:
    """Find the best place to cut within the first `limit` characters (all, if it is shorter)."""
    if len(text) <= limit:
        return len(text)
    for boundary in (_AFTER_WORD, _AFTER_MARK):
        for start in (max(0, limit - _LOOK_BACK_CHARS), 0):
            places = [match.start() for match in boundary.finditer(text, start, limit + 1)]
            if places:
                return places[-1] + 1
    return limit


def split_text(text: str, limit: int = SEGMENT_CHARS) -> Iterator[str]:
    """Cut a text into stretches of at most `limit` characters."""
    start = 0
    while start < len(text):
        window = text[start : start + limit + 1]
        cut = find_cut(window, limit)
        yield window[:cut]
        start += cut
