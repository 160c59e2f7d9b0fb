"""What limits a step: lanes, and paths that lanes share.

In: a machine. Out: a matrix that turns the work of each lane in each phase of a step into times
that no such phase can be shorter than. The phases are the forwards, the backwards, and
what comes after the global norm.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from packhorse.machine.spec import Machine
from packhorse.program.tasks import Lane
from packhorse.simulator.sharing import HALF_DUPLEX, sharing_of
from packhorse.timeline.names import LANES

Floats = npt.NDArray[np.float64]
NUM_PHASES: Final = 3
FORWARD, BACKWARD, UPDATE = range(NUM_PHASES)
NUM_LOADS: Final = NUM_PHASES * len(LANES)


def load_of(lane: Lane, phase: int) -> int:
    """The place of a lane's work in a phase among all `NUM_LOADS`."""
    return phase * len(LANES) + LANES.index(lane)


def limits_on(machine: Machine) -> Floats:
    """A row per limit and phase, limit by limit; a column per load.

    Every lane is a limit, and so is every path that two lanes share: it carries the work of both
    at the rate at which it does when both are busy.
    """
    limits: list[dict[Lane, float]] = [{lane: 1.0} for lane in LANES]
    limits += [
        dict.fromkeys(path.lanes, 1 / max(path.at_once, HALF_DUPLEX))
        for path in sharing_of(machine)
    ]
    rows = np.zeros((len(limits) * NUM_PHASES, NUM_LOADS))
    for place, limit in enumerate(limits):
        for phase in range(NUM_PHASES):
            for lane, weight in limit.items():
                rows[place * NUM_PHASES + phase, load_of(lane, phase)] = weight
    return rows
