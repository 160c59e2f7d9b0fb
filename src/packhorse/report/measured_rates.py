"""What a run says of its machine: each rate, measured over planned.

In: a run's predicted and measured timelines, compared. Out: factors for the machine's rates. Both
sides ran the same tasks, so the ratio of their busy times is the ratio of the rates; how lanes
disturb each other is in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from packhorse.machine.rescale import RateFactors
from packhorse.report.compare import Comparison, Difference
from packhorse.units import format_percent

_BODIES: Final = ("forward", "backward", "input_grad", "weight_grad", "recompute")
_WORDS: Final[Mapping[str, str]] = {
    "disk_read": "reading from disk",
    "disk_write": "writing to disk",
    "compute": "compute",
    "update": "updates",
}


def find_factors(comparison: Comparison) -> RateFactors:
    """Work out by what each rate was off; 1 for what the step did not do."""
    kinds = {kind.name: kind for kind in comparison.kinds}

    def factor(*names: str) -> float:
        return _ratio(kinds[name] for name in names if name in kinds)

    return RateFactors(
        disk_read=factor("disk_read"),
        disk_write=factor("disk_write"),
        compute=factor(*_BODIES),
        update=factor("update"),
    )


def say_factors(factors: RateFactors) -> str:
    """Word the factors, such as `compute at 80 % of its planned rate`."""
    found = factors_as_dict(factors)
    parts = [f"{_WORDS[name]} at {format_percent(share)}" for name, share in found.items()]
    return f"{', '.join(parts)} of the planned rates"


def factors_as_dict(factors: RateFactors) -> dict[str, float]:
    """Give the factors by name."""
    return {
        "disk_read": factors.disk_read,
        "disk_write": factors.disk_write,
        "compute": factors.compute,
        "update": factors.update,
    }


def _ratio(differences: Iterable[Difference]) -> float:
    pairs = [(each.predicted, each.measured) for each in differences]
    planned, measured = (sum(side) for side in zip(*pairs, strict=True)) if pairs else (0, 0)
    return planned / measured if planned and measured else 1.0
