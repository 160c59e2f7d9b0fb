"""The plan.json of several ranks, in and out.

In: `RankPlans`, or the text of a file (JSON or YAML alike) that a person may have edited. Out: the
readable text, or the `RankPlans`. `parse_rank_plans(format_rank_plans(plans)) == plans` always
holds. Below `ranks` each rank's plan has the keys of a plan.json of one rank; orders are those of
torch.distributed.pipelining's CSV, a line for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Final

from packhorse.errors import FileFormatError, RuleError
from packhorse.notation import NotationError, parse_notation
from packhorse.plan.fields import Fields, as_mapping
from packhorse.plan.files import choice_to_json, plan_to_json, read_plan_fields
from packhorse.plan.ranks import RankPlans, Rejected
from packhorse.plan.spec import Choice, PipelinePlan, Plan
from packhorse.plan.text import format_json
from packhorse.schedule.csv_text import format_csv, parse_csv
from packhorse.schedule.proof import check_schedule

KIND: Final = "packhorse/rank-plans"
VERSION: Final = 1


def format_rank_plans(plans: RankPlans) -> str:
    """Render the plans of all ranks as the text of a plan.json, ending in a newline."""
    pipeline = plans.pipeline
    content = {
        "kind": KIND,
        "version": VERSION,
        "model_name": plans.ranks[0].model_name,
        "schedule": choice_to_json(pipeline.name),
        "bounds": {"value": list(pipeline.bounds.value), "because": pipeline.bounds.because},
        "orders": format_csv(pipeline.schedule).splitlines(),
        "step_ns": plans.step_ns,
        "compute_ns": list(plans.compute_ns),
        "rejected": [
            {"name": each.name, "num_stages": each.num_stages, "because": each.because}
            for each in plans.rejected
        ],
        "ranks": [plan_to_json(plan) for plan in plans.ranks],
    }
    return format_json(content) + "\n"


def read_rank_plans(path: str | Path) -> RankPlans:
    """Read the plan.json of several ranks.

    Raises:
        FileFormatError: no such file, another kind, a newer version, or a wrong key or value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(
            f"the plan cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            fix="give the plan.json that planning several ranks wrote",
        ) from error
    return parse_rank_plans(text, where=str(path))


def parse_rank_plans(text: str, *, where: str = "plan") -> RankPlans:
    """Read the text of the plans of several ranks.

    Raises:
        FileFormatError: names the key, the value and, for an unknown key, the nearest one; or what
            is wrong with the orders.
    """
    content = _load(text, where)
    fields = Fields(content, where=where, path="")
    fields.text("kind")
    version = fields.count("version")
    if version > VERSION:
        raise FileFormatError(
            f"the plan has version {version}; this Packhorse reads versions up to {VERSION}",
            where=where,
            fix="update Packhorse, or make the plan again with this one",
        )
    fields.text("model_name")
    pipeline = _read_pipeline(fields)
    ranks = tuple(_read_rank(each, pipeline) for each in fields.sections("ranks"))
    if len(ranks) != pipeline.schedule.num_ranks:
        raise FileFormatError(
            f"there are plans of {len(ranks)} ranks and orders of {pipeline.schedule.num_ranks}",
            where=fields.place("ranks"),
            fix="give every rank its plan and its order",
        )
    _check_alike(ranks, fields)
    compute_ns = fields.counts("compute_ns")
    if len(compute_ns) not in (0, len(ranks)):
        raise FileFormatError(
            f"there are plans of {len(ranks)} ranks, and compute_ns has {len(compute_ns)}",
            where=fields.place("compute_ns"),
            fix="give one for each rank, or none",
        )
    plans = RankPlans(
        ranks=ranks,
        step_ns=fields.count("step_ns") if fields.has_value("step_ns") else None,
        compute_ns=compute_ns,
        rejected=tuple(_read_rejected(each) for each in fields.sections("rejected")),
    )
    fields.finish()
    return plans


def _load(text: str, where: str) -> Mapping[object, object]:
    fix = "make the plan again with `packhorse plan` and the machines of all ranks"
    try:
        content = as_mapping(parse_notation(text))
    except NotationError as error:
        raise FileFormatError(
            f"the plan is neither JSON nor YAML: {error}", where=where, fix=fix
        ) from error
    if content is None or content.get("kind") != KIND:
        kind = None if content is None else content.get("kind")
        raise FileFormatError(
            f"this is no plan of several ranks: its kind is {kind!r}, not {KIND!r}",
            where=where,
            fix=fix,
        )
    return content


def _read_pipeline(fields: Fields) -> PipelinePlan:
    name = fields.choice_of_text("schedule")
    bounds = fields.choice_of_counts("bounds")
    place = fields.place("orders")
    try:
        schedule = parse_csv("\n".join(fields.texts("orders")))
        check_schedule(schedule)
    except (FileFormatError, RuleError) as error:
        raise FileFormatError(
            f"the orders are no schedule: {error.what}",
            where=f"{place}: {error.where}",
            fix=error.fix,
        ) from error
    rises = all(a < b for a, b in zip(bounds.value, bounds.value[1:], strict=False))
    if len(bounds.value) != schedule.num_stages + 1 or bounds.value[0] != 0 or not rises:
        raise FileFormatError(
            f"{list(bounds.value)} are not the bounds of {schedule.num_stages} stages",
            where=fields.place("bounds"),
            fix="give the first block of every stage, from 0 on, and the number of blocks",
        )
    return PipelinePlan(name=name, schedule=schedule, bounds=bounds)


def _read_rank(fields: Fields, pipeline: PipelinePlan) -> Plan:
    plan = replace(read_plan_fields(fields), pipeline=pipeline)
    fields.finish()
    return plan


def _check_alike(ranks: Sequence[Plan], fields: Fields) -> None:
    """Refuse ranks that would compute one step by different numerics."""
    first = _list_numerics(ranks[0])
    for rank, plan in enumerate(ranks):
        for name, value in _list_numerics(plan).items():
            if value != first[name]:
                raise FileFormatError(
                    f"{name} is {first[name]} on rank 0 and {value} on rank {rank}",
                    where=fields.place(f"ranks[{rank}]"),
                    fix="give all ranks the same: they compute one step together",
                )


def _list_numerics(plan: Plan) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for part in (plan.numerics, plan.optimizer):
        for field in dataclass_fields(part):
            value: object = getattr(part, field.name)
            # Reasons may differ.
            found[field.name] = value.value if isinstance(value, Choice) else value
    return found


def _read_rejected(fields: Fields) -> Rejected:
    rejected = Rejected(
        name=fields.text("name"),
        num_stages=fields.count("num_stages"),
        because=fields.text("because"),
    )
    fields.finish()
    return rejected
