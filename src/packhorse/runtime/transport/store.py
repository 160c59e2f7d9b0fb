"""The key-value store that all ranks met at, and the word that a failing rank leaves there.

In: one of `torch.distributed`'s stores. Out: why another rank has failed, where one said so.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Protocol

_REASON_KEY: Final = "packhorse/failed"


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


def leave_word(store: Store, rank: int, reason: str) -> None:
    """Say why a rank ends, unless another one said so before. Never fails."""
    with suppress(RuntimeError):
        store.compare_set(_REASON_KEY, "", f"rank {rank}: {reason}")


def find_word(store: Store) -> str | None:
    """The first rank that failed and why, where one has left word. Never fails."""
    with suppress(RuntimeError):
        if store.check([_REASON_KEY]):
            return store.get(_REASON_KEY).decode()
    return None
