"""Timelines as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

In: one timeline or several (predicted beside measured, or all ranks). Out: Trace Event JSON: each
timeline a process, each lane a thread, each pool a counter. Times are microseconds there, with
three decimals, so no nanosecond is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from packhorse.timeline.names import LANES, order_lanes, words_for
from packhorse.timeline.spec import Timeline


def trace_events(timelines: Sequence[Timeline]) -> Iterator[dict[str, object]]:
    """Give the trace's events, in the order of the timelines."""
    for process, timeline in enumerate(timelines, start=1):
        yield _name("process_name", process, 0, {"name": f"rank {timeline.rank} {timeline.source}"})
        yield _name("process_sort_index", process, 0, {"sort_index": process})
        used = order_lanes(span.lane for span in timeline.spans)
        shown = dict.fromkeys((*LANES, *used))
        threads = {lane: at for at, lane in enumerate(shown, start=1) if lane in used}
        for lane, thread in threads.items():
            yield _name("thread_name", process, thread, {"name": words_for(lane)})
            yield _name("thread_sort_index", process, thread, {"sort_index": thread})
        for span in timeline.spans:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": process,
                "tid": threads[span.lane],
                "ts": span.start_ns / 1000,
                "dur": span.duration_ns / 1000,
                "args": {"task": span.index},
            }
        for pool, points in timeline.memory.items():
            for point in points:
                yield {
                    "ph": "C",
                    "name": f"{pool} bytes",
                    "pid": process,
                    "ts": point.at_ns / 1000,
                    "args": {"bytes": point.used_bytes},
                }


def format_trace(*timelines: Timeline) -> str:
    """Render timelines as a Chrome trace, one event on a line."""
    events = ",\n".join(json.dumps(event) for event in trace_events(timelines))
    return '{"displayTimeUnit": "ns", "traceEvents": [\n' + events + "\n]}\n"


def _name(what: str, process: int, thread: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
