"""Pins: the choices that a person fixes in a recipe; the search leaves them alone.

In: the recipe's `plan:` mapping. Out: `Pins`. The keys are those of plan.json:

    plan:
      recompute: all | none | [block names or patterns]
      activations: recompute | keep        the same as recompute: all | none
      activations: offload | {pattern of block names: keep, recompute or offload}
      offload: host | disk                 where blocks that offload put what they saved
      parameters | gradients | optimizer: device | disk | {pattern of parameter names: tier}
      update: device | host | {pattern of parameter names: device or host}
      stride: 3
      heap: keep | map
      chunk_bytes: 16MiB
      order: depth_first | layered
      schedule: 1f1b | ... | file.py:function    of several ranks
      boundaries: device | host | disk     where values wait between the blocks that use them
      durable: off | 20                    keep the state on the disk every 20 steps
      cache: none | valleys
      prefetch: 4
      microbatch_rows: 4
      loss_chunk_tokens: 1024 | whole
      tied_sum | attention | compute_dtype | num_threads | num_workers

The numerics may also stand under `numerics:`. Patterns are shell patterns; the first that fits
wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final, Literal, NoReturn, TypeVar

from packhorse.errors import RecipeError
from packhorse.machine.spec import TierName
from packhorse.model.spec import Model
from packhorse.plan.fields import as_list, as_mapping
from packhorse.plan.spec import ActivationChoice, CacheMode, Durable, HeapMode, Order, Piece
from packhorse.schedule.finding import NAMES, names_function
from packhorse.units import parse_bytes

State = Literal["parameters", "gradients", "optimizer"]
Placed = State | Literal["update"]
Word = TypeVar("Word")

TIERS: Final[tuple[TierName, ...]] = ("device", "host", "disk")
UPDATE_TIERS: Final[tuple[TierName, ...]] = ("device", "host")
OFFLOAD_TIERS: Final[tuple[TierName, ...]] = ("host", "disk")
ACTIVATIONS: Final[tuple[ActivationChoice, ...]] = ("keep", "recompute", "offload")
WHOLE: Final = "whole"
_NUMERICS: Final = (
    "microbatch_rows",
    "loss_chunk_tokens",
    "tied_sum",
    "attention",
    "compute_dtype",
    "num_threads",
    "num_workers",
)
_OTHERS: Final = (
    "recompute",
    "activations",
    "parameters",
    "gradients",
    "optimizer",
    "update",
    "stride",
    "heap",
    "chunk_bytes",
    "order",
    "schedule",
    "boundaries",
    "offload",
    "durable",
    "cache",
    "prefetch",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What a person fixed; None, or an empty tuple, leaves a choice to the search.

    `recompute` holds patterns of block names: those recompute and all others keep; `activations`
    holds (pattern of block names, choice) pairs instead, and leaves other blocks to the search.
    The tiers are (pattern of parameter names, tier) pairs. `loss_chunk_tokens` is "whole" for
    unchunked logits.
    """

    recompute: tuple[str, ...] | None = None
    activations: tuple[tuple[str, ActivationChoice], ...] = ()
    parameters: tuple[tuple[str, TierName], ...] = ()
    gradients: tuple[tuple[str, TierName], ...] = ()
    optimizer: tuple[tuple[str, TierName], ...] = ()
    update: tuple[tuple[str, TierName], ...] = ()
    stride: int | None = None
    heap: HeapMode | None = None
    chunk_bytes: int | None = None
    order: Order | None = None
    schedule: str | None = None
    boundaries: TierName | None = None
    offload: TierName | None = None
    durable: Durable | None = None
    cache: CacheMode | None = None
    microbatch_rows: int | None = None
    loss_chunk_tokens: int | Literal["whole"] | None = None
    tied_sum: Literal["per_microbatch", "per_step"] | None = None
    attention: Literal["causal", "eager", "native"] | None = None
    compute_dtype: str | None = None
    num_threads: int | None = None
    num_workers: int | None = None
    prefetch: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the choices that are fixed."""
        return tuple(
            field.name
            for field in fields(self)
            if _is_pinned(getattr(self, field.name), field.name)
        )

    def activation_of(self, block: str) -> ActivationChoice | None:
        """What a block's activations are pinned to."""
        for pattern, choice in self.activations:
            if fnmatchcase(block, pattern):
                return choice
        if self.recompute is None:
            return None
        return "recompute" if any(fnmatchcase(block, p) for p in self.recompute) else "keep"

    def tier_of(self, state: Placed, pieces: Sequence[Piece]) -> TierName | None:
        """The tier that a state of a chunk, or its update, is pinned to.

        Raises:
            RecipeError: parameters that share the chunk are pinned to different tiers.
        """
        pairs = self.tiers(state)
        if not pairs:
            return None
        found: dict[TierName, str] = {}
        for piece in pieces:
            for pattern, tier in pairs:
                if fnmatchcase(piece.parameter, pattern):
                    found.setdefault(tier, piece.parameter)
                    break
        tiers = list(found)
        if len(tiers) > 1:
            first, second = tiers[:2]
            raise RecipeError(
                f"{found[first]} and {found[second]} share a chunk, "
                f"but their {state} are pinned to {first} and to {second}",
                where=f"recipe: plan.{state}",
                fix="pin both to one tier, or make chunk_bytes smaller",
            )
        return tiers[0] if tiers else None

    def check(self, model: Model) -> None:
        """Refuse a pin that names nothing in the model.

        Raises:
            RecipeError: names the pattern and the nearest block or parameter.
        """
        blocks = [block.name for block in model.blocks]
        for pattern in self.recompute or ():
            _check_pattern(pattern, blocks, key="recompute", noun="block")
        for pattern, _ in self.activations:
            _check_pattern(pattern, blocks, key="activations", noun="block")
        parameters = [str(name) for name in model.parameters]
        for state in ("parameters", "gradients", "optimizer", "update"):
            for pattern, _ in self.tiers(state):
                _check_pattern(pattern, parameters, key=state, noun="parameter")

    def tiers(self, state: Placed) -> tuple[tuple[str, TierName], ...]:
        """The (pattern, tier) pairs of a state, or of the update."""
        match state:
            case "parameters":
                return self.parameters
            case "gradients":
                return self.gradients
            case "optimizer":
                return self.optimizer
            case "update":
                return self.update


