"""Where a rank of a run is, for who asks when one of them is lost.

In: what the training loop tells. Out: a line such as `step 4 is finished; in step 5: lane compute
in task 12 of step 5: Forward ...`. Asked from another thread than it is told from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Whereabouts:
    """What this rank does, and the last step that it finished."""

    def __init__(self) -> None:
        self._doing = "starting"
        self._finished_step: int | None = None
        self._look: Callable[[], Sequence[str]] = tuple

    @property
    def finished_step(self) -> int | None:
        """The last finished step; None before training begins."""
        return self._finished_step

    def tell(self, doing: str, *, finished_step: int | None = None) -> None:
        """Note what begins now."""
        if finished_step is not None:
            self._finished_step = finished_step
        self._doing = doing

    def tell_tasks(self, look: Callable[[], Sequence[str]]) -> None:
        """Note who knows which tasks are under way."""
        self._look = look

    def describe(self) -> str:
        """Say it in one line."""
        parts: list[str] = []
        if self._finished_step is not None:
            parts.append(f"step {self._finished_step} is finished")
        tasks = self._look()
        parts.append(f"{self._doing}: {', '.join(tasks)}" if tasks else self._doing)
        return "; ".join(parts)
