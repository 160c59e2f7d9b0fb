"""plan.json in and out.

In: a `Plan`, or the text of a file (JSON or YAML alike) that a person may have edited. Out: the
readable text, or the `Plan`. `parse_plan(format_plan(plan)) == plan` always holds. A choice is
`{"value": ..., "because": ...}`; a bare value is read as a choice made by hand. Sizes may carry a
unit (`22GiB`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeVar

from packhorse.errors import FileFormatError
from packhorse.machine.spec import Drive, TierName
from packhorse.notation import NotationError, parse_notation
from packhorse.plan.fields import Fields, as_mapping, parse_piece
from packhorse.plan.spec import (
    BOUNDARIES_STAY,
    DEPTH_FIRST,
    IN_DEVICE,
    NO_CACHE,
    NO_OFFLOAD,
    NO_PREFETCH,
    NO_STRIDE,
    NOT_DURABLE,
    ActivationChoice,
    BlockPlan,
    CacheMode,
    Choice,
    ChunkPlan,
    Durable,
    HeapMode,
    Numerics,
    OptimizerPlan,
    Order,
    Plan,
    Prediction,
)
from packhorse.plan.text import format_json
from packhorse.units import format_exact_bytes

PLAN_NAME: Final = "plan.json"
KIND: Final = "packhorse/plan"
VERSION: Final = 1
_RECIPE_KIND: Final = "packhorse/recipe"
Value = TypeVar(
    "Value",
    int,
    int | None,
    str,
    TierName,
    HeapMode,
    ActivationChoice,
    Order,
    Durable,
    CacheMode,
)
TIERS: Final[tuple[TierName, ...]] = ("device", "host", "disk")
UPDATE_TIERS: Final[tuple[TierName, ...]] = ("device", "host")
CACHES: Final[tuple[CacheMode, ...]] = ("none", "valleys")
ORDERS: Final[tuple[Order, ...]] = ("depth_first", "layered", "scheduled")


def format_plan(plan: Plan) -> str:
    """Render a plan as the text of a plan.json, ending in a newline."""
    if plan.pipeline is not None:
        raise ValueError("the plan of one of several ranks is written with those of the others")
    return format_json({"kind": KIND, "version": VERSION, **plan_to_json(plan)}) + "\n"


def read_plan(path: str | Path) -> Plan:
    """Read a plan.json (or the same in YAML).

    Raises:
        FileFormatError: no such file, no plan, a newer version, or a wrong key or value, by name.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileFormatError(
            "there is no such plan file",
            where=str(path),
            fix="make one with `packhorse plan RECIPE`",
        ) from error
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"the plan is no text: {error.reason} at byte {error.start}",
            where=str(path),
            fix="give the plan.json that `packhorse plan` wrote",
        ) from error
    return parse_plan(text, where=str(path))


def parse_plan(text: str, *, where: str = "plan") -> Plan:
    """Read the text of a plan.

    Args:
        text: JSON or YAML.
        where: the file's name, for errors.

    Raises:
        FileFormatError: names the key, the value and, for an unknown key, the nearest one.
    """
    content = as_mapping(_load(text, where))
    if content is None:
        raise FileFormatError(
            "this is no plan: the file holds no keys",
            where=where,
            fix="give the plan.json that `packhorse plan` wrote",
        )
    fields = Fields(content, where=where, path="")
    kind = content.get("kind")
    if kind != KIND:
        raise _no_plan(content, where)
    fields.text("kind")
    version = fields.count("version")
    if version > VERSION:
        raise FileFormatError(
            f"the plan has version {version}; this Packhorse reads versions up to {VERSION}",
            where=where,
            fix="update Packhorse, or make the plan again with this one",
        )
    plan = read_plan_fields(fields)
    fields.finish()
    return plan


def _no_plan(content: Mapping[object, object], where: str) -> FileFormatError:
    """Say what a file is instead of a plan, and for a recipe the command that makes its plan."""
    kind = content.get("kind")
    if kind == _RECIPE_KIND or (kind is None and "model_name_or_path" in content):
        return FileFormatError(
            "this is a recipe, and a plan is wanted",
            where=where,
            fix=f"`packhorse plan {where}` makes its plan: then give plan.json",
        )
    what = "it names no kind" if kind is None else f"it is of kind {kind!r}"
    return FileFormatError(
        f"this is no plan: {what}, not {KIND!r}",
        where=where,
        fix="give a run folder, or the plan.json that `packhorse plan RECIPE` wrote",
    )