def _is_pinned(value: object, name: str) -> bool:
    # `recompute: none` is an empty tuple of patterns and a pin all the same.
    return value is not None and (name == "recompute" or value != ())


def read_pins(content: Mapping[str, object]) -> Pins:
    """Read the `plan:` mapping of a recipe.

    Raises:
        RecipeError: an unknown key (with the nearest one), a wrong value, a key given twice.
    """
    flat = _flatten(content)
    return Pins(
        recompute=_read_recompute(flat),
        activations=_read_activations(flat),
        parameters=_read_tiers(flat, "parameters"),
        gradients=_read_tiers(flat, "gradients"),
        optimizer=_read_tiers(flat, "optimizer"),
        update=_read_tiers(flat, "update", UPDATE_TIERS),
        stride=_read_count(flat, "stride", least=0),
        heap=_read_word(flat, "heap", ("keep", "map")),
        chunk_bytes=_read_size(flat, "chunk_bytes"),
        order=_read_word(flat, "order", ("depth_first", "layered")),
        schedule=_read_schedule(flat),
        boundaries=_read_word(flat, "boundaries", TIERS),
        offload=_read_word(flat, "offload", OFFLOAD_TIERS),
        durable=_read_durable(flat),
        cache=_read_word(flat, "cache", ("none", "valleys")),
        microbatch_rows=_read_count(flat, "microbatch_rows"),
        loss_chunk_tokens=_read_loss_chunk(flat),
        tied_sum=_read_word(flat, "tied_sum", ("per_microbatch", "per_step")),
        attention=_read_word(flat, "attention", ("causal", "eager", "native")),
        compute_dtype=_read_word(flat, "compute_dtype", ("float32", "bfloat16", "float16")),
        num_threads=_read_count(flat, "num_threads"),
        num_workers=_read_workers(flat),
        prefetch=_read_count(flat, "prefetch", least=0),
    )


