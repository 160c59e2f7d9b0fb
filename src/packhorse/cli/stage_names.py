"""Timelines of ranks as pictures show them: what each computes, named by stages.

In: a rank's timeline, whose spans have the rank's own numbers of blocks; its part of the model, and
the blocks of every stage. Out: the same, with stages in place of blocks, and neighbours that
pictures show alike joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from packhorse.model.spec import Model
    from packhorse.timeline.spec import Span, Timeline

_PASSES: Final = ("forward", "recompute", "backward", "input_grad", "weight_grad")


def show_stages(timeline: Timeline, part: Model, stages: Sequence[range]) -> Timeline:
    """Keep what a rank computes and sums over replicas, named by stages; memory is left out.

    Args:
        part: the rank's part of the model.
        stages: the blocks of each stage, numbered as in the whole model.
    """
    from packhorse.model.parts import number_globally
    from packhorse.timeline.names import ALL_REDUCE, words_for

    stage_of = {block: stage for stage, blocks in enumerate(stages) for block in blocks}
    own = [stage_of[block] for block in number_globally(part)]
    spans = [
        span
        for span in timeline.spans
        if span.lane in ("compute", ALL_REDUCE) and span.end_ns > span.start_ns
    ]
    for at, span in enumerate(spans):
        block, passes, microbatch = span.name.rpartition(" ")[2].partition("@")
        if span.kind in _PASSES and passes:
            name = f"{words_for(span.kind)} {own[int(block)]}@{microbatch}"
            spans[at] = replace(span, name=name)
    return replace(timeline, spans=tuple(_join(spans)), memory={})


def _join(spans: Sequence[Span]) -> list[Span]:
    """Make one of neighbours that pictures show alike: blocks of one pass through a stage."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.name, last.end_ns) == (span.name, span.start_ns):
            joined[-1] = replace(last, end_ns=span.end_ns)
        else:
            joined.append(span)
    return joined