def _load(text: str, where: str) -> object:
    try:
        return parse_notation(text)
    except NotationError as error:
        raise FileFormatError(
            f"the plan is neither JSON nor YAML: {error}",
            where=where,
            fix="undo the last edit, or make the plan again with `packhorse plan`",
        ) from error


def plan_to_json(plan: Plan) -> dict[str, object]:
    """What a plan's file says below its kind; not how ranks share the model."""
    numerics = plan.numerics
    return {
        "model": plan.model,
        "model_name": plan.model_name,
        "machine": plan.machine,
        "length": plan.length,
        "scratch": plan.scratch,
        "drives": [asdict(drive) for drive in plan.drives],
        "budget_bytes": {t: format_exact_bytes(b) for t, b in plan.budget_bytes.items()},
        "base_bytes": plan.base_bytes,
        "numerics": {
            "microbatch_rows": choice_to_json(numerics.microbatch_rows),
            "num_microbatches": numerics.num_microbatches,
            "num_workers": numerics.num_workers,
            "compute_dtype": numerics.compute_dtype,
            "loss_chunk_tokens": choice_to_json(numerics.loss_chunk_tokens),
            "tied_sum": numerics.tied_sum,
            "attention": numerics.attention,
            "num_threads": numerics.num_threads,
            "device": numerics.device,
            "instructions": numerics.instructions,
        },
        "optimizer": {
            "name": plan.optimizer.name,
            "states": list(plan.optimizer.states),
            "master": plan.optimizer.master,
            "clips": plan.optimizer.clips,
        },
        "heap": choice_to_json(plan.heap),
        "heap_slack": plan.heap_slack,
        "chunk_bytes": choice_to_json(plan.chunk_bytes),
        "order": choice_to_json(plan.order),
        "boundaries": choice_to_json(plan.boundaries),
        "offload": choice_to_json(plan.offload),
        "stride": choice_to_json(plan.stride),
        "durable": choice_to_json(plan.durable),
        "cache": choice_to_json(plan.cache),
        "prefetch": choice_to_json(plan.prefetch),
        "pins": list(plan.pins),
        "blocks": [
            {"name": block.name, "activations": choice_to_json(block.activations)}
            for block in plan.blocks
        ],
        "chunks": [
            {
                "pieces": [f"{p.parameter}[{p.start}:{p.stop}]" for p in chunk.pieces],
                "group": chunk.group,
                "trainable": chunk.trainable,
                "parameters": choice_to_json(chunk.parameters),
                "gradients": choice_to_json(chunk.gradients),
                "optimizer": choice_to_json(chunk.optimizer),
                "update": choice_to_json(chunk.update),
            }
            for chunk in plan.chunks
        ],
        "prediction": None if plan.prediction is None else _prediction_to_json(plan.prediction),
    }


def choice_to_json(choice: Choice[Value]) -> dict[str, object]:
    """Write a choice with its reason."""
    return {"value": choice.value, "because": choice.because}


def _prediction_to_json(prediction: Prediction) -> dict[str, object]:
    return {
        "step_ns": prediction.step_ns,
        "bottleneck": prediction.bottleneck,
        "peak_bytes": {tier: dict(causes) for tier, causes in prediction.peak_bytes.items()},
        "time_ns": dict(prediction.time_ns),
        "lane_ns": dict(prediction.lane_ns),
        "disk_read_bytes": prediction.disk_read_bytes,
        "disk_written_bytes": prediction.disk_written_bytes,
        "scratch_bytes": prediction.scratch_bytes,
        "kept_bytes_per_step": prediction.kept_bytes_per_step,
    }


def read_plan_fields(fields: Fields) -> Plan:
    """Read what `plan_to_json` wrote.

    Raises:
        FileFormatError: names the key, the value and, for an unknown key, the nearest one.
    """
    budget = fields.section("budget_bytes")
    budget_bytes: dict[TierName, int] = {
        tier: budget.size(tier) for tier in TIERS if tier in budget
    }
    budget.finish()
    return Plan(
        model=fields.text("model"),
        model_name=fields.text("model_name"),
        machine=fields.text("machine"),
        length=fields.count("length", least=1),
        budget_bytes=budget_bytes,
        base_bytes=fields.size("base_bytes"),
        numerics=_read_numerics(fields.section("numerics")),
        optimizer=_read_optimizer(fields.section("optimizer")),
        heap=fields.choice_of("heap", ("keep", "map")),
        heap_slack=fields.number("heap_slack"),
        chunk_bytes=fields.choice_of_size("chunk_bytes"),
        chunks=tuple(_read_chunk(chunk) for chunk in fields.sections("chunks")),
        blocks=tuple(_read_block(block) for block in fields.sections("blocks")),
        pins=fields.texts("pins"),
        prediction=_read_prediction(fields) if fields.has_value("prediction") else None,
        scratch=fields.text("scratch") if fields.has_value("scratch") else None,
        drives=tuple(_read_drive(drive) for drive in fields.sections("drives"))
        if "drives" in fields
        else (),
        order=fields.choice_of("order", ORDERS) if "order" in fields else DEPTH_FIRST,
        boundaries=fields.choice_of("boundaries", TIERS)
        if "boundaries" in fields
        else BOUNDARIES_STAY,
        offload=fields.choice_of("offload", TIERS) if "offload" in fields else NO_OFFLOAD,
        stride=fields.choice_of_count("stride", least=0) if "stride" in fields else NO_STRIDE,
        durable=fields.choice_of_count_or_off("durable") if "durable" in fields else NOT_DURABLE,
        cache=fields.choice_of("cache", CACHES) if "cache" in fields else NO_CACHE,
        prefetch=(
            fields.choice_of_count("prefetch", least=0) if "prefetch" in fields else NO_PREFETCH
        ),
    )


