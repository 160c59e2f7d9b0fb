"""Pieces to documents of at most `max_length` tokens, and the count of what happened to them.

In: pieces in order. Out: documents, each at least two tokens long and with at least one label that
counts (the first token's never does: nothing predicts it). A long text is cut into consecutive
documents; the last two share the rest so that no single token is left over. Anything else that is
too long loses its right end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packhorse.data.encoding import Piece
from packhorse.data.formats import RowFormat
from packhorse.data.sources import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Tokens that belong together; `labelled[0]` is False always."""

    origin: Origin
    tokens: NDArray[np.int64]
    labelled: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What became of the data.

    `num_read` counts examples in the files (a .txt file is one). Of these `num_empty` had fewer
    than two tokens, `num_without_labels` had nothing to learn from, `num_dropped` had all they
    could teach beyond `max_length`: none of them is in the cache. `num_truncated` lost their right
    end (the dropped ones too). `num_rows` are the rows a batch is made of, `num_documents` what
    lies in them; `num_label_tokens` of `num_tokens` carry loss.
    """

    formats: tuple[tuple[Path, RowFormat], ...]
    num_read: int
    num_empty: int
    num_without_labels: int
    num_dropped: int
    num_truncated: int
    num_documents: int
    num_rows: int
    num_tokens: int
    num_label_tokens: int
    longest_row: int


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts while the data streams by."""

    num_read: int = 0
    num_empty: int = 0
    num_without_labels: int = 0
    num_dropped: int = 0
    num_truncated: int = 0


def make_documents(pieces: Iterable[Piece], *, max_length: int, tally: Tally) -> Iterator[Document]:
    """Cut and truncate pieces; `tally` is counted up as they pass."""
    rest: list[Piece] = []
    num_emitted = 0
    for piece in pieces:
        if not piece.may_cut:
            tally.num_read += 1
            yield from _truncate(piece, max_length, tally)
            continue
        if piece.starts:
            tally.num_read += 1
            num_emitted = 0
        whole = _join([*rest, piece])
        rest = []
        start = 0
        # One token more than a row stays back: the end may still have to be shared out.
        while len(whole.tokens) - start > max_length + 1:
            yield _make_document(whole, start, start + max_length)
            num_emitted += 1
            start += max_length
        if not piece.ends:
            rest = [_slice(whole, start)]
            continue
        for begin, end in _share_end(start, len(whole.tokens), max_length):
            yield _make_document(whole, begin, end)
            num_emitted += 1
        if num_emitted == 0:
            tally.num_empty += 1


def _share_end(start: int, end: int, max_length: int) -> list[tuple[int, int]]:
    length = end - start
    if length < 2:
        return []
    if length <= max_length:
        return [(start, end)]
    # Here length is max_length + 1.
    middle = end - 2 if max_length > 2 else end - 1
    return [(start, middle), (middle, end)] if max_length > 2 else [(start, middle)]


def _truncate(piece: Piece, max_length: int, tally: Tally) -> Iterator[Document]:
    if len(piece.tokens) < 2:
        tally.num_empty += 1
        return
    if not piece.labelled[1:].any():
        tally.num_without_labels += 1
        return
    if len(piece.tokens) > max_length:
        tally.num_truncated += 1
    if not piece.labelled[1:max_length].any():
        tally.num_dropped += 1
        return
    yield _make_document(piece, 0, max_length)


def _make_document(piece: Piece, start: int, end: int) -> Document:
    labelled = piece.labelled[start:end].copy()
    labelled[0] = False
    return Document(origin=piece.origin, tokens=piece.tokens[start:end], labelled=labelled)


def _join(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        origin=pieces[0].origin,
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        labelled=np.concatenate([piece.labelled for piece in pieces]),
        may_cut=True,
        starts=pieces[0].starts,
        ends=pieces[-1].ends,
    )


def _slice(piece: Piece, start: int) -> Piece:
    return Piece(
        origin=piece.origin,
        tokens=piece.tokens[start:],
        labelled=piece.labelled[start:],
        may_cut=True,
        starts=False,
        ends=False,
    )
