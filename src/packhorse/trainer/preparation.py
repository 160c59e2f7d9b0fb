"""From a recipe to what a plan is made for and a run is made of.

In: a recipe and a machine. Out: a `PreparedRun`: the module without its weights, data, groups,
numerics. `offer_candidates` traces it for the search, `trace_for_plan` as one plan says; both may
be called in any process, before or after planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn

from packhorse.errors import RecipeError
from packhorse.graph.trace import Traced
from packhorse.machine.spec import Machine
from packhorse.optim.groups import assign_groups, find_module_kinds
from packhorse.optim.optimizers import SGD, Optimizer
from packhorse.plan.spec import OptimizerPlan, Plan
from packhorse.trainer.batch_cut import BatchCut, cut_batch
from packhorse.trainer.candidates import (
    MEASURE_LIMIT_S,
    Candidates,
    TracingRequest,
    trace_candidates,
    trace_plan,
)
from packhorse.trainer.model_sources import ModelSource, find_model, read_config
from packhorse.trainer.modules import build_module, find_vocabulary, freeze_parameters
from packhorse.trainer.numerics import COMPUTE_DTYPES
from packhorse.trainer.recipe import Recipe
from packhorse.trainer.run_data import RunData, make_example, prepare_run_data
from packhorse.trainer.weight_files import FolderWeights
from packhorse.trainer.weights import RandomWeights, WeightSource

# Called with what is done, how much of it is done, and how much there is where known.
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A recipe made concrete, before it has a plan.

    `module` has its parameters on `meta`. `compute_dtype` is a name such as `bfloat16`.
    """

    recipe: Recipe
    source: ModelSource
    module: nn.Module
    data: RunData
    cut: BatchCut
    optimizer: Optimizer
    compute_dtype: str
    request: TracingRequest
    example: Mapping[str, Tensor]
    frozen: tuple[str, ...]

    @property
    def optimizer_plan(self) -> OptimizerPlan:
        """What the update needs, in the plan's words."""
        return plan_optimizer(
            self.optimizer,
            compute_dtype=self.compute_dtype,
            clips=self.recipe.max_grad_norm is not None,
        )

    def open_weights(self) -> WeightSource:
        """Open the values that the run begins with.

        Raises:
            ModelError: a parameter has no values in the files.
            FileFormatError: a file is missing or damaged.
        """
        if self.source.weights is not None:
            return FolderWeights(self.module, self.source.weights)
        config = read_config(self.source.config)
        named = config.get("dtype", config.get("torch_dtype"))
        dtype = str(named) if named in ("float32", "bfloat16", "float16") else "float32"
        return RandomWeights(self.module, seed=self.recipe.seed, dtype=dtype)


def prepare_run(
    recipe: Recipe, machine: Machine, *, progress: Progress | None = None, num_ranks: int = 1
) -> PreparedRun:
    """Build the module, prepare the data, and settle what the search does not choose.

    Raises:
        RecipeError, DataError, ModelError, FileFormatError: something in the recipe, or that it
            names, is wrong.
    """
    cut = cut_batch(recipe, num_ranks=num_ranks)
    compute_dtype = choose_compute_dtype(recipe, machine)
    source = find_model(recipe.model_name_or_path)
    if progress is not None:
        progress("building the model without its weights", 0, None)
    module = build_module(source, attention=recipe.pins.attention)
    frozen = freeze_parameters(module, recipe.freeze)
    data = prepare_run_data(
        recipe,
        source,
        vocab_size=find_vocabulary(module),
        global_rows=cut.global_rows,
        progress=progress,
    )
    _check_positions(module, data.row_length)
    optimizer = recipe.optimizer
    names = tuple(name for name, _ in module.named_parameters())
    groups = assign_groups(names, optimizer, module_kinds=find_module_kinds(module))
    return PreparedRun(
        recipe=recipe,
        source=source,
        module=module,
        data=data,
        cut=cut,
        optimizer=optimizer,
        compute_dtype=compute_dtype,
        request=TracingRequest(
            name=source.name,
            groups=groups,
            compute_dtype=COMPUTE_DTYPES[compute_dtype],
            device=machine.device,
        ),
        example=make_example(data),
        frozen=frozen,
    )


