"""Signals that stop a run so that it can be resumed.

In: SIGTERM, SIGUSR1, SIGUSR2, Ctrl-C. Out: the name of the first one that came, for the loop to
ask between steps. A second Ctrl-C ends the process at once. Handlers are put back at the end.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

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
