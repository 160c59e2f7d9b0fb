"""What pictures of several ranks show of a span: its letter, its microbatch, how far down its rank.

In: timelines, one for each rank, whose compute spans are named `kind stage@microbatch`, and those
that sum gradients over replicas `all-reduce, what of`. Out: for each rank its `RankTask`s in order.
A rank's stages are told apart by their turn: 0 for its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.report.colours import colour_of, fade
from packhorse.timeline.names import ALL_REDUCE, words_for
from packhorse.timeline.spec import Timeline

PASSES: Final[Mapping[str, str]] = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "input_grad": "I",
    "weight_grad": "W",
}
MARKS: Final[Mapping[str, str]] = {**PASSES, ALL_REDUCE: "A"}
_MOST_FADED: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """One pass of a microbatch through a stage, or an all-reduce, as pictures show it."""

    kind: str
    stage: str
    microbatch: str
    turn: int
    start_ns: int
    end_ns: int

    @property
    def letter(self) -> str:
        """One letter for its kind: capital on the rank's first stage, small on later ones."""
        letter = MARKS.get(self.kind, "?")
        return letter.lower() if self.turn else letter

    @property
    def colour(self) -> str:
        """The colour of its kind, paler the later the stage."""
        return shade_of(self.kind, self.turn)

    @property
    def words(self) -> str:
        """What it is, in words."""
        if self.kind == ALL_REDUCE:
            return f"{words_for(self.kind)}, {self.stage}"
        return f"{words_for(self.kind)}, stage {self.stage}, microbatch {self.microbatch}"


def shade_of(kind: str, turn: int) -> str:
    """Give the colour of a kind on a rank's stage of a given turn."""
    return fade(colour_of(kind), 0.5 * min(turn, _MOST_FADED) / _MOST_FADED if turn else 0.0)


def list_rank_tasks(timelines: Sequence[Timeline]) -> list[list[RankTask]]:
    """List what each rank computes, in order; what does not compute a stage is left out."""
    return [_list_one(timeline) for timeline in timelines]


def list_reductions(timelines: Sequence[Timeline]) -> list[list[RankTask]]:
    """List for each rank when gradients are summed over replicas, in order."""
    return [
        [
            RankTask(
                kind=ALL_REDUCE,
                stage=span.name.partition(", ")[2],
                microbatch="",
                turn=0,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
            )
            for span in timeline.spans
            if span.kind == ALL_REDUCE
        ]
        for timeline in timelines
    ]


def _list_one(timeline: Timeline) -> list[RankTask]:
    found: list[tuple[str, str, str, int, int]] = []
    for span in timeline.spans:
        stage, at, microbatch = span.name.rpartition(" ")[2].partition("@")
        if span.lane == "compute" and at and span.kind in PASSES:
            found.append((span.kind, stage, microbatch, span.start_ns, span.end_ns))
    turns = {stage: turn for turn, stage in enumerate(sorted({f[1] for f in found}, key=int))}
    return [
        RankTask(
            kind=kind,
            stage=stage,
            microbatch=microbatch,
            turn=turns[stage],
            start_ns=start_ns,
            end_ns=end_ns,
        )
        for kind, stage, microbatch, start_ns, end_ns in found
    ]