def _flatten(content: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in content.items():
        if key == "numerics":
            numerics = as_mapping(value)
            if numerics is None:
                _refuse("numerics", value, "a mapping of numerics to pin")
            for inner, pinned in ((str(name), item) for name, item in numerics.items()):
                _check_key(inner, _NUMERICS, "plan.numerics")
                if inner in content:
                    raise RecipeError(
                        f"{inner} is pinned twice: to {content[inner]!r} and to {pinned!r}",
                        where=f"recipe: plan.{inner} and plan.numerics.{inner}",
                        fix="keep one of them",
                    )
                flat[inner] = pinned
        else:
            _check_key(str(key), (*_OTHERS, *_NUMERICS, "numerics"), "plan")
            flat[str(key)] = value
    return flat


def _check_key(key: str, known: Sequence[str], place: str) -> None:
    if key not in known:
        near = get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise RecipeError(
            f"{key!r} is no choice of a plan",
            where=f"recipe: {place}.{key}",
            fix=f"the nearest choice is {near!r}; all: {', '.join(known)}",
        )


def _read_recompute(flat: Mapping[str, object]) -> tuple[str, ...] | None:
    value = flat.get("recompute")
    # Plan files call the choice of a block by its other name.
    activations = flat.get("activations")
    if activations is not None:
        if value is not None:
            raise RecipeError(
                f"activations and recompute are one choice, pinned to {activations} and {value!r}",
                where="recipe: plan.activations and plan.recompute",
                fix="keep one of them",
            )
        return {"recompute": ("*",), "keep": ()}.get(str(activations))
    if value is None:
        return None
    if value in ("all", "none"):
        return ("*",) if value == "all" else ()
    items = as_list(value)
    if items is None:
        _refuse("recompute", value, "all, none or a list of block names")
    return tuple(
        item if isinstance(item, str) else _refuse("recompute", item, "a block name")
        for item in items
    )


def _read_activations(flat: Mapping[str, object]) -> tuple[tuple[str, ActivationChoice], ...]:
    value = flat.get("activations")
    by_pattern = as_mapping(value)
    if by_pattern is not None:
        return tuple(
            (str(pattern), _as_word(f"activations.{pattern}", choice, ACTIVATIONS))
            for pattern, choice in by_pattern.items()
        )
    # One word for all blocks that does not offload is read as `recompute`.
    offloads = value is not None and _as_word("activations", value, ACTIVATIONS) == "offload"
    return (("*", "offload"),) if offloads else ()


def _read_tiers(
    flat: Mapping[str, object], key: str, tiers: Sequence[TierName] = TIERS
) -> tuple[tuple[str, TierName], ...]:
    value = flat.get(key)
    if value is None:
        return ()
    by_pattern = as_mapping(value)
    if by_pattern is None:
        return (("*", _as_word(key, value, tiers)),)
    return tuple((str(k), _as_word(f"{key}.{k}", v, tiers)) for k, v in by_pattern.items())


def _read_schedule(flat: Mapping[str, object]) -> str | None:
    value = flat.get("schedule")
    if value is None:
        return None
    if not isinstance(value, str) or not (value in NAMES or names_function(value)):
        near = get_close_matches(str(value), NAMES, n=1, cutoff=0.4)
        hint = f"; nearest is {near[0]}" if near else ""
        _refuse("schedule", value, f"one of {', '.join(NAMES)}, or file.py:function{hint}")
    return value


def _read_word(flat: Mapping[str, object], key: str, words: Sequence[Word]) -> Word | None:
    value = flat.get(key)
    return None if value is None else _as_word(key, value, words)


def _as_word(key: str, value: object, words: Sequence[Word]) -> Word:
    for word in words:
        if value == word:
            return word
    return _refuse(key, value, "one of " + ", ".join(str(word) for word in words))


def _read_count(flat: Mapping[str, object], key: str, *, least: int = 1) -> int | None:
    value = flat.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        _refuse(key, value, f"a whole number of at least {least}")
    return value


def _read_durable(flat: Mapping[str, object]) -> Durable | None:
    value = flat.get("durable")
    # YAML reads an unquoted `off` as false.
    if value is False or value == "off":
        return "off"
    if isinstance(value, bool | str):
        _refuse("durable", value, "off, or a number of steps")
    return _read_count(flat, "durable")


def _read_workers(flat: Mapping[str, object]) -> int | None:
    count = _read_count(flat, "num_workers")
    if count is not None and count > 1:
        raise RecipeError(
            f"num_workers is pinned to {count}, but one process is one worker: gradients are summed"
            " in the order of the micro-batches",
            where="recipe: plan.num_workers",
            fix="leave it out, or give 1",
        )
    return count


def _read_size(flat: Mapping[str, object], key: str) -> int | None:
    value = flat.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        _refuse(key, value, "a size such as 16MiB")
    try:
        size = parse_bytes(value)
    except ValueError:
        _refuse(key, value, "a size such as 16MiB")
    return size if size > 0 else _refuse(key, value, "a size above 0")


def _read_loss_chunk(flat: Mapping[str, object]) -> int | Literal["whole"] | None:
    if flat.get("loss_chunk_tokens") == WHOLE:
        return WHOLE
    value = flat.get("loss_chunk_tokens")
    if isinstance(value, str):
        _refuse("loss_chunk_tokens", value, f"a number of tokens, or {WHOLE}")
    return _read_count(flat, "loss_chunk_tokens")


def _refuse(key: str, value: object, wanted: str) -> NoReturn:
    raise RecipeError(
        f"{key} is pinned to {value!r}, which is not {wanted}",
        where=f"recipe: plan.{key}",
        fix=f"give {wanted}, or leave it out and let the search choose",
    )


def _check_pattern(pattern: str, names: Sequence[str], *, key: str, noun: str) -> None:
    if any(fnmatchcase(name, pattern) for name in names):
        return
    near = get_close_matches(pattern, names, n=1, cutoff=0.0)
    raise RecipeError(
        f"{pattern!r} fits no {noun} of the model",
        where=f"recipe: plan.{key}",
        fix=f"the nearest {noun} is {near[0]!r}" if near else None,
    )