def _read_drive(fields: Fields) -> Drive:
    drive = Drive(
        path=fields.text("path"),
        budget_bytes=fields.size("budget_bytes"),
        read_bytes_per_s=fields.number("read_bytes_per_s"),
        write_bytes_per_s=fields.number("write_bytes_per_s"),
        measured_bytes=fields.size("measured_bytes"),
        direct=fields.flag("direct"),
        block_bytes=fields.size("block_bytes"),
        num_threads=fields.count("num_threads", least=1),
        huge_pages=fields.flag("huge_pages"),
    )
    fields.finish()
    return drive


def _read_numerics(fields: Fields) -> Numerics:
    numerics = Numerics(
        microbatch_rows=fields.choice_of_count("microbatch_rows"),
        num_microbatches=fields.count("num_microbatches", least=1),
        num_workers=fields.count("num_workers", least=1),
        compute_dtype=fields.text("compute_dtype"),
        loss_chunk_tokens=fields.choice_of_count_or_none("loss_chunk_tokens"),
        tied_sum=fields.one_of("tied_sum", ("per_microbatch", "per_step")),
        attention=fields.one_of("attention", ("causal", "eager", "native")),
        num_threads=fields.count("num_threads", least=1),
        device=fields.text("device"),
        instructions=fields.text("instructions") if fields.has_value("instructions") else None,
    )
    fields.finish()
    return numerics


def _read_optimizer(fields: Fields) -> OptimizerPlan:
    optimizer = OptimizerPlan(
        name=fields.one_of("name", ("adamw", "sgd")),
        states=fields.texts("states"),
        master=fields.flag("master"),
        clips=fields.flag("clips"),
    )
    fields.finish()
    return optimizer


def _read_chunk(fields: Fields) -> ChunkPlan:
    place = fields.place("pieces")
    chunk = ChunkPlan(
        pieces=tuple(parse_piece(text, place) for text in fields.texts("pieces")),
        group=fields.text("group"),
        trainable=fields.flag("trainable"),
        parameters=fields.choice_of("parameters", TIERS),
        gradients=fields.choice_of("gradients", TIERS),
        optimizer=fields.choice_of("optimizer", TIERS),
        update=fields.choice_of("update", UPDATE_TIERS) if "update" in fields else IN_DEVICE,
    )
    fields.finish()
    return chunk


def _read_block(fields: Fields) -> BlockPlan:
    block = BlockPlan(
        name=fields.text("name"),
        activations=fields.choice_of("activations", ("keep", "recompute", "offload")),
    )
    fields.finish()
    return block


def _read_prediction(parent: Fields) -> Prediction:
    fields = parent.section("prediction")
    peaks = fields.section("peak_bytes")
    peak_bytes: dict[TierName, Mapping[str, int]] = {
        tier: peaks.sizes(tier) for tier in TIERS if tier in peaks
    }
    peaks.finish()
    prediction = Prediction(
        step_ns=fields.count("step_ns"),
        peak_bytes=peak_bytes,
        time_ns=fields.sizes("time_ns"),
        lane_ns=fields.sizes("lane_ns") if "lane_ns" in fields else {},
        disk_read_bytes=fields.size("disk_read_bytes"),
        disk_written_bytes=fields.size("disk_written_bytes"),
        scratch_bytes=fields.size("scratch_bytes"),
        bottleneck=fields.text("bottleneck"),
        kept_bytes_per_step=fields.size("kept_bytes_per_step")
        if "kept_bytes_per_step" in fields
        else 0,
    )
    fields.finish()
    return prediction
