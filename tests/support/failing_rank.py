"""packhorse as one of several ranks, of which one ends at a given place: see `FAIL` below.

FAIL is `RANK HOW PLACE`: HOW is a signal that the rank sends itself, `disk` for a disk that is full
from then on, or `hang`. PLACE is what a rank tells of what it does, or `send N`, its Nth message.
Each rank leaves its exit code in `exit-code-RANK` of the working directory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from packhorse.cli.main import main
from packhorse.runtime.transport.processes import ProcessTransport
from packhorse.trainer.whereabouts import Whereabouts


def end(how: str) -> None:
    if how == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    elif how == "hang":
        # Called by PyDLL, it holds the interpreter's lock: no thread goes on till a signal comes.
        ctypes.PyDLL(None).pause()
    else:
        os.kill(os.getpid(), signal.Signals[how])


def fail_at(place: str, act: Callable[[], None]) -> None:
    tell, send = Whereabouts.tell, ProcessTransport.send
    num_sent = 0

    def telling(self: Whereabouts, doing: str, *, finished_step: int | None = None) -> None:
        tell(self, doing, finished_step=finished_step)
        if doing == place:
            act()

    def sending(self: ProcessTransport, tensor, peer: int) -> None:
        nonlocal num_sent
        num_sent += 1
        if f"send {num_sent}" == place:
            act()
        send(self, tensor, peer)

    Whereabouts.tell, ProcessTransport.send = telling, sending


if __name__ == "__main__":
    rank, how, place = os.environ.get("FAIL", "- - -").split(maxsplit=2)
    if rank == os.environ["RANK"]:
        fail_at(place, lambda: end(how))
    try:
        main()
    except SystemExit as stop:
        Path(f"exit-code-{os.environ['RANK']}").write_text(str(stop.code))
        raise
