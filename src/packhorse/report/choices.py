"""Choices folded for reading: equal ones once, with where they hold.

In: a plan. Out: `ChoiceGroup`s: what is decided, the value, where, why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packhorse.machine.spec import TierName
from packhorse.plan.spec import ActivationChoice, Choice, Durable, Plan
from packhorse.units import format_bytes, format_count

_MOST_REASONS: Final = 6
_MOST_NAMES: Final = 4
_LAST_NUMBER: Final = re.compile(r"(.*?)(\d+)(\D*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceGroup:
    """One value of one choice and the places that share it; `where` is empty for a single one."""

    choice: str
    value: str
    where: str
    because: str


def fold_choices(plan: Plan) -> tuple[ChoiceGroup, ...]:
    """Fold all choices of a plan, in the order in which a person would ask for them."""
    numerics = plan.numerics
    loss = numerics.loss_chunk_tokens
    loss_words = "all logits at once" if loss.value is None else f"{loss.value} tokens at a time"
    rows = numerics.microbatch_rows

    def name_blocks(members: Sequence[int]) -> str:
        return fold_names([plan.blocks[at].name for at in members])

    def name_chunks(members: Sequence[int]) -> str:
        size = sum(p.stop - p.start for at in members for p in plan.chunks[at].pieces)
        ranges = fold_names([str(at) for at in members])
        return f"chunk{'s' if len(members) > 1 else ''} {ranges} ({format_count(size)} parameters)"

    chunks = dict(enumerate(plan.chunks))
    trained = {at: chunk for at, chunk in chunks.items() if chunk.trainable}
    updates = {at: _pair(chunk.update) for at, chunk in trained.items()}
    hosted = any(chunk.update.value == "host" for chunk in trained.values())
    blocks = {at: _pair(block.activations) for at, block in enumerate(plan.blocks)}
    return (
        _single("micro-batch", f"{rows.value} row{'s' if rows.value > 1 else ''}", rows.because),
        _single("loss", loss_words, loss.because),
        _single("C heap", plan.heap.value, plan.heap.because),
        _single("kept steps", say_durable(plan.durable.value), plan.durable.because),
        _single("chunk size", format_bytes(plan.chunk_bytes.value), plan.chunk_bytes.because),
        _single("cache", plan.cache.value, plan.cache.because),
        _single("order", plan.order.value.replace("_", " "), plan.order.because),
        _single("boundaries", plan.boundaries.value, plan.boundaries.because),
        _single("prefetch", _say_prefetch(plan.prefetch.value), plan.prefetch.because),
        *_fold("activations", blocks, name_blocks),
        *([_single("offload", plan.offload.value, plan.offload.because)] if plan.offloads else ()),
        *_fold("parameters", {at: _pair(c.parameters) for at, c in chunks.items()}, name_chunks),
        *_fold("gradients", {at: _pair(c.gradients) for at, c in trained.items()}, name_chunks),
        *_fold("optimizer", {at: _pair(c.optimizer) for at, c in trained.items()}, name_chunks),
        *(_fold("update", updates, name_chunks) if hosted else ()),
        *([_stride(plan)] if hosted else ()),
    )


def fold_names(names: Sequence[str]) -> str:
    """Join names, runs that count up as ranges: `embed, layers.0-29, head`."""
    runs: list[tuple[str, int | None, str]] = []  # first name, last number, template
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        # The number may stand anywhere, but only one may differ: the last one.
        template = f"{match.group(1)}#{match.group(3)}" if match else name
        number = int(match.group(2)) if match else None
        if runs and number is not None:
            first, last, last_template = runs[-1]
            if last is not None and last_template == template and number == last + 1:
                runs[-1] = (first, number, template)
                continue
        runs.append((name, number, template))
    shown = [_spell_run(*run) for run in runs[:_MOST_NAMES]]
    if len(runs) > _MOST_NAMES:
        num_shown = sum(_length_of(*run) for run in runs[:_MOST_NAMES])
        shown.append(f"{len(names) - num_shown} more")
    return ", ".join(shown)


def _stride(plan: Plan) -> ChoiceGroup:
    stride = plan.stride.value
    words = {0: "none visits the device", 1: "all visit the device"}
    value = words.get(stride, f"1 of {stride} visits the device")
    return _single("update stride", value, plan.stride.because)


def say_durable(every: Durable) -> str:
    """How often finished steps are kept."""
    if every == "off":
        return "no step"
    return "every step" if every == 1 else f"every {every} steps"


def _single(choice: str, value: str, because: str) -> ChoiceGroup:
    return ChoiceGroup(choice=choice, value=value, where="", because=because)


def _say_prefetch(depth: int) -> str:
    if not depth:
        return "none"
    return f"{depth} task{'s' if depth > 1 else ''} ahead"


def _pair(choice: Choice[ActivationChoice] | Choice[TierName]) -> tuple[str, str]:
    return choice.value, choice.because


def _fold(
    choice: str,
    decided: Mapping[int, tuple[str, str]],
    name_places: Callable[[Sequence[int]], str],
) -> list[ChoiceGroup]:
    groups: dict[tuple[str, str], list[int]] = {}
    for place, value_and_reason in decided.items():
        groups.setdefault(value_and_reason, []).append(place)
    if len(groups) > _MOST_REASONS:
        # Reasons with figures of their own: the values are what a reader can still take in.
        reasons: dict[str, list[str]] = {}
        places: dict[str, list[int]] = {}
        for (value, because), members in groups.items():
            reasons.setdefault(value, []).append(because)
            places.setdefault(value, []).extend(members)
        groups = {
            (value, _first_of(reasons[value])): sorted(members) for value, members in places.items()
        }
    return [
        ChoiceGroup(choice=choice, value=value, where=name_places(members), because=because)
        for (value, because), members in groups.items()
    ]


def _first_of(reasons: Sequence[str]) -> str:
    more = len(reasons) - 1
    if not more:
        return reasons[0]
    return f"{reasons[0]} (and {more} more reason{'s' if more > 1 else ''} in the plan file)"


def _spell_run(first: str, last: int | None, template: str) -> str:
    match = _LAST_NUMBER.fullmatch(first)
    if match is None or last is None or int(match.group(2)) == last:
        return first
    return template.replace("#", f"{match.group(2)}-{last}")


def _length_of(first: str, last: int | None, _template: str) -> int:
    match = _LAST_NUMBER.fullmatch(first)
    return last - int(match.group(2)) + 1 if match and last is not None else 1
