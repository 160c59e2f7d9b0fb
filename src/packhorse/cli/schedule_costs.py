"""Costs and caps as people type them: `--costs F=1,I=1,W=1,send=0.1 --memory-cap 4`.

In: texts. Out: `Costs`. Times are in milliseconds; only their proportions matter for idle time. One
number is that of each rank's share of the model, several numbers joined by `:` are those of as many
equal lengths of its depth. Memory is counted in shares: what one microbatch saves in one rank's
share of the model.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from packhorse.errors import InputError
from packhorse.schedule.costs import UNIT_BYTES, UNIT_NS, Cost, Costs

_COLUMNS: Final = ("F", "I", "W", "saved", "reduce")
_KEYS: Final = (*_COLUMNS, "send")
_DEFAULTS: Final = {"F": "1", "I": "1", "W": "1", "saved": "1", "reduce": "0", "send": "0"}


def read_costs(
    text: str, memory_cap: str | None, num_ranks: int, *, num_replicas: int = 1
) -> Costs:
    """Read both options.

    Raises:
        InputError: a key is unknown, given twice or without effect, or a value is no number of its
            kind.
    """
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, sign, value = (part.strip() for part in item.partition("="))
        if key not in _KEYS or not sign:
            raise InputError(
                f"{item!r} is no cost",
                where="--costs",
                fix="write F=1,I=1,W=1,saved=1,send=0.1,reduce=2, or some of these",
            )
        if key in given:
            raise InputError(
                f"{key} is given twice", where="--costs", fix=f"join numbers by ':', as {key}=1:2"
            )
        given[key] = value
    if "reduce" in given and num_replicas == 1:
        raise InputError(
            "reduce is what summing gradients over replicas takes, and there is one replica",
            where="--costs",
            fix="leave it out, or say how many replicas there are, as --replicas 4",
        )
    words = _DEFAULTS | given
    columns = {
        key: [_read_number(each, f"--costs {key}") for each in words[key].split(":")]
        for key in _KEYS
    }
    if len(columns["send"]) != 1:
        raise InputError("send has several numbers", where="--costs", fix="give one, as send=0.1")
    num_parts = _count_parts(columns, num_ranks)
    f, i, w, saved, reduce = (_spread(columns[key], num_parts, num_ranks) for key in _COLUMNS)
    parts = tuple(
        Cost(
            forward_ns=round(f[at] * UNIT_NS),
            input_grad_ns=round(i[at] * UNIT_NS),
            weight_grad_ns=round(w[at] * UNIT_NS),
            saved_bytes=round(saved[at] * UNIT_BYTES),
            reduce_ns=round(reduce[at] * UNIT_NS),
        )
        for at in range(num_parts)
    )
    if not any(part.forward_ns + part.backward_ns for part in parts):
        raise InputError("nothing takes any time", where="--costs", fix="give F, I or W above 0")
    return Costs(
        parts=parts,
        send_ns=round(columns["send"][0] * UNIT_NS),
        cap_bytes=_read_caps(memory_cap, num_ranks),
    )


def _count_parts(columns: dict[str, list[Fraction]], num_ranks: int) -> int:
    lengths = {len(columns[key]): key for key in _COLUMNS if len(columns[key]) > 1}
    if len(lengths) > 1:
        (one, key), (other, other_key) = list(lengths.items())[:2]
        raise InputError(
            f"{key} has {one} numbers and {other_key} has {other}",
            where="--costs",
            fix="give each one number, or as many as the others",
        )
    return next(iter(lengths), num_ranks)


def _spread(column: list[Fraction], num_parts: int, num_ranks: int) -> list[Fraction]:
    if len(column) > 1:
        return column
    return [column[0] * num_ranks / num_parts] * num_parts


def _read_caps(text: str | None, num_ranks: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    caps = [_read_number(each.strip(), "--memory-cap") for each in text.split(",")]
    if len(caps) not in (1, num_ranks):
        raise InputError(
            f"{len(caps)} caps are given for {num_ranks} ranks",
            where="--memory-cap",
            fix="give one for all ranks, or one for each, as 4,4,3,3",
        )
    return tuple(int(cap * UNIT_BYTES) for cap in caps * (num_ranks // len(caps)))


def _read_number(text: str, where: str) -> Fraction:
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(-1)
    if number < 0 or number > 10**9:
        raise InputError(
            f"{text!r} is no number from 0 to a thousand million",
            where=where,
            fix="write for example 1, 0.5 or 3/4",
        )
    return number
