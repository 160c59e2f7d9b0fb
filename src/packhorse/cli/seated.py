"""A command that torchrun has started as one of several ranks: how it meets the others, and ends.

In: torchrun's environment. Out: a meeting for the block inside; whatever ends that early is told by
one rank, see `trainer/rank_ends.py`.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import typer

from packhorse.cli.failures import report_error

if TYPE_CHECKING:
    from packhorse.runtime.transport.meeting import Meeting
    from packhorse.trainer.rank_ends import RankEnds


@contextmanager
def meet_ranks(*, as_json: bool) -> Generator[tuple[Meeting, RankEnds]]:
    """Meet the other ranks, and wait for them at the end of the block. A signal ends it.

    Raises:
        PeerLostError: names who did not come, cannot be reached, or is lost; on one rank.
        and what the block raises, on the rank that speaks of it for all.
        typer.Exit: on all others.
    """
    from packhorse.runtime.transport.meeting import open_meeting
    from packhorse.trainer.rank_ends import RankEnds, SilentEndError
    from packhorse.trainer.stop_signals import ignore_signals, stop_at_once

    meeting = open_meeting(os.environ)
    # Where one rank ends, the launcher ends all others with a signal: those still have to say why.
    ignore_signals()
    report = partial(report_error, as_json=as_json)
    try:
        with RankEnds(meeting, report=report) as ends, stop_at_once():
            meeting.connect(os.environ)
            ends.look_out()
            yield meeting, ends
            # What was asked for is done: nothing is left to stop.
            ignore_signals()
            ends.finish()
    except SilentEndError as error:
        raise typer.Exit(error.exit_code) from error
