"""Same numbers as plain PyTorch: every model, variant and plan of the product, bit by bit.

For each model of the zoo, each of {all trained, embeddings and half of the blocks frozen, two
groups}, {keep, recompute}, {resident, parameters on disk, optimizer on disk, all on disk} and {1, 4
micro-batches}: after five AdamW steps with clipping, the losses of every micro-batch, the norms,
all weights and both moments; and after one step of SGD with momentum all gradients (its buffers
are the gradients). A plan that differs from the plain loop in a single bit misses the bar, and what
differs is printed. Every plan runs in audit mode.

`--quick` takes one model after the other through a quarter of the plans.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from bench.planned import PLACES, Subject, Ways, trace_subject, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.report import Bench, Figure, exactly, run_bench
from bench.zoo import (
    ZOO,
    Entry,
    Training,
    batch_of,
    build_model,
    clip_of,
    make_optimizer_words,
    make_steps,
)
from packhorse.optim.optimizers import Optimizer
from packhorse.plan.spec import ActivationChoice

TRAININGS: Final[tuple[Training, ...]] = ("all", "frozen", "groups")
ACTIVATIONS: Final[tuple[ActivationChoice, ...]] = ("keep", "recompute")
MICROBATCHES: Final = (1, 4)
NUM_STEPS: Final = 5
_WORDS: Final = {
    "all": "all trained",
    "frozen": "embeddings and half of the blocks frozen",
    "groups": "two groups",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan of the product."""

    training: Training
    place: str
    activations: ActivationChoice
    num_microbatches: int

    @property
    def ways(self) -> Ways:
        """The plan's choices."""
        return replace(PLACES[self.place], activations=(self.activations,))


def list_cases(training: Training, *, quick: bool) -> Iterator[Case]:
    """The plans for one variant; a quick run takes a quarter, other ones for each variant."""
    cases = (
        Case(training=training, place=place, activations=activations, num_microbatches=microbatches)
        for microbatches in MICROBATCHES
        for activations in ACTIVATIONS
        for place in PLACES
    )
    shift = TRAININGS.index(training)
    for index, case in enumerate(cases):
        if not quick or (index + index // 4 + shift) % 4 == 0:
            yield case


def measure(bench: Bench) -> None:
    """Go through the product, one table per model."""
    torch.set_num_threads(1)
    names = bench.options.models or list(ZOO)
    with tempfile.TemporaryDirectory(prefix="packhorse-numbers-") as scratch:
        for name in names:
            figures = [
                figure
                for training in TRAININGS
                for figure in _measure_variant(bench, ZOO[name], training, Path(scratch))
            ]
            bench.add(f"{name}: plans with the bits of the plain loop", figures)


def _measure_variant(bench: Bench, entry: Entry, training: Training, scratch: Path) -> list[Figure]:
    bench.say(f"{entry.name}, {_WORDS[training]}")
    adamw = make_optimizer_words("adamw", entry, training)
    example = make_steps(entry, num_steps=1, num_microbatches=1)
    subject = trace_subject(build_model(entry, training), batch_of(example), adamw)
    curves = _Comparison(
        entry=entry, training=training, subject=subject, num_steps=NUM_STEPS, clip=clip_of("adamw")
    )
    gradients = _Comparison(
        entry=entry,
        training=training,
        subject=replace(subject, optimizer=_without_decay(entry, training)),
        num_steps=1,
        clip=None,
    )
    cases = list(list_cases(training, quick=bench.quick))
    figures: list[Figure] = []
    for what, comparison in (
        ("losses, norms, weights, moments", curves),
        ("gradients", gradients),
    ):
        same = 0
        for case in cases:
            differences = comparison.compare(case, scratch)
            same += not differences
            for difference in differences:
                place = f"{case.place}, {case.activations}, {case.num_microbatches}"
                bench.say(f"  {place}: {difference}")
        figures.append(exactly(f"{_WORDS[training]}: {what}", same, len(cases)))
    return figures


def _without_decay(entry: Entry, training: Training) -> Optimizer:
    """SGD whose buffer, after one step, is the gradient."""
    words = make_optimizer_words("momentum", entry, training)
    groups = tuple(
        replace(group, overrides={**group.overrides, "weight_decay": 0.0}) for group in words.groups
    )
    return replace(words, weight_decay=0.0, groups=groups)


class _Comparison:
    """One variant of a model with one optimizer; the plain loop runs once per micro-batch count."""

    def __init__(
        self,
        *,
        entry: Entry,
        training: Training,
        subject: Subject,
        num_steps: int,
        clip: float | None,
    ) -> None:
        self._subject = subject
        self._clip = clip
        self._steps = {
            count: make_steps(entry, num_steps=num_steps, num_microbatches=count)
            for count in MICROBATCHES
        }
        self._plain = {
            count: train_plainly(
                build_model(entry, training), subject.optimizer, steps, max_grad_norm=clip
            )
            for count, steps in self._steps.items()
        }

    def compare(self, case: Case, scratch: Path) -> tuple[str, ...]:
        """Run a plan; give what differs from the plain loop."""
        count = case.num_microbatches
        planned = train_by_plan(
            self._subject,
            case.ways,
            self._steps[count],
            max_grad_norm=self._clip,
            scratch=scratch,
        )
        return find_differences(self._plain[count], planned)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--models", nargs="+", choices=list(ZOO), help="only these models")


if __name__ == "__main__":
    sys.exit(run_bench("numbers", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
