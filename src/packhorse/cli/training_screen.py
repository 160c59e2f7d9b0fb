"""What a person sees of a run: a line per step, a bar below them, a summary at the end.

In: what the training loop tells its observer. Out: lines on one console, with a live bar where it
is a terminal; and a `Summary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column

from packhorse.units import format_bytes, format_ns, format_percent

if TYPE_CHECKING:
    from packhorse.trainer.observer import EvaluationReport, RunStart, StepReport, TrainResult

_RECENT_STEPS: Final = 20
_BAR_WIDTH: Final = 12
_HEAD: Final = "  step      loss  grad norm  learn rate  tokens/s      time     device"
_TENTH: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run went; steps are (number, value), peaks bytes by tier.

    Where there are enough steps, `tenth_losses` are the means of the first and the last tenth of
    them, and `num_in_tenth` how many that are: single losses differ by their batch.
    """

    first_loss: tuple[int, float] | None
    last_loss: tuple[int, float] | None
    tenth_losses: tuple[float, float] | None
    num_in_tenth: int
    eval_losses: tuple[tuple[int, float], ...]
    step_s: tuple[float, ...]
    tokens_per_second: float
    peak_bytes: Mapping[str, int]
    result: TrainResult | None


class TrainingScreen:
    """Shows a run; an `Observer` of the trainer. Use it in a `with` block.

    Args:
        console: where everything is shown.
        predicted_ns: what the plan promises of a step, None if nothing.
        base_bytes: what the process holds beside all that tasks use; counts for the device.
        budget_bytes: what each tier may use.
        logging_steps: steps between lines.
        at_start: called once, when the run folder is there and the first step is not.
    """

    def __init__(
        self,
        console: Console,
        *,
        predicted_ns: int | None,
        base_bytes: int,
        budget_bytes: Mapping[str, int],
        logging_steps: int,
        at_start: Callable[[], None],
    ) -> None:
        self._console = console
        self._predicted_ns = predicted_ns
        self._base_bytes = base_bytes
        self._budget_bytes = budget_bytes
        self._logging_steps = logging_steps
        self._at_start = at_start
        self._start: RunStart | None = None
        self._first: StepReport | None = None
        self._last: StepReport | None = None
        self._evaluations: list[tuple[int, float]] = []
        self._step_s: list[float] = []
        self._losses: list[float] = []
        self._num_tokens = 0.0
        self._peak_bytes: dict[str, int] = {}
        self._result: TrainResult | None = None
        self._doing = ""
        self._bar: Progress | None = _make_bar(console) if console.is_terminal else None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None, detail="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def summary(self) -> Summary:
        """How the run went so far."""
        first, last = self._first, self._last
        total_s = sum(self._step_s)
        num_in_tenth = len(self._losses) // _TENTH
        return Summary(
            first_loss=None if first is None else (first.step, first.loss),
            last_loss=None if last is None else (last.step, last.loss),
            tenth_losses=_tenths(self._losses),
            num_in_tenth=num_in_tenth,
            eval_losses=tuple(self._evaluations),
            step_s=tuple(self._step_s),
            tokens_per_second=self._num_tokens / total_s if total_s else 0.0,
            peak_bytes=dict(self._peak_bytes),
            result=self._result,
        )

    def started(self, start: RunStart) -> None:
        """See Observer."""
        self._start = start
        self._doing = ""
        self._at_start()
        self._say(
            f"steps {start.first_step} to {start.num_steps}, {start.global_rows} rows of"
            f" {start.row_length} tokens"
        )
        self._say(_HEAD, style="bold")
        self._update(start.first_step - 1, "first step")

    def noted(self, text: str) -> None:
        """See Observer."""
        self._say(f"note: {text}", style="cyan")

    def progressed(self, what: str, done: int, total: int | None) -> None:
        """See Observer."""
        if self._bar is None:
            if what != self._doing and self._start is None:
                self._say(what)
        else:
            self._update(None, f"{what} {done + 1} of {total}" if total else what)
        self._doing = what

    def stepped(self, report: StepReport) -> None:
        """See Observer."""
        self._first = self._first or report
        self._last = report
        self._step_s.append(report.step_s)
        self._losses.append(report.loss)
        self._num_tokens += report.tokens_per_second * report.step_s
        for tier, peak in self._peaks(report).items():
            self._peak_bytes[tier] = max(self._peak_bytes.get(tier, 0), peak)
        if report.step % self._logging_steps == 0 or self._is_last(report.step):
            self._say(_format_step(report, self._peaks(report)))
        self._update(report.step, self._say_pace(report))

    def evaluated(self, report: EvaluationReport) -> None:
        """See Observer."""
        self._evaluations.append((report.step, report.eval_loss))
        took = format_ns(report.eval_s * 1e9)
        self._say(f"{report.step:>6}  eval loss {report.eval_loss:.4f}, {took}", style="green")

    def saved(self, path: Path, save_s: float) -> None:
        """See Observer."""
        self._say(f"        saved {path} in {format_ns(save_s * 1e9)}", style="dim")

    def finished(self, result: TrainResult) -> None:
        """See Observer."""
        self._result = result

    def _peaks(self, report: StepReport) -> Mapping[str, int]:
        base = {"device": self._base_bytes}
        return {tier: peak + base.get(tier, 0) for tier, peak in report.peak_bytes.items()}

    def _is_last(self, step: int) -> bool:
        return self._start is not None and step == self._start.num_steps

    def _say_pace(self, report: StepReport) -> str:
        parts = [f"loss {report.loss:.4f}"]
        if self._predicted_ns:
            ratio = report.step_s * 1e9 / self._predicted_ns
            parts.append(f"{ratio:.2f} x predicted")
        used, budget = self._peaks(report).get("device"), self._budget_bytes.get("device")
        if used and budget:
            parts.append(f"{format_percent(used / budget)} of device")
        return ", ".join(parts)

    def _say_rest(self, start: RunStart) -> str:
        recent = self._step_s[-_RECENT_STEPS:]
        if self._last is None or not recent:
            return f"{start.first_step - 1}/{start.num_steps}"
        rest = start.num_steps - self._last.step
        left = format_ns(rest * sum(recent) / len(recent) * 1e9)
        return f"{self._last.step}/{start.num_steps}, {left} left"

    def _update(self, step: int | None, detail: str) -> None:
        if self._bar is None or self._task is None:
            return
        if self._start is None:
            self._bar.update(self._task, detail=detail)
            return
        self._bar.update(
            self._task,
            completed=step,
            total=self._start.num_steps,
            detail=f"{self._say_rest(self._start)}, {detail}",
        )

    def _say(self, text: str, *, style: str | None = None) -> None:
        console = self._console if self._bar is None else self._bar.console
        console.print(text, style=style, soft_wrap=True)


def _tenths(losses: Sequence[float]) -> tuple[float, float] | None:
    """The means of the first and last tenth; None where a tenth is not two steps at least."""
    count = len(losses) // _TENTH
    if count < 2:
        return None
    return sum(losses[:count]) / count, sum(losses[-count:]) / count


def _format_step(report: StepReport, peaks: Mapping[str, int]) -> str:
    norm = "-" if report.grad_norm is None else f"{report.grad_norm:.4g}"
    return (
        f"{report.step:>6}  {report.loss:>8.4f}  {norm:>9}  {report.learning_rate:>10.2e}"
        f"  {report.tokens_per_second:>8.0f}  {format_ns(report.step_s * 1e9):>8}"
        f"  {format_bytes(peaks.get('device', 0)):>9}"
    )


def _make_bar(console: Console) -> Progress:
    # One column of text, cut at its end: on a narrow terminal the least important goes.
    text = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        SpinnerColumn(style="none"),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[detail]}", markup=False, table_column=text),
        console=console,
        transient=True,
        expand=True,
    )
