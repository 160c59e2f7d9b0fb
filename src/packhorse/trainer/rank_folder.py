"""What a rank beside the first one writes into the run folder: its log and its measured timeline.

    logs/rank-N.log
    timeline-measured-rank-N.json

All else is the first rank's, which writes it for all: metrics, plan, what the plan promises of each
rank (timeline-predicted-rank-N.json), checkpoints and the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from packhorse.storage.durable import write_durably
from packhorse.storage.space import explain_failure
from packhorse.timeline.files import MEASURED_NAME, name_for_rank
from packhorse.trainer.run_folder import stamp_line


def append_log(run: Path, rank: int, text: str) -> None:
    """Append lines to a rank's log where there is one. Never fails: it tells how a rank ended."""
    log = run / "logs" / f"rank-{rank}.log"
    with suppress(OSError):
        if log.is_file():
            with log.open("a", encoding="utf-8") as file:
                file.write(stamp_line(text))


class RankFolder:
    """The run folder, as a rank beside the first one has it.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, path: Path, *, rank: int) -> None:
        self.path = path
        self._rank = rank
        log = path / "logs" / f"rank-{rank}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log: TextIO = log.open("a", encoding="utf-8")
        except OSError as error:
            raise explain_failure(error, log, "use the run folder") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._log.close()

    def write_file(self, name: str, text: str) -> None:
        """Replace one of this rank's own files durably; what the first rank writes is left to it.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        if name == MEASURED_NAME:
            write_durably(self.path / name_for_rank(name, self._rank), text)

    def write_metrics(self, metrics: Mapping[str, float | int | None]) -> None:
        """Leave metrics to the first rank."""

    def has_evaluation(self, step: int) -> bool:
        """Only the first rank knows.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"the first rank knows whether step {step} is evaluated")

    def write_log(self, text: str) -> None:
        """Append a line with the time to this rank's log.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        try:
            self._log.write(stamp_line(text))
            self._log.flush()
        except OSError as error:
            raise explain_failure(error, Path(self._log.name), "append to the log") from error
