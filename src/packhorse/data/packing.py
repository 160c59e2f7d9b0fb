"""Which documents share a row. In: documents in order. Out: rows, each a tuple of documents.

Without packing every document is a row. With it, a window of rows stays open:

    for each document:
        put it into the first open row that has room
        else open a new row for it, and close the oldest one if WINDOW_ROWS are open

so the result depends on the order alone, memory is that of the window, and no document is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from packhorse.data.documents import Document

WINDOW_ROWS: Final = 128

PackedRow = tuple[Document, ...]


def lay_out_rows(
    documents: Iterable[Document], *, max_length: int, packing: bool
) -> Iterator[PackedRow]:
    """Put documents into rows of at most `max_length` tokens."""
    if not packing:
        for document in documents:
            yield (document,)
        return
    window: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        length = len(document.tokens)
        place = next((index for index, free in enumerate(room) if free >= length), None)
        if place is None:
            if len(window) == WINDOW_ROWS:
                room.pop(0)
                yield tuple(window.pop(0))
            window.append([document])
            room.append(max_length - length)
        else:
            window[place].append(document)
            room[place] -= length
            if room[place] < 2:
                room.pop(place)
                yield tuple(window.pop(place))
    yield from map(tuple, window)
