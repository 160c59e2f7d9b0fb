"""How far is what was predicted from what was measured?

In: two timelines, as a rule a simulated and a measured one of the same program. Out: a
`Comparison`: step time, busy time per lane and per kind of task, peak per pool, and the tasks that
differ most, messages left out. Errors are relative to the measured side. The peaks of both sides
are ledgers: what the kernel says of the whole process is laid beside them where it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from packhorse.timeline.names import KINDS, order_lanes
from packhorse.timeline.spec import Timeline

MESSAGES: Final = ("send", "receive")
"""Kinds of tasks that end only when another rank comes to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One quantity on both sides, in ns or bytes."""

    name: str
    predicted: int
    measured: int

    @property
    def error(self) -> float | None:
        """Share of the measured value by which the prediction is too high; None when that is 0."""
        if self.measured:
            return (self.predicted - self.measured) / self.measured
        return None if self.predicted else 0.0

    @property
    def excess(self) -> int:
        """Predicted less measured."""
        return self.predicted - self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two timelines side by side.

    `lanes` and `kinds` are busy times in ns, `pools` are peaks in bytes. `tasks` are the durations
    in ns that differ most, most first; it is empty unless both sides ran the same tasks. `process`
    is the memory of the whole process, in bytes.
    """

    same_tasks: bool
    step: Difference
    lanes: tuple[Difference, ...]
    kinds: tuple[Difference, ...]
    pools: tuple[Difference, ...]
    process: Difference | None
    tasks: tuple[Difference, ...]


def compare_timelines(
    predicted: Timeline,
    measured: Timeline,
    *,
    num_tasks: int = 5,
    process: Difference | None = None,
) -> Comparison:
    """Compare two timelines.

    Args:
        predicted: one side, as a rule simulated.
        measured: the other side, to which errors are relative.
        num_tasks: how many of the tasks that differ most are listed.
        process: memory of the whole process, where a plan and a run say it.
    """
    same_tasks = [(s.index, s.name) for s in predicted.spans] == [
        (s.index, s.name) for s in measured.spans
    ]
    kinds_predicted, kinds_measured = _by_kind(predicted), _by_kind(measured)
    known = [*KINDS, *sorted((kinds_predicted | kinds_measured).keys() - set(KINDS))]
    peaks_predicted, peaks_measured = predicted.peak_bytes, measured.peak_bytes
    return Comparison(
        same_tasks=same_tasks,
        step=Difference(name="step", predicted=predicted.step_ns, measured=measured.step_ns),
        lanes=_used(
            Difference(
                name=lane, predicted=predicted.busy_ns(lane), measured=measured.busy_ns(lane)
            )
            for lane in order_lanes(span.lane for span in (*predicted.spans, *measured.spans))
        ),
        kinds=_used(
            Difference(name=kind, predicted=kinds_predicted[kind], measured=kinds_measured[kind])
            for kind in known
        ),
        pools=_used(
            Difference(
                name=pool,
                predicted=peaks_predicted.get(pool, 0),
                measured=peaks_measured.get(pool, 0),
            )
            for pool in dict.fromkeys([*peaks_predicted, *peaks_measured])
        ),
        process=process,
        tasks=_differing_tasks(predicted, measured)[:num_tasks] if same_tasks else (),
    )


def comparison_as_dict(comparison: Comparison) -> dict[str, object]:
    """Give a comparison as what `json.dumps` takes."""
    return {
        "same_tasks": comparison.same_tasks,
        "step_ns": _as_dict(comparison.step),
        "lanes_ns": {each.name: _as_dict(each) for each in comparison.lanes},
        "kinds_ns": {each.name: _as_dict(each) for each in comparison.kinds},
        "peak_bytes": {each.name: _as_dict(each) for each in comparison.pools},
        "process_bytes": None if comparison.process is None else _as_dict(comparison.process),
        "tasks_ns": [{"name": each.name} | _as_dict(each) for each in comparison.tasks],
    }


def _by_kind(timeline: Timeline) -> Counter[str]:
    totals: Counter[str] = Counter()
    for span in timeline.spans:
        totals[span.kind] += span.duration_ns
    return totals


def _used(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(each for each in differences if each.predicted or each.measured)


def _differing_tasks(predicted: Timeline, measured: Timeline) -> tuple[Difference, ...]:
    pairs = (
        Difference(
            name=f"{ours.index} {ours.name}",
            predicted=ours.duration_ns,
            measured=theirs.duration_ns,
        )
        for ours, theirs in zip(predicted.spans, measured.spans, strict=True)
        # What a message took has the wait for the other rank in it.
        if ours.kind not in MESSAGES
    )
    differing = (each for each in pairs if each.excess)
    return tuple(sorted(differing, key=lambda each: -abs(each.excess)))


def _as_dict(difference: Difference) -> dict[str, object]:
    return {
        "predicted": difference.predicted,
        "measured": difference.measured,
        "error": difference.error,
    }
