"""`packhorse compare` of a run of several ranks: each rank's step, predicted beside measured.

In: what was typed, and the run folder. Out: a table of all ranks, of one in full where it is named;
a trace; the machines of all ranks with the rates that they showed; a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.errors import InputError

if TYPE_CHECKING:
    from packhorse.cli.screen import Screen
    from packhorse.machine.rescale import RateFactors
    from packhorse.report.compare import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What was typed: see the options of `packhorse compare`; `num_ranks` is what the plan has."""

    folder: Path
    num_ranks: int
    rank: int | None
    num_tasks: int
    trace: Path | None
    machine_out: Path | None


def count_ranks(folder: Path) -> int:
    """Count the ranks of a run, by its plan; 1 where there is none.

    Raises:
        FileFormatError: the plan is damaged.
    """
    from packhorse.cli.kinds import detect_kind
    from packhorse.plan.files import PLAN_NAME
    from packhorse.plan.rank_files import read_rank_plans

    path = folder / PLAN_NAME
    if not path.is_file() or detect_kind(path) != "rank plans":
        return 1
    return len(read_rank_plans(path).ranks)


def compare_ranks(request: CompareRequest, screen: Screen) -> None:
    """Lay every rank's measured step beside its predicted one.

    Raises:
        InputError: a timeline is missing, or there is no such rank.
        FileFormatError: a timeline is damaged.
    """
    from packhorse.cli.outputs import write_output
    from packhorse.cli.run_timelines import find_process
    from packhorse.report.compare import compare_timelines, comparison_as_dict
    from packhorse.report.measured_rates import factors_as_dict, say_factors
    from packhorse.report.rank_compare import idle_as_dict, rank_comparison_table
    from packhorse.report.tables import comparison_table
    from packhorse.timeline.files import read_timeline
    from packhorse.timeline.perfetto import format_trace

    if request.rank is not None and request.rank >= request.num_ranks:
        raise InputError(
            f"there is no rank {request.rank}: the run is of ranks 0 to {request.num_ranks - 1}",
            where="--rank",
            fix="name one of them, or leave it out to see all",
        )
    pairs = _find_pairs(request)
    timelines = [(read_timeline(first), read_timeline(second)) for first, second in pairs]
    comparisons = [
        compare_timelines(
            predicted,
            measured,
            num_tasks=request.num_tasks,
            process=None if rank else find_process(request.folder),
        )
        for rank, (predicted, measured) in enumerate(timelines)
    ]
    if request.rank is None:
        screen.show(rank_comparison_table(comparisons, num_tasks=request.num_tasks))
    else:
        screen.show(f"rank {request.rank}", comparison_table(comparisons[request.rank]))
    if request.trace is not None:
        write_output(request.trace, format_trace(*(each for pair in timelines for each in pair)))
        screen.wrote(request.trace)
    factors: tuple[RateFactors, ...] = ()
    if request.machine_out is not None:
        factors = _write_machines(request.folder, comparisons, request.machine_out)
        for rank, each in enumerate(factors):
            screen.show(f"rank {rank}: {say_factors(each)}")
        screen.wrote(request.machine_out)
    screen.answer(
        {
            "ranks": [
                {"rank": rank, "predicted": str(first), "measured": str(second)}
                | comparison_as_dict(comparison)
                | {"idle": idle_as_dict(comparison)}
                for rank, ((first, second), comparison) in enumerate(
                    zip(pairs, comparisons, strict=True)
                )
            ]
        }
        | ({"machine_factors": [factors_as_dict(each) for each in factors]} if factors else {})
    )


def _find_pairs(request: CompareRequest) -> list[tuple[Path, Path]]:
    from packhorse.timeline.files import MEASURED_NAME, PREDICTED_NAME, name_for_rank

    folder = request.folder
    pairs = [
        (folder / name_for_rank(PREDICTED_NAME, rank), folder / name_for_rank(MEASURED_NAME, rank))
        for rank in range(request.num_ranks)
    ]
    missing = [path.name for pair in pairs for path in pair if not path.is_file()]
    if missing:
        raise InputError(
            f"the run folder has no {' and no '.join(missing)}",
            where=str(folder),
            fix="each rank's are written after its first steps: train the run on",
        )
    return pairs


def _write_machines(
    folder: Path, comparisons: Sequence[Comparison], out: Path
) -> tuple[RateFactors, ...]:
    """Write the machines of all ranks, each with the rates that it showed."""
    from packhorse.cli.outputs import write_output
    from packhorse.machine.cluster_files import format_cluster, read_cluster
    from packhorse.machine.rescale import rescale_machine
    from packhorse.report.measured_rates import find_factors
    from packhorse.trainer.run_folder import MACHINE_NAME

    other = [rank for rank, each in enumerate(comparisons) if not each.same_tasks]
    if other:
        raise InputError(
            f"the predicted and the measured step of rank {other[0]} have other tasks, so their"
            " rates cannot be told",
            where=str(folder),
            fix="name the folder of a run whose plan.json was not changed after it was trained",
        )
    cluster = read_cluster(folder / MACHINE_NAME)
    factors = tuple(find_factors(each) for each in comparisons)
    ranks = tuple(
        rescale_machine(machine, each) for machine, each in zip(cluster.ranks, factors, strict=True)
    )
    write_output(out, format_cluster(replace(cluster, ranks=ranks)))
    return factors
