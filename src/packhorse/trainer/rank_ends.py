"""How the ranks of a run end early: together, within seconds, and with one report.

In: whatever ends this rank: an error of its own, a signal, or that another rank is lost. Out: on
one rank the error that is told, with the place of every rank; on all others a silent exit. All have
the exit code of the cause, and a line in their logs.

    an error here: leave word of it; where that is the first word, this rank speaks
    a rank is lost: find out which; whoever finds out first speaks
    a signal: the launcher sends it to all when one rank ends, so look whether one has; else a stop
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from packhorse.errors import (
    InputError,
    PackhorseError,
    PeerLostError,
    RefusedError,
    RunFailedError,
    StoppedError,
)
from packhorse.runtime.transport.lookout import Lookout, describe_places
from packhorse.runtime.transport.meeting import Meeting
from packhorse.runtime.transport.store import Word, find_word, leave_word
from packhorse.trainer.rank_folder import append_log
from packhorse.trainer.whereabouts import Whereabouts

END_WAIT: Final = timedelta(minutes=30)
"""How long the first rank may take to end, with all others done."""

_INTERRUPTED: Final = 130
_LOSS_S: Final = 22.0
# A signal may come because a rank has ended, and that may take a moment to be known.
_SIGNAL_S: Final = 0.5
_ALIKE_S: Final = 1.5
_PLACES_S: Final = 3.0
_LEAVING_S: Final = 20.0


class SilentEndError(Exception):
    """Another rank speaks: this one has only an exit code to give."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"exit code {exit_code}")


class RankEnds:
    """A `with` block around all that a rank does with the others; turns its error into one report.

    Args:
        report: tells an error where the process has to be ended by force.

    Raises:
        PackhorseError: what ended the run, on the rank that speaks.
        SilentEndError: on all others.
    """

    def __init__(self, meeting: Meeting, *, report: Callable[[PackhorseError], object]) -> None:
        self.whereabouts = Whereabouts()
        self._meeting = meeting
        self._report = report
        self._lookout: Lookout | None = None
        self._folder: Path | None = None
        self._go_on = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, GeneratorExit):
            return
        if self._lookout is not None:
            self._lookout.begin_end()
        word = self._find_word(error)
        told = self._tell(word, error)
        self._log(told)
        if told is not error and not isinstance(error, PeerLostError):
            self._log(error)
        if self._lookout is not None:
            self._lookout.leave()
            if word.is_stop:
                # The launcher ends all others once one has ended.
                self._lookout.await_leaving(_LEAVING_S)
            self._lookout.close()
        if word.by != self._meeting.rank:
            raise SilentEndError(word.exit_code) from error
        if told is not error:
            raise told from error

    def look_out(self) -> None:
        """Begin to look out for the others, who do so too."""
        self._lookout = Lookout(
            self._meeting, describe=self.whereabouts.describe, give_up=self._give_up
        )

    def note_run(self, folder: Path, go_on: str) -> None:
        """Note where the logs lie, and how the run goes on."""
        self._folder, self._go_on = folder, go_on

    def finish(self) -> None:
        """Wait for everybody, as the work is done.

        Raises:
            PeerLostError: another rank has failed in its last moments.
        """
        self.whereabouts.tell("done")
        if self._lookout is not None:
            self._lookout.leave()
        self._meeting.barrier(wait=END_WAIT)
        if self._lookout is not None:
            self._lookout.close()
        self._meeting.close()

    def _find_word(self, error: BaseException) -> Word:
        """The word that stands: what ended the run."""
        rank = self._meeting.rank
        what = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, PeerLostError):
            if self._lookout is not None:
                return self._lookout.await_word(error.peer, _LOSS_S, what)
            return self._say(Word(rank=None, what=what, by=rank))
        if self._lookout is not None:
            if isinstance(error, StoppedError):
                self._lookout.await_failure(_SIGNAL_S)
            elif rank and isinstance(error, InputError | RefusedError):
                # What is wrong for all ranks alike is the first one's to say.
                self._lookout.await_failure(_ALIKE_S)
        code = error.exit_code if isinstance(error, PackhorseError) else PackhorseError.exit_code
        if isinstance(error, KeyboardInterrupt):
            code = _INTERRUPTED
        return self._say(Word(rank=rank, what=what, by=rank, exit_code=code))

    def _say(self, word: Word) -> Word:
        if self._lookout is not None:
            return self._lookout.say(word)
        return find_word(self._meeting.store) or leave_word(self._meeting.store, word) or word

    def _tell(
        self, word: Word, error: BaseException | None, *, places_s: float = _PLACES_S
    ) -> BaseException:
        """What is told of a word on this rank; the others have a moment to say where they are."""
        rank = self._meeting.rank
        speaks = word.by == rank
        own = word.rank == rank and speaks and error is not None
        if own and isinstance(error, RunFailedError):
            error.what = f"{self._name(rank)}: {error.what}"
            error.where = "\n".join(filter(None, (error.where, self._places(None, places_s))))
        if own or word.is_stop:
            if own and rank and isinstance(error, InputError | RefusedError):
                error.what = f"{self._name(rank)}: {error.what}"
            return error if own and error is not None else StoppedError(word.what)
        if word.rank is None and isinstance(error, PackhorseError) and speaks:
            return error
        name = "" if word.rank is None else f"{self._name(word.rank)}: "
        return PeerLostError(
            f"{name}{word.what}{self._after()}",
            where=self._places(word.rank, places_s) if speaks else self.whereabouts.describe(),
            fix=self._advise(word),
        )

    def _name(self, rank: int) -> str:
        attendees = self._meeting.attendees
        return str(attendees[rank]) if attendees else f"rank {rank}"

    def _after(self) -> str:
        step = self.whereabouts.finished_step
        return "" if step is None else f"; step {step} is the last that is finished"

    def _places(self, lost: int | None, limit_s: float) -> str:
        if self._lookout is None:
            return ""
        places = self._lookout.await_places(limit_s)
        return describe_places(places, self._meeting.attendees, lost)

    def _advise(self, word: Word) -> str:
        lines: list[str] = []
        if word.rank is not None and "SIGKILL" in word.what:
            lines.append("see in the kernel log of that host whether its memory ran out")
        elif word.rank is not None:
            lines.append(f"see what that rank said last: logs/rank-{word.rank}.log")
        if self._go_on and self.whereabouts.finished_step is not None:
            lines.append(f"go on: {self._go_on}")
        return "\n".join(lines)

    def _log(self, told: BaseException) -> None:
        if self._folder is not None:
            append_log(self._folder, self._meeting.rank, f"the run has ended: {told}")

    def _give_up(self, word: Word) -> None:
        """End the process: its main thread waits for what will not come, in foreign code."""
        # On the thread that hears the others: what they said last has to do.
        told = self._tell(word, None, places_s=0.0)
        self._log(told)
        if word.by == self._meeting.rank and isinstance(told, PackhorseError):
            self._report(told)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(word.exit_code)
