"""A mark of what lies in memory, so cheap that every write can leave one.

    mark    crc32 of the first 8 bytes of every whole page, then of all that is left

Reading one word of a page costs a hundredth of moving the page. So a mark finds every page that is
not the one that was written: lost, older, of another place or another file. Bits that are flipped
elsewhere in a page are left to the drive's own error correction.

In: memory, whole or piece by piece. Out: a number; of pieces the same as of the whole.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from packhorse.storage.memory import Memory, MemoryRange

PAGE_BYTES: Final = 4096
_WORD_BYTES: Final = 8


def mark_pages(memory: Memory, size_bytes: int, before: int = 0) -> int:
    """Give the mark of the first `size_bytes` of memory.

    Args:
        before: the mark of the pieces before this one, all of whole pages.
    """
    whole_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
    with MemoryRange(memory, size_bytes, writable=False) as content:
        words = np.frombuffer(
            content.part(0, whole_bytes), dtype=np.uint64, count=whole_bytes // _WORD_BYTES
        )
        first = words[:: PAGE_BYTES // _WORD_BYTES].tobytes()
        del words
        rest = bytes(content.part(whole_bytes, size_bytes - whole_bytes))
    return zlib.crc32(rest, zlib.crc32(first, before))
