"""Rows as people can check them. In: a row of a cache. Out: stretches of text, each learnt or not.

A character may take several tokens; they stay together, so every stretch is readable text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from packhorse.data.cache import TokenCache, TokenRow
from packhorse.data.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_MOST_TOKENS_A_CHARACTER: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token, or the few that make up one character, and whether the loss counts it."""

    text: str
    has_label: bool
    token_ids: tuple[int, ...]


def show_row(cache: TokenCache, index: int, tokenizer: Tokenizer | None) -> tuple[ShownToken, ...]:
    """Spell out a row; without a tokenizer each token shows as its number."""
    row = cache.row(index)
    if tokenizer is None:
        return tuple(
            ShownToken(text=f"{token} ", has_label=bool(label), token_ids=(int(token),))
            for token, label in zip(row.tokens, row.labelled, strict=True)
        )
    return tuple(_spell_tokens(row, tokenizer))


def _spell_tokens(row: TokenRow, tokenizer: Tokenizer) -> list[ShownToken]:
    shown: list[ShownToken] = []
    waiting: list[int] = []
    num_tokens = len(row.tokens)
    for index in range(num_tokens):
        label = bool(row.labelled[index])
        waiting.append(int(row.tokens[index]))
        text = tokenizer.decode(waiting)
        last = index + 1 == num_tokens or bool(row.labelled[index + 1]) != label
        unfinished = text.endswith(_REPLACEMENT) and len(waiting) < _MOST_TOKENS_A_CHARACTER
        if last or not unfinished:
            shown.append(ShownToken(text=text, has_label=label, token_ids=tuple(waiting)))
            waiting = []
    return shown


def mark_labels(tokens: Iterable[ShownToken], *, opening: str = "[[", closing: str = "]]") -> str:
    """Join a row into plain text with every learnt stretch between two marks."""
    parts: list[str] = []
    inside = False
    for token in tokens:
        if token.has_label != inside:
            parts.append(opening if token.has_label else closing)
            inside = token.has_label
        parts.append(token.text)
    if inside:
        parts.append(closing)
    return "".join(parts)
