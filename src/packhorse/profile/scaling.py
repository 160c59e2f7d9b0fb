"""Estimates times of bodies from measured ones: at another micro-batch, or on another machine.

In: a measured profile, and analytic estimates of the same and of what is wanted. Out: a `Profile`
in which each body takes as much longer than its estimate as the measured one did. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from packhorse.model.spec import BodyId
from packhorse.profile.spec import BodyTime, Profile

_MUCH_SMALLER: Final = 10


def scale_profile(measured: Profile, estimated_there: Profile, estimated_here: Profile) -> Profile:
    """Estimate another micro-batch shape by what the bodies of a measured one needed.

    Args:
        measured: at the shape that was run.
        estimated_there: analytic, of that same shape.
        estimated_here: analytic, of the shape that is wanted.
    """
    overall = find_ratio(measured.bodies, estimated_there.bodies)
    bodies: dict[BodyId, BodyTime] = {}
    for body, found in estimated_here.bodies.items():
        # Bodies are numbered in order of their first block, so equal numbers are the same body.
        own = {body: measured.bodies[body]} if body in measured.bodies else {}
        ratio = find_ratio(own, estimated_there.bodies) if own else overall
        bodies[body] = scale_time(found, ratio)
    return replace(estimated_here, source=measured.source, bodies=bodies)


def find_ratio(measured: Mapping[BodyId, BodyTime], estimated: Mapping[BodyId, BodyTime]) -> float:
    """Tell by how much measured bodies took longer than estimated; 1.0 when there are none."""
    ran_ns = sum(total_ns(found) for found in measured.values())
    expected_ns = sum(total_ns(estimated[body]) for body in measured if body in estimated)
    return ran_ns / expected_ns if ran_ns and expected_ns else 1.0


def find_ratio_near(
    wanted: BodyTime, measured: Mapping[BodyId, BodyTime], estimated: Mapping[BodyId, BodyTime]
) -> float:
    """`find_ratio` of the measured bodies that are not much smaller than the wanted one.

    A lookup in a table says nothing of matrix products: where only such were measured, it is 1.0.
    """
    least_ns = total_ns(wanted) / _MUCH_SMALLER
    near = {
        body: found for body, found in measured.items() if total_ns(estimated[body]) >= least_ns
    }
    return find_ratio(near, estimated)


def scale_time(found: BodyTime, ratio: float) -> BodyTime:
    """Multiply the times of a body."""
    return BodyTime(
        forward_ns=round(found.forward_ns * ratio),
        discard_ns=round(found.discard_ns * ratio),
        backward_ns=round(found.backward_ns * ratio),
    )


def total_ns(found: BodyTime) -> int:
    """The time of all that a body may run."""
    return found.forward_ns + found.discard_ns + found.backward_ns
