"""torch.distributed.pipelining's CSV of a schedule: a row for each rank, a cell for each task.

In: a schedule, or a text. Out: the text that torch's `_load_csv(..., "compute_only")` reads, or the
schedule of a text that its `_dump_csv` wrote. A cell is stage, letter and microbatch (`2F0`), with
F, B, I and W for the four tasks; an empty cell is a pause, which a schedule need not say; a pair
`(0F5;7B2)OVERLAP_F_B` is read as its parts, one after the other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import Final

from packhorse.errors import FileFormatError
from packhorse.schedule.spec import LETTERS, Schedule, Task, name_task

_CELL: Final = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_TRANSFER: Final = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_KINDS: Final = {letter: kind for kind, letter in LETTERS.items()}


def format_csv(schedule: Schedule) -> str:
    """Write a schedule; `parse_csv` reads an equal one back."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(map(name_task, order) for order in schedule.orders)
    return text.getvalue()


def parse_csv(text: str) -> Schedule:
    """Read a schedule; each stage is placed where its tasks are.

    Raises:
        FileFormatError: a cell is no task; gives its row and column.
    """
    placement: dict[int, set[int]] = {}
    orders: list[tuple[Task, ...]] = []
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        order = tuple(
            task
            for column, cell in enumerate(row)
            for task in _parse_cell(cell.strip(), f"row {rank + 1}, column {column + 1}")
        )
        for task in order:
            placement.setdefault(task.stage, set()).add(rank)
        orders.append(order)
    if not placement:
        raise FileFormatError(
            "the text has no tasks", where="row 1", fix="write one row for each rank: 0F0,0F1,0B0"
        )
    return Schedule(
        placement={stage: tuple(sorted(ranks)) for stage, ranks in sorted(placement.items())},
        orders=tuple(orders),
    )


def _parse_cell(cell: str, where: str) -> Iterator[Task]:
    if not cell:
        return
    if (pair := _PAIR.fullmatch(cell)) is not None:
        for part in pair.group(1).split(";"):
            yield from _parse_cell(part.strip(), where)
        return
    match = _CELL.fullmatch(cell)
    if match is None:
        if _TRANSFER.fullmatch(cell):
            raise FileFormatError(
                f"{cell!r} is a transfer, and transfers follow from the order of tasks",
                where=where,
                fix='write the file with _dump_csv(..., format="compute_only")',
            )
        raise FileFormatError(
            f"{cell[:40]!r} is no task",
            where=where,
            fix="write stage, one of F B I W, and microbatch, for example 2F0",
        )
    stage, letter, microbatch = match.groups()
    yield _KINDS[letter](stage=int(stage), microbatch=int(microbatch))
