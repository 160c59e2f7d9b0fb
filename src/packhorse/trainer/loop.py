"""The training loop: steps, evaluations, saves, and how a run stops.

In: a session with its states filled, and everything around it. Out: a `TrainResult`.

    evaluate, when it is step 0
    for step in 1 .. num_steps:
        train the step's batch; report it
        keep it; evaluate and save when it is time; stop after a signal, kept or saved
    save the model

Steps run into each other. A step is reported, and kept, when its values are there; its last writes
may go on while the next one runs. It is over when its values are there, or, where the run waits
after it (to evaluate, save or end), when it is complete. It takes from the end of the step before
to its own; so the steps add up to the run. What a step did when is looked at once it is complete.

Ranks that share a model go through the same loop, each with its own part. What depends on the run
folder is the first one's to say, and a signal that came to one of them stops all after one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from packhorse.checkpoint.folders import checkpoint_path
from packhorse.errors import DataError, InputError, StoppedError
from packhorse.machine.process_memory import largest_resident_bytes
from packhorse.optim.schedules import learning_rate_at
from packhorse.timeline.files import MEASURED_NAME, format_timeline
from packhorse.timeline.spec import Timeline
from packhorse.trainer.crew import Crew
from packhorse.trainer.observer import (
    EvaluationReport,
    Observer,
    RunStart,
    StepReport,
    TrainResult,
    Watch,
)
from packhorse.trainer.preparation import PreparedRun
from packhorse.trainer.rank_folder import RankFolder
from packhorse.trainer.reporters import MetricsReporter
from packhorse.trainer.run_data import model_inputs
from packhorse.trainer.run_folder import RunFolder
from packhorse.trainer.saving import RunSaver
from packhorse.trainer.session import Session
from packhorse.trainer.stop_signals import GRACE_S, AgreedSignals, GivenUpError
from packhorse.units import GIB, format_bytes, format_ns

# The first step of a process still warms up; the second is the one to compare with the prediction.
_TYPICAL_STEP: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """Runs what is left of a run; `finished` steps are done before it begins."""

    prepared: PreparedRun
    session: Session
    saver: RunSaver
    folder: RunFolder | RankFolder
    crew: Crew
    reporters: tuple[MetricsReporter, ...]
    observer: Observer
    watch: Watch | None
    signals: AgreedSignals
    peak_flops_per_s: float
    resumed_from: Path | None
    baseline_bytes: int | None
    go_on: str

    def go(self, finished: int) -> TrainResult:
        """Train, evaluate and save until the end.

        Raises:
            InputError: more steps are finished than the run has.
            StoppedError: a signal came; the state was saved.
            DataError: the evaluation data has no label.
        """
        data = self.prepared.data
        num_steps = data.num_steps
        if finished > num_steps:
            raise InputError(
                f"the checkpoint is after step {finished}, but the run has {num_steps} steps",
                where="recipe: max_steps, num_train_epochs",
                fix="raise them, or resume from an earlier checkpoint: --resume PATH",
            )
        began = time.monotonic()
        self.crew.tell("before its next step", finished_step=finished)
        self._announce(finished)
        loss: float | None = None
        eval_loss: float | None = None
        saved_step = finished if self._is_own(self.resumed_from) else None
        if not self._is_evaluated(finished):
            # At step 0, or put off by the signal that stopped the run.
            eval_loss = self._evaluate(finished)
        if finished and saved_step != finished and self._saves_after(finished):
            # Kept, but killed before its checkpoint was whole.
            path = checkpoint_path(self.folder.path, finished)
            if not self.crew.lead_flag(path.is_dir):
                self._save_checkpoint(finished)
            saved_step = finished
        if self.signals.ask() is not None:
            raise self._stop(finished, saved_step)
        for step in range(finished + 1, num_steps + 1):
            try:
                # What is kept already, or was never begun, is not lost with the step.
                self.crew.tell(f"in step {step}")
                with self.signals.giving_up(allowed=self.session.keeps_step(step - 1)):
                    report = self._train_step(step, num_in_process=step - finished)
                    self.session.finish_step(self.saver.describe_state(step))
                    if self.signals.ask() is not None or self._waits_after(step):
                        self.session.settle()
                self.crew.tell("between steps", finished_step=step)
            except GivenUpError:
                self.signals.ask()
                kept = self.session.give_up(step - 1)
                self.note(
                    f"what is after step {kept} is given up for {self.signals.name}: it takes more"
                    f" than {GRACE_S:g} s longer, and step {kept} is kept"
                )
                raise self._stop(kept, saved_step) from None
            loss = loss if report is None else report.loss
            if self._evaluates_after(step):
                eval_loss = self._evaluate(step)
            stops = self.signals.name is not None
            if stops and self.session.keeps:
                # What is due is saved when the run goes on: whoever stops it may not wait for long.
                raise self._stop(step, saved_step)
            if self._saves_after(step):
                self._save_checkpoint(step)
                saved_step = step
            if stops and not (step == num_steps and self._is_evaluated(step)):
                raise self._stop(step, saved_step)
        begin_save = time.monotonic()
        self.crew.tell("saving the model")
        self.saver.save_model()
        self._tell_saved(self.folder.path, time.monotonic() - begin_save)
        self.session.discard_kept()
        result = TrainResult(
            num_steps=num_steps,
            loss=loss,
            eval_loss=eval_loss,
            output_dir=self.folder.path,
            resumed_from=self.resumed_from,
            wall_s=time.monotonic() - began,
        )
        self.folder.write_log(f"finished after step {num_steps}")
        self.observer.finished(result)
        return result

    def _is_own(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None and checkpoint.resolve().parent == self.folder.path.resolve()

    def note(self, text: str) -> None:
        self.folder.write_log(text)
        self.observer.noted(text)

    def _announce(self, finished: int) -> None:
        data = self.prepared.data
        start = RunStart(
            first_step=finished + 1,
            num_steps=data.num_steps,
            steps_per_epoch=data.steps_per_epoch,
            global_rows=self.prepared.cut.global_rows,
            row_length=data.row_length,
            resumed_from=self.resumed_from,
            scratch_bytes=self.session.scratch_bytes,
            checkpoint_bytes=self.saver.checkpoint_bytes,
        )
        self.folder.write_log(
            f"steps {start.first_step} to {start.num_steps}, {start.global_rows} rows of"
            f" {start.row_length} tokens, scratch {format_bytes(start.scratch_bytes)}, checkpoint"
            f" {format_bytes(start.checkpoint_bytes)}"
        )
        self.observer.started(start)

    def _train_step(self, step: int, *, num_in_process: int) -> StepReport | None:
        """Run a step and report it; None when its batch has nothing to learn from."""
        recipe, data = self.prepared.recipe, self.prepared.data
        batch = data.train.batch(step - 1)
        data.train.cache.release()
        if not batch.num_items:
            self._skip(step)
            return None
        learning_rate = learning_rate_at(
            step - 1,
            base=recipe.learning_rate,
            kind=recipe.lr_scheduler_type,
            warmup_steps=recipe.warmup_steps,
            total_steps=data.num_steps,
        )
        result = self.session.train_step(
            model_inputs(batch),
            denominator=batch.num_items,
            step=step,
            learning_rate=learning_rate,
            completed=partial(self._look_at, num_in_process),
        )
        if self._waits_after(step):
            self.session.settle()
        self.session.hold_promise(step)
        step_s = (time.perf_counter_ns() - result.began_ns) / 1e9
        report = StepReport(
            step=step,
            epoch=step / data.steps_per_epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            step_s=step_s,
            tokens_per_second=batch.num_tokens / step_s,
            mfu=self.session.step_flops / step_s / self.peak_flops_per_s,
            peak_bytes=self.session.peaks_of(result),
            process_bytes=self._process_bytes(),
            disk_read_bytes=result.disk_read_bytes,
            disk_written_bytes=result.disk_written_bytes,
        )
        self._report_step(report)
        return report

    def _look_at(self, num_in_process: int, timeline: Timeline) -> None:
        """Look at what a complete step did when."""
        remark = None if self.watch is None else self.watch(timeline)
        if remark is not None:
            self.note(remark)
        if num_in_process <= _TYPICAL_STEP:
            self.folder.write_file(MEASURED_NAME, format_timeline(timeline))

    def _skip(self, step: int) -> None:
        epoch = step / self.prepared.data.steps_per_epoch
        self._write_metrics(step, {"step": step, "epoch": epoch, "loss": None})
        self.note(
            f"step {step} is skipped: its batch has no label to learn from; raise max_length or"
            " global_batch_size, or check the data with `packhorse data RECIPE --show 3`"
        )

    def _report_step(self, report: StepReport) -> None:
        metrics: dict[str, float | int | None] = {
            "step": report.step,
            "epoch": report.epoch,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "tokens_per_second": report.tokens_per_second,
            "mfu": report.mfu,
        }
        metrics |= {f"{tier}_gib": peak / GIB for tier, peak in report.peak_bytes.items()}
        if report.process_bytes is not None:
            metrics["process_gib"] = report.process_bytes / GIB
        metrics["disk_read_gib"] = report.disk_read_bytes / GIB
        metrics["disk_written_gib"] = report.disk_written_bytes / GIB
        self._write_metrics(report.step, metrics)
        if _is_due(report.step, self.prepared.recipe.logging_steps):
            norm = "" if report.grad_norm is None else f" grad_norm {report.grad_norm:.4g}"
            self.folder.write_log(
                f"step {report.step} loss {report.loss:.6g}{norm} learning_rate"
                f" {report.learning_rate:.4g} {format_ns(report.step_s * 1e9)}"
                f" {report.tokens_per_second:.0f} tokens/s"
            )
        self.observer.stepped(report)

    def _evaluates_after(self, step: int) -> bool:
        data, interval = self.prepared.data, self.prepared.recipe.eval_steps
        is_time = step == data.num_steps or _is_due(step, interval)  # step 0 is a multiple, too
        return data.evaluation is not None and is_time

    def _saves_after(self, step: int) -> bool:
        interval = self.prepared.recipe.save_steps
        last = step == self.prepared.data.num_steps
        return interval is not None and (last or _is_due(step, interval))

    def _waits_after(self, step: int) -> bool:
        # Then a step is complete and its commit on its way: what goes wrong next costs nothing.
        last = step == self.prepared.data.num_steps
        return last or self._evaluates_after(step) or self._saves_after(step)

    def _is_evaluated(self, step: int) -> bool:
        if not self._evaluates_after(step):
            return True
        return self.crew.lead_flag(partial(self.folder.has_evaluation, step))

    def _evaluate(self, step: int) -> float | None:
        """Give the mean loss of all label tokens, None when a signal cut it short.

        Batch after batch, nothing is kept of them.
        """
        batches = self.prepared.data.evaluation
        assert batches is not None
        begin = time.monotonic()
        self.crew.tell(f"evaluating after step {step}")
        total, num_items = 0.0, 0
        for index in range(batches.steps_per_epoch):
            if self.signals.ask() is not None:
                self.note(f"the evaluation after step {step} is put off: {self.signals.name}")
                return None
            self.observer.progressed("evaluating", index, batches.steps_per_epoch)
            batch = batches.batch(index)
            # Divided by one: the sum over the batch, which a mean of means would get wrong.
            total += self.session.evaluate(model_inputs(batch), denominator=1).loss
            num_items += batch.num_items
            batches.cache.release()
        if not num_items:
            raise DataError(
                "the evaluation data has no label to learn from",
                where="recipe: eval_data",
                fix="check it with `packhorse data RECIPE --show 3`",
            )
        report = EvaluationReport(
            step=step,
            epoch=step / self.prepared.data.steps_per_epoch,
            eval_loss=total / num_items,
            eval_s=time.monotonic() - begin,
        )
        self._write_metrics(
            step, {"step": step, "epoch": report.epoch, "eval_loss": report.eval_loss}
        )
        self.folder.write_log(f"step {step} eval_loss {report.eval_loss:.6g}")
        self.observer.evaluated(report)
        if not math.isfinite(report.eval_loss):
            # Nothing of it reaches the weights, so the training is not lost with it.
            self.note(
                f"the eval_loss after step {step} is {report.eval_loss}, null in metrics.jsonl; the"
                " training goes on: look at the evaluation data and at the last losses"
            )
        return report.eval_loss

    def _save_checkpoint(self, step: int) -> None:
        begin = time.monotonic()
        self.crew.tell(f"saving checkpoint-{step}")
        self.observer.progressed("saving", step, None)
        self._tell_saved(self.saver.save_checkpoint(step), time.monotonic() - begin)

    def _tell_saved(self, path: Path, save_s: float) -> None:
        self.folder.write_log(f"saved {path} in {format_ns(save_s * 1e9)}")
        self.observer.saved(path, save_s)

    def _stop(self, step: int, saved_step: int | None) -> StoppedError:
        recipe = self.prepared.recipe
        if not step:
            return StoppedError(
                f"stopped by {self.signals.name} before the first step",
                where=str(self.folder.path),
                fix=self.go_on,
            )
        if saved_step != step or recipe.save_only_model:
            if self.session.keeps:
                self.session.keep_now(self.saver.describe_state(step))
                self.folder.write_log(f"stopped by {self.signals.name} after step {step}, kept")
                return StoppedError(
                    f"stopped by {self.signals.name} after step {step} of"
                    f" {self.prepared.data.num_steps}; its state is kept in the scratch folder",
                    where=str(self.session.scratch_path),
                    fix=self.go_on,
                )
            self._save_checkpoint(step)
        fix = "save_only_model leaves nothing to resume from; begin from the saved weights"
        if not recipe.save_only_model:
            fix = self.go_on
            self.session.discard_kept()
        self.folder.write_log(f"stopped by {self.signals.name} after step {step}")
        return StoppedError(
            f"stopped by {self.signals.name} after step {step} of"
            f" {self.prepared.data.num_steps}; the state is saved",
            where=str(self.folder.path / f"checkpoint-{step}"),
            fix=fix,
        )

    def _write_metrics(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        self.folder.write_metrics(metrics)
        for reporter in self.reporters:
            reporter.report(step, metrics)

    def _process_bytes(self) -> int | None:
        if self.baseline_bytes is None:
            return None
        return max(0, largest_resident_bytes() - self.baseline_bytes)


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
