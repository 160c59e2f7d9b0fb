"""Signals that stop a run so that it can be resumed.

In: SIGTERM, SIGUSR1, SIGUSR2, Ctrl-C. Out: the name of the first one that came, for the loop to
ask between steps. A second Ctrl-C ends the process at once. Before there is anything to save,
`stop_at_once` turns the first one into an error. Handlers are put back at the end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final, Self

from packhorse.errors import StoppedError

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopSignals:
    """Catches the signals inside a `with` block of the main thread."""

    def __init__(self) -> None:
        self._name: str | None = None
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
        if self._name is None or name == "SIGINT":
            self._name = name


@contextmanager
def stop_at_once() -> Generator[None]:
    """Inside, in the main thread, a signal raises `StoppedError`: there is nothing to save yet."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise StoppedError(
            f"stopped by {signal.Signals(number).name} before the first step; nothing was changed",
            fix="start it again with the same command",
        )

    before: dict[signal.Signals, Any] = {}  # handlers have no common type
    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before[number] = signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
