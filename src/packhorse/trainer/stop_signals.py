"""Signals that stop a run so that it can be resumed.

In: SIGTERM, SIGUSR1, SIGUSR2, Ctrl-C. Out: the name of the first one that came, for the loop to
ask between steps. A second Ctrl-C ends the process at once. Before there is anything to save,
`stop_at_once` turns the first one into an error. Handlers are put back at the end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, Self

from packhorse.errors import StoppedError
from packhorse.trainer.crew import Crew

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


GRACE_S: Final = 10.0
"""After a signal a step may take so long to finish; longer ones are given up where that is safe."""


class GivenUpError(Exception):
    """A step that was given up for a signal; what it had changed does not count."""


class StopSignals:
    """Catches the signals inside a `with` block of the main thread."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._came_s = 0.0
        self._can_give_up = False
        self._before: dict[signal.Signals, Any] = {}  # handlers have no common type

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def name(self) -> str | None:
        """The first signal that came, such as `SIGTERM`; None so far."""
        return self._name

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self._name == "SIGINT" and name == "SIGINT":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if self._name is None:
            self._came_s = time.monotonic()
        if self._name is None or name == "SIGINT":
            self._name = name

    @contextmanager
    def giving_up(self, *, allowed: bool) -> Generator[None]:
        """Inside, where it is allowed, `watch` gives the step up when it takes too long."""
        self._can_give_up = allowed
        try:
            yield
        finally:
            self._can_give_up = False

    def watch(self) -> None:
        """Ask between tasks.

        Raises:
            GivenUpError: a signal came more than `GRACE_S` ago, and the step may be given up.
        """
        late = self._name is not None and time.monotonic() - self._came_s > GRACE_S
        if self._can_give_up and late:
            raise GivenUpError


class AgreedSignals:
    """Signals that stop all ranks, whichever of them they came to."""

    def __init__(self, signals: StopSignals, crew: Crew) -> None:
        self._signals = signals
        self._crew = crew
        self._name: str | None = None

    @property
    def name(self) -> str | None:
        """The signal that all ranks know of; None so far."""
        return self._name

    def ask(self) -> str | None:
        """Ask all ranks for the first signal that came to one of them; all of them ask together."""
        if self._name is None:
            mine = self._signals.name
            names = [number.name for number in SIGNALS]
            found = self._crew.agree(0 if mine is None else 1 + names.index(mine))
            self._name = names[found - 1] if found else None
        return self._name

    @contextmanager
    def giving_up(self, *, allowed: bool) -> Generator[None]:
        """See `StopSignals.giving_up`."""
        with self._signals.giving_up(allowed=allowed):
            yield


def ignore_signals() -> None:
    """Let signals do nothing from now on, but inside of blocks that handle them.

    The process is about to end, and is to say with which exit code.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_at_once() -> Generator[None]:
    """Inside, in the main thread, a signal raises `StoppedError`: there is nothing to save yet."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise StoppedError(
            f"stopped by {signal.Signals(number).name} before the first step; nothing was changed",
            fix="start it again with the same command",
        )

    with _handling(stop):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    before: dict[signal.Signals, Any] = {}  # handlers have no common type
    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
