"""What a run folder says of its steps beside their timelines: how many, and the process's memory.

In: a run folder. Out: a note, a `Difference`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.errors import FileFormatError

if TYPE_CHECKING:
    from packhorse.report.compare import Difference


def say_unfinished(folder: Path) -> str | None:
    """Say how far a run is whose steps are compared before it is complete; None once it is."""
    from packhorse.cli.companions import companion_path
    from packhorse.plan.files import PLAN_NAME
    from packhorse.report.run_files import read_run
    from packhorse.trainer.run_folder import METRICS_NAME, count_finished

    if not (folder / METRICS_NAME).is_file():
        return None
    num_done = count_finished(folder)
    try:
        num_steps = read_run(companion_path(folder / PLAN_NAME, "run")).num_steps
    except FileFormatError:
        # It is beside the point here: whoever needs the estimate is told.
        return None
    if num_done >= num_steps:
        return None
    return f"the run is not complete: {num_done} of {num_steps} steps are finished"


def find_process(folder: Path) -> Difference | None:
    """Lay what the plan of a run promises of the process beside what the run's metrics say of it.

    Of several ranks it is the first one's.

    None where there is no plan with a prediction, or a run without that metric.
    """
    from packhorse.cli.rank_reading import read_any_plan
    from packhorse.plan.files import PLAN_NAME
    from packhorse.plan.ranks import RankPlans
    from packhorse.report.compare import Difference
    from packhorse.trainer.run_folder import METRICS_NAME, read_metrics
    from packhorse.units import GIB

    if not (folder / PLAN_NAME).is_file():
        return None
    plan = read_any_plan(folder / PLAN_NAME)
    plan = plan.ranks[0] if isinstance(plan, RankPlans) else plan
    sizes = [line.get("process_gib") for line in read_metrics(folder / METRICS_NAME)]
    largest = max((size for size in sizes if size is not None), default=None)
    if plan.prediction is None or largest is None:
        return None
    # Beside a GPU the process lives in the host's memory.
    causes = plan.prediction.peak_bytes.get("device" if plan.numerics.device == "cpu" else "host")
    predicted = 0 if causes is None else sum(causes.values())
    return Difference(name="peak", predicted=predicted, measured=round(largest * GIB))
