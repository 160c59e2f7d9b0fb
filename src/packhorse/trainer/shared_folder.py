"""Is the run folder the same folder on every rank?

In: its path, as the recipe says it on every rank. Out: nothing, or a refusal that names a rank
which does not see what the first one has written there. All of them read checkpoints from it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from packhorse.errors import InputError
from packhorse.storage.space import explain_failure

_NAME: Final = ".packhorse-shared"
# What a network drive shows to others it may show late.
_LATE_S: Final = 10.0
_PAUSE_S: Final = 0.1


class Gathering(Protocol):
    """Ranks that have met, as one of them sees it."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def hosts(self) -> Sequence[str]:
        """The host of every rank."""
        ...

    def gather(self, text: str, *, wait: timedelta | None = None) -> list[str]:
        """Give every rank's text to all, by rank."""
        ...


def check_shared(folder: Path, ranks: Gathering, *, late_s: float = _LATE_S) -> None:
    """Check that all ranks see one folder; leaves nothing in it. All ranks call it.

    Raises:
        InputError: names a rank that sees another one; the same on every rank.
        StorageError: on the first rank, it cannot be made or written.
    """
    path = folder / _NAME
    if ranks.rank:
        token = ranks.gather("")[0]
        found = ranks.gather(json.dumps(_find(path, token, late_s)))
    else:
        with _written(path, token := secrets.token_hex(16)):
            ranks.gather(token)
            found = ranks.gather("true")
    blind = [rank for rank, sees in enumerate(found) if not json.loads(sees)]
    if blind:
        more = f" and {len(blind) - 1} more" if len(blind) > 1 else ""
        raise InputError(
            f"rank {blind[0]}{more} does not see what rank 0 writes into output_dir",
            where=f"{folder} on hosts {ranks.hosts[0]} and {ranks.hosts[blind[0]]}",
            fix="name a folder on a drive that all hosts share, by the same path on each",
        )


@contextmanager
def _written(path: Path, token: str) -> Generator[None]:
    """Inside, a file holds the token; folders that were made for it go with it."""
    folders = [path.parent, *path.parent.parents]
    made = [folder for folder in folders if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(token, encoding="ascii")
        yield
    except OSError as error:
        raise explain_failure(error, path, "write into the run folder") from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()


def _find(path: Path, token: str, late_s: float) -> bool:
    end_s = time.monotonic() + late_s
    while True:
        with suppress(OSError):
            if path.read_text(encoding="ascii") == token:
                return True
        if time.monotonic() > end_s:
            return False
        time.sleep(_PAUSE_S)
