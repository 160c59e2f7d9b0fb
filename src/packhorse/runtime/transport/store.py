"""The key-value store that all ranks met at, and the word that is left there when a run ends early.

In: one of `torch.distributed`'s stores. Out: what ended the run, where somebody said so. The first
word stands: it names the cause, all later ones are consequences. Whoever left it speaks for all.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Protocol, Self

from packhorse.errors import RunFailedError, StoppedError

_WORD_KEY: Final = "packhorse/failed"


class Store(Protocol):
    """What is used of the stores of `torch.distributed`."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key that has the expected value, or has none where that is empty."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value of a key; waits for it."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are there."""
        ...

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; whether it was there."""
        ...

    def clone(self) -> Self:
        """The same store over a connection of its own, for another thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What ended a run early.

    `rank` is the one that it happened to, None where nobody knows; `by` is the one that says so.
    All ranks end with `exit_code`.
    """

    rank: int | None
    what: str
    by: int
    exit_code: int = RunFailedError.exit_code

    @property
    def is_stop(self) -> bool:
        """Whether a signal has stopped the run, and nothing is wrong."""
        return self.exit_code == StoppedError.exit_code

    def __str__(self) -> str:
        return self.what if self.rank is None else f"rank {self.rank}: {self.what}"

    def as_loss(self) -> str:
        """What it means for those who wait for that rank."""
        return str(self) if self.is_stop else f"another rank has failed: {self}"


def leave_word(store: Store, word: Word) -> Word | None:
    """Say why the run ends, unless that was said before. Never fails.

    Returns:
        The word that stands; None where the store is gone.
    """
    with suppress(RuntimeError):
        return _read(store.compare_set(_WORD_KEY, "", json.dumps(asdict(word))))
    return None


def find_word(store: Store) -> Word | None:
    """What ended the run, where somebody has left word. Never fails."""
    with suppress(RuntimeError):
        if store.check([_WORD_KEY]):
            return _read(store.get(_WORD_KEY))
    return None


def _read(text: bytes) -> Word:
    return Word(**json.loads(text))