def offer_candidates(
    prepared: PreparedRun,
    machine: Machine,
    *,
    limit_s: float = MEASURE_LIMIT_S,
    baseline_bytes: int | None = None,
    progress: Progress | None = None,
) -> Candidates:
    """Trace and time a prepared run for the search; see `trace_candidates`."""
    return trace_candidates(
        prepared.module,
        prepared.example,
        prepared.request,
        machine,
        global_rows=prepared.cut.global_rows,
        microbatch_rows=prepared.cut.microbatch_rows,
        loss_chunk_tokens=prepared.recipe.pins.loss_chunk_tokens,
        limit_s=limit_s,
        baseline_bytes=baseline_bytes,
        evaluates=prepared.data.evaluation is not None,
        progress=progress,
    )


def trace_for_plan(prepared: PreparedRun, plan: Plan) -> Traced:
    """Trace a prepared run exactly as a plan says.

    Raises:
        RecipeError: the plan was made for another batch or dtype than the recipe asks for.
        ModelError: the model cannot be traced.
    """
    numerics = plan.numerics
    rows = numerics.microbatch_rows.value
    planned = rows * numerics.num_microbatches
    if planned != prepared.cut.global_rows:
        raise RecipeError(
            f"the plan is for {planned} rows in a step ({rows} x {numerics.num_microbatches}), the"
            f" recipe asks for {prepared.cut.global_rows}",
            where="recipe: global_batch_size",
            fix="make the plan again",
        )
    if numerics.compute_dtype != prepared.compute_dtype:
        raise RecipeError(
            f"the plan computes in {numerics.compute_dtype}, the recipe asks for"
            f" {prepared.compute_dtype}",
            where="recipe: bf16",
            fix="make the plan again, or set bf16 as it was",
        )
    return trace_plan(
        prepared.module,
        prepared.example,
        prepared.request,
        rows=rows,
        loss_chunk_tokens=numerics.loss_chunk_tokens.value,
    )


def plan_optimizer(optimizer: Optimizer, *, compute_dtype: str, clips: bool) -> OptimizerPlan:
    """Put an optimizer into the plan's words."""
    name: Literal["adamw", "sgd"] = "sgd" if isinstance(optimizer, SGD) else "adamw"
    return OptimizerPlan(
        name=name,
        states=optimizer.state_names,
        master=compute_dtype != "float32",
        clips=clips,
    )


def choose_compute_dtype(recipe: Recipe, machine: Machine) -> str:
    """Settle the dtype of forward and backward.

    Raises:
        RecipeError: a pin contradicts `bf16`, or names a dtype that is not offered.
    """
    pinned = recipe.pins.compute_dtype
    if pinned is None:
        wants = machine.bf16_native if recipe.bf16 == "auto" else recipe.bf16
        return "bfloat16" if wants else "float32"
    if pinned not in COMPUTE_DTYPES:
        raise RecipeError(
            f"compute_dtype is pinned to {pinned}, which would need loss scaling",
            where="recipe: plan.compute_dtype",
            fix="use bfloat16 or float32",
        )
    if recipe.bf16 != "auto" and recipe.bf16 != (pinned == "bfloat16"):
        raise RecipeError(
            f"bf16 is {str(recipe.bf16).lower()}, but compute_dtype is pinned to {pinned}",
            where="recipe: bf16 and plan.compute_dtype",
            fix="keep one of them",
        )
    return pinned


def _check_positions(module: nn.Module, row_length: int) -> None:
    config: object = getattr(module, "config", None)
    limit = cast("object", getattr(config, "max_position_embeddings", None))  # any config
    if isinstance(limit, int) and row_length > limit:
        raise RecipeError(
            f"rows have {row_length} tokens, but the model was made for {limit} positions",
            where="recipe: max_length",
            fix=f"set max_length: {limit}, or raise max_position_embeddings in the model's config",
        )
