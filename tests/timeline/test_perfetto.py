import json

from packhorse.timeline.perfetto import format_trace
from tests.timeline.timelines import make_timeline


def test_every_span_and_point_is_an_event():
    predicted, measured = make_timeline(), make_timeline(source="measured")
    trace = json.loads(format_trace(predicted, measured))
    events = trace["traceEvents"]
    for process, timeline in ((1, predicted), (2, measured)):
        own = [event for event in events if event["pid"] == process]
        names = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
        spans = [event for event in own if event["ph"] == "X"]
        assert [names[e["tid"]] for e in spans] == ["read from disk"] + ["compute"] * 3
        assert [(round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in spans] == [
            (span.start_ns, span.end_ns) for span in timeline.spans
        ]
        assert [e["args"]["bytes"] for e in own if e["ph"] == "C"] == [0, 4096, 0, 8192]
        process_names = [e["args"]["name"] for e in own if e["name"] == "process_name"]
        assert process_names == [f"rank 0 {timeline.source}"]
