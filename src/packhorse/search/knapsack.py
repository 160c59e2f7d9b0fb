"""Which moves to take: a small integer program over a sketch.

In: a sketch and budgets. Out: the cheapest moves under which the sketch fits, or None.

    minimise    (1 - e) * sum of time[f]  +  e * (work + sum of cost[j] * x[j])
    such that   time[f]  >=  load[f][i] + sum of loads[f][i][j] * x[j]     every phase f, lane i
                peak[p] + sum of saved[p][i][j] * x[j]  >=  used[p][i]     every pool p, task i
                sum of weight[p] * peak[p]              <=  device budget
                sum of away[t][j] * x[j]                <=  budget of tier t
                at most one tier for a state of a chunk, one choice for a block's activations
                x[j] in {0, 1}

A phase takes as long as its busiest lane, and a small share `e` of all work is seen in the step
whatever hides it: of two answers that look alike, the one that moves less is better.

Rows of peaks are added a few at a time, where the last answer is fullest, so that a handful is
enough and moves of equal blocks stay interchangeable for the solver. The limits on the solver are
counts, never seconds: the same input gives the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from packhorse.machine.spec import TierName
from packhorse.search.loads import NUM_PHASES, Floats
from packhorse.search.sketch import EXPOSED_SHARE, Sketch

# Bytes and ns are scaled so that the largest is this: the solver's tolerances are absolute.
SCALE: Final = 1e4
MAX_NODES: Final = 300
ROUGH_GAP: Final = 5e-3
FINE_GAP: Final = 5e-3
MAX_ROUNDS: Final = 40
NUM_PARTS: Final = 12
NEARLY_FULL: Final = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    matrix: Floats
    lower: Floats
    upper: Floats
    in_bytes: npt.NDArray[np.bool_]


def choose_moves(
    sketch: Sketch,
    *,
    device_bytes: int,
    away_bytes: Mapping[TierName, int],
    goal: Literal["time", "memory"] = "time",
    rel_gap: float = FINE_GAP,
) -> tuple[bool, ...] | None:
    """Choose the moves of the fastest state that fits, or of the one that needs least memory.

    Args:
        sketch: the linear model.
        device_bytes: the device budget; with the goal `memory` it is no limit.
        away_bytes: the budgets of the other tiers.
        goal: what is minimised.
        rel_gap: the share of the step by which the answer may be longer than the best.

    Returns:
        One flag per move; None if no state fits.
    """
    num_moves = len(sketch.setting.moves)
    if num_moves == 0:
        fits = goal == "memory" or sketch.need_bytes(()) <= device_bytes
        return () if fits else None
    limit = inf if goal == "memory" else float(device_bytes - sketch.base_bytes)
    floors = _peak_floors(sketch)
    if floors @ np.asarray(sketch.weights) > limit:
        return None
    others = _other_rows(sketch, limit, away_bytes)
    rows = _find_peaks(sketch.used_bytes)
    for _ in range(MAX_ROUNDS):
        taken = _solve(sketch, sorted(rows), others, floors, goal, rel_gap)
        if taken is None:
            return None
        used = sketch.used_bytes - sketch.saved_bytes @ np.asarray(taken, dtype=np.float64)
        peaks = _find_peaks(used)
        if peaks <= rows or (goal == "time" and sketch.need_bytes(taken) <= device_bytes):
            return taken
        rows |= peaks
    return None


def _find_peaks(used_bytes: Floats) -> set[tuple[int, int]]:
    # Of each pool the fullest moment, and those of other parts of the step that are nearly as full.
    found: set[tuple[int, int]] = set()
    for pool, used in enumerate(used_bytes):
        least = used.max() * NEARLY_FULL
        for part in np.array_split(np.arange(len(used)), min(NUM_PARTS, len(used))):
            place = int(part[used[part].argmax()])
            if used[place] >= least:
                found.add((pool, place))
    return found


def _peak_floors(sketch: Sketch) -> Floats:
    # No state has a lower peak in a pool than this.
    most = np.maximum(sketch.saved_bytes, 0).sum(axis=2)
    return np.maximum((sketch.used_bytes - most).max(axis=1), 0)


def _other_rows(sketch: Sketch, limit: float, away_bytes: Mapping[TierName, int]) -> _Rows:
    moves = sketch.setting.moves
    num_columns = len(moves) + len(sketch.weights) + NUM_PHASES
    rows: list[Floats] = []
    upper: list[float] = []
    in_bytes: list[bool] = []
    if limit < inf:
        row = np.zeros(num_columns)
        row[len(moves) : len(moves) + len(sketch.weights)] = sketch.weights
        rows.append(row)
        upper.append(limit)
        in_bytes.append(True)
    for tier, sizes in sketch.away_bytes.items():
        row = np.zeros(num_columns)
        row[: len(moves)] = sizes
        rows.append(row)
        upper.append(float(away_bytes.get(tier, 0) - sketch.away_start_bytes.get(tier, 0)))
        in_bytes.append(True)
    places: dict[tuple[str, int], list[int]] = {}
    for column, move in enumerate(moves):
        places.setdefault(move.subject, []).append(column)
    for columns in places.values():
        if len(columns) > 1:
            row = np.zeros(num_columns)
            row[columns] = 1.0
            rows.append(row)
            upper.append(1.0)
            in_bytes.append(False)
    matrix = np.vstack(rows) if rows else np.zeros((0, num_columns))
    return _Rows(
        matrix=matrix,
        lower=np.full(len(rows), -inf),
        upper=np.asarray(upper),
        in_bytes=np.asarray(in_bytes, dtype=np.bool_),
    )


def _solve(
    sketch: Sketch,
    peaks: Sequence[tuple[int, int]],
    others: _Rows,
    floors: Floats,
    goal: Literal["time", "memory"],
    rel_gap: float,
) -> tuple[bool, ...] | None:
    # Loading the solver takes a third of a second, so only who searches pays for it.
    import highspy
    from highspy._core import (
        _Highs,  # pyright: ignore[reportPrivateUsage]  # the public subclass prints a banner
    )

    num_moves, num_pools = len(sketch.setting.moves), len(floors)
    unit_bytes = max(float(sketch.used_bytes.max()), 1.0) / SCALE
    unit_ns = max(float(sketch.step_ns), 1.0) / SCALE
    rows = _scaled_rows(sketch, peaks, others, unit_bytes, unit_ns)
    num_rows, num_columns = rows.matrix.shape
    program = highspy.HighsLp()
    program.num_col_ = num_columns
    program.num_row_ = num_rows
    if goal == "time":
        program.col_cost_ = np.concatenate(
            [
                sketch.cost_ns * (EXPOSED_SHARE / unit_ns),
                np.zeros(num_pools),
                np.full(NUM_PHASES, 1 - EXPOSED_SHARE),
            ]
        )
        program.offset_ = sketch.step_ns * (EXPOSED_SHARE / unit_ns)
    else:
        # Among the smallest the cheapest: all time together counts for a hundred bytes or so.
        cheap = sketch.cost_ns / max(float(np.abs(sketch.cost_ns).sum()), 1.0) * 1e-3
        program.col_cost_ = np.concatenate(
            [cheap, np.asarray(sketch.weights), np.zeros(NUM_PHASES)]
        )
    program.col_lower_ = np.concatenate(
        [np.zeros(num_moves), floors / unit_bytes, np.zeros(NUM_PHASES)]
    )
    program.col_upper_ = np.concatenate([np.ones(num_moves), np.full(num_pools + NUM_PHASES, inf)])
    program.row_lower_ = rows.lower
    program.row_upper_ = rows.upper
    program.integrality_ = [
        highspy.HighsVarType.kInteger if column < num_moves else highspy.HighsVarType.kContinuous
        for column in range(num_columns)
    ]
    filled = rows.matrix != 0
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.num_col_ = num_columns
    program.a_matrix_.num_row_ = num_rows
    program.a_matrix_.start_ = np.concatenate([[0], np.cumsum(filled.sum(axis=1))]).astype(np.int32)
    program.a_matrix_.index_ = np.nonzero(filled)[1].astype(np.int32)
    program.a_matrix_.value_ = rows.matrix[filled]
    solver = _Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("mip_max_nodes", MAX_NODES)
    solver.setOptionValue("mip_rel_gap", rel_gap)
    solver.passModel(program)
    solver.run()
    solution = solver.getSolution()
    if not solution.value_valid:
        return None
    return tuple(value > 0.5 for value in solution.col_value[:num_moves])


def _scaled_rows(
    sketch: Sketch,
    peaks: Sequence[tuple[int, int]],
    others: _Rows,
    unit_bytes: float,
    unit_ns: float,
) -> _Rows:
    # Columns: a flag per move, then the peak of each pool and the time of each phase in units.
    num_moves, num_pools = len(sketch.setting.moves), len(sketch.weights)
    num_columns = num_moves + num_pools + NUM_PHASES
    matrix = np.zeros((len(peaks), num_columns))
    lower = np.zeros(len(peaks))
    for row, (pool, task) in enumerate(peaks):
        matrix[row, :num_moves] = sketch.saved_bytes[pool, task] / unit_bytes
        matrix[row, num_moves + pool] = 1.0
        lower[row] = sketch.used_bytes[pool, task] / unit_bytes
    used = (sketch.load_start_ns != 0) | (sketch.load_ns != 0).any(axis=1)
    times = np.zeros((int(used.sum()), num_columns))
    times[:, :num_moves] = -sketch.load_ns[used] / unit_ns
    times[np.arange(len(times)), num_moves + num_pools + sketch.phases[used]] = 1.0
    scale = np.where(others.in_bytes, unit_bytes, 1.0)
    scaled = others.matrix / scale[:, None]
    # The peaks' own coefficients are weights, whatever the unit.
    scaled[:, num_moves:] = others.matrix[:, num_moves:]
    return _Rows(
        matrix=np.vstack([matrix, times, scaled]),
        lower=np.concatenate([lower, sketch.load_start_ns[used] / unit_ns, others.lower / scale]),
        upper=np.concatenate([np.full(len(peaks) + len(times), inf), others.upper / scale]),
        in_bytes=np.concatenate([np.ones(len(peaks) + len(times), np.bool_), others.in_bytes]),
    )
