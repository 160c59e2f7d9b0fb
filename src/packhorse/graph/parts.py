"""The parts of a traced model: for each rank the code of its blocks.

In: a traced model, and the rank of every block. Out: a `Traced` for each rank. Random nodes keep
their numbers, so that every rank draws the noise that one process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from packhorse.graph.trace import Traced
from packhorse.model.parts import cut_model, number_globally
from packhorse.model.spec import Model


def cut_traced(traced: Traced, owners: Sequence[int]) -> tuple[Traced, ...]:
    """Give each rank its part.

    Raises:
        InputError: as `cut_model`.
    """
    return tuple(_take_part(traced, model) for model in cut_model(traced.model, owners))


def _take_part(traced: Traced, part: Model) -> Traced:
    numbers = number_globally(part)
    return replace(
        traced,
        model=part,
        code={body: traced.code[body] for body in part.bodies},
        halves={body: traced.halves[body] for body in part.bodies if body in traced.halves},
        constants={block.id: traced.constants[numbers[block.id]] for block in part.blocks},
        noise_ordinals={
            block.id: traced.noise_ordinals[numbers[block.id]] for block in part.blocks
        },
    )
