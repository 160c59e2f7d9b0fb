"""The recipe: what a person asks for, as one frozen tree. Loads no torch.

In: a mapping whose keys are known (`recipe_files` reads YAML and explains bad keys). Out: a
`Recipe`. Names and meanings are those of Hugging Face's Trainer and TRL where they have one. What
the plan decides is not in it: a person fixes such a choice under `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from packhorse.errors import PackhorseError
from packhorse.machine.budget import Budget, parse_budget
from packhorse.optim.optimizers import SGD, AdamW, Optimizer, ParameterGroup
from packhorse.plan.pins import Pins, read_pins

DEFAULT_GLOBAL_BATCH_SIZE: Final = 32

Reporter = Literal["tensorboard", "wandb", "trackio"]
Text = Annotated[str, Field(min_length=1)]
Names = tuple[Text, ...]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DiskSection(_Section):
    """A scratch folder and how much of its disk may be used."""

    path: str = "scratch"
    """Folder for what does not fit in memory, on the fastest disk; made when it is missing."""

    size: int | str | None = None
    """Most bytes, such as 600GiB; absent: what is free less a margin."""


class BudgetSection(_Section):
    """How much of each tier may be used; what is absent may use what is free less a margin."""

    device: int | str | None = None
    """Memory of the GPU, or the share of RAM without one, such as 22GiB."""

    host: int | str | None = None
    """RAM beside a GPU, such as 48GiB; only with a GPU."""

    disk: str | int | DiskSection | tuple[DiskSection, ...] | None = None
    """A size, a folder, or a list: `[{path: /a/scratch, size: 600GiB}, {path: /b/scratch}]`."""


class ParameterGroupSection(_Section):
    """Parameters with a rate or a decay of their own; the first group that fits wins."""

    patterns: Annotated[Names, Field(min_length=1)]
    """Shell patterns of parameter names, such as `*.embed_tokens.*`; each must fit one."""

    learning_rate: NotNegative | None = None
    """Rate that the warm-up reaches; absent: the recipe's. It follows the recipe's schedule."""

    weight_decay: NotNegative | None = None
    """Decay of all of them, biases and norms too; absent: the recipe's, and they never decay."""

    @field_validator("patterns", mode="before")
    @classmethod
    def _take_one_pattern(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    def to_group(self, name: str) -> ParameterGroup:
        """Put it into the optimizer's words."""
        given = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        overrides = {key: value for key, value in given.items() if value is not None}
        return ParameterGroup(name=name, patterns=self.patterns, overrides=overrides)


class Recipe(_Section):
    """One training run."""

    model_name_or_path: Text
    """A folder with config.json and safetensors, a config.json (random weights), or a Hub id."""

    tokenizer_name_or_path: Text | None = None
    """Folder or Hub id of the tokenizer; absent: the model's own folder."""

    train_data: Annotated[Names, Field(min_length=1)]
    """Files, folders and globs to learn from: text, JSONL, JSON or parquet."""

    eval_data: Names = ()
    """Files, folders and globs to evaluate on; excludes `eval_split`."""

    eval_split: Share | None = None
    """Share of the training rows that is held out for evaluation, such as 0.01."""

    data_format: Literal[
        "auto", "text", "messages", "prompt_completion", "instruction", "conversations", "tokens"
    ] = "auto"
    """What a row is; auto recognises it by its fields, file by file."""

    data_cache: Text | None = None
    """Folder of token caches, shared by runs; absent: `packhorse/data` in the user's cache."""

    max_length: Annotated[int, Field(ge=2)] = 2048
    """Most tokens in a row; longer ones are cut, and counted."""

    packing: bool = False
    """Put several documents into a row: attention stays within each, positions restart."""

    assistant_only_loss: bool = True
    """Learn only what the assistant says (or the completion); false: every token."""

    global_batch_size: Count | None = None
    """Rows in one optimizer step over all ranks; the plan cuts it. Absent: 32, or the cut below."""

    per_device_train_batch_size: Count | None = None
    """Pins the rows of a micro-batch; absent: the plan chooses."""

    gradient_accumulation_steps: Count | None = None
    """Pins the micro-batches of a step on each rank; absent: the plan chooses."""

    num_train_epochs: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Passes over the training rows; `max_steps` wins."""

    max_steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Optimizer steps of the whole run; absent: `num_train_epochs` decides."""

    learning_rate: NotNegative = 1e-5
    """Rate that the warm-up reaches; 1e-5 suits full fine-tuning of a pretrained model."""

    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Rate after the warm-up, by optimizer step; linear and cosine end at 0."""

    warmup_steps: NotNegative = 0.0
    """Optimizer steps until the full rate; below 1 a share of all steps."""

    optim: Literal["adamw_torch_fused", "sgd"] = "adamw_torch_fused"
    """Optimizer; both compute as torch's fused kernels do."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""

    adam_epsilon: NotNegative = 1e-8
    """Added to AdamW's denominator."""

    sgd_momentum: NotNegative = 0.0
    """Momentum of SGD; above 0 it keeps one float32 value per parameter."""

    weight_decay: NotNegative = 0.0
    """Decoupled decay (AdamW) or L2 (SGD); biases and norms never decay."""

    parameter_groups: tuple[ParameterGroupSection, ...] = ()
    """Groups of parameters, such as `[{patterns: ['*.embed_tokens.*'], learning_rate: 1e-6}]`."""

    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled to this global norm at most; null: no clipping, which saves memory."""

    bf16: bool | Literal["auto"] = "auto"
    """Compute in bfloat16 beside float32 master weights; auto: where the device has bf16 units."""

    freeze: Names = ()
    """Shell patterns of parameter names that are not trained, such as `*.embed_tokens.*`."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Of the row order, of dropout and of random weights."""

    output_dir: Text
    """The run folder."""

    save_steps: Count | None = 200
    """Optimizer steps between checkpoints; null: only the model at the end."""

    save_total_limit: Count | None = 2
    """Newest checkpoints that are kept; null: all."""

    save_only_model: bool = False
    """Checkpoints hold the model alone: small, but nothing can be resumed from them."""

    eval_steps: Count | None = 200
    """Optimizer steps between evaluations, the first before step 1; null: only at the end."""

    logging_steps: Count = 1
    """Optimizer steps between lines of the log; metrics.jsonl has every step."""

    report_to: tuple[Reporter, ...] = ()
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, or none."""

    resume_from_checkpoint: bool | str | None = None
    """true: the newest checkpoint of `output_dir` (an error when there is none); or a folder."""

    budget: str | BudgetSection | None = None
    """How much of each tier may be used; absent: what is free less a margin."""

    plan: dict[str, JsonValue] = {}
    """Choices that are fixed, by their names in plan.json, such as `{recompute: all}`; the rest is
    searched. Keys: recompute, activations, offload, parameters, gradients, optimizer, update,
    stride, heap, chunk_bytes, order, boundaries, durable, cache, prefetch; of several ranks
    schedule, a name such as 1f1b or a function of one's own as my_schedule.py:vee; what changes
    roundings: microbatch_rows, loss_chunk_tokens, tied_sum, attention, compute_dtype, num_threads,
    num_workers."""

    @field_validator("train_data", "eval_data", "freeze", mode="before")
    @classmethod
    def _take_one_name(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else () if value is None else value

    @field_validator("report_to", mode="before")
    @classmethod
    def _take_one_reporter(cls, value: object) -> object:
        if value in (None, "none", [], ()):
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, value: str | BudgetSection | None) -> str | BudgetSection | None:
        _say_as_value_error(lambda: _parse_section(value))
        return value

    @field_validator("plan")
    @classmethod
    def _check_plan(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        _say_as_value_error(lambda: read_pins(value))
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Recipe:
        if self.eval_data and self.eval_split is not None:
            raise ValueError("eval_data and eval_split are both given; keep one of them")
        if self.optim != "sgd" and self.sgd_momentum:
            raise ValueError(f"sgd_momentum has no effect with optim: {self.optim}")
        if self.optim == "sgd":
            for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
                if getattr(self, key) != Recipe.model_fields[key].default:
                    raise ValueError(f"{key} has no effect with optim: sgd")
        for number, group in enumerate(self.parameter_groups, start=1):
            if group.learning_rate and not self.learning_rate:
                raise ValueError(
                    f"parameter_groups: group {number} has a learning_rate, but the recipe's is 0,"
                    " whose schedule it would follow"
                )
        if self.save_only_model and self.resume_from_checkpoint:
            raise ValueError(
                "resume_from_checkpoint asks for what save_only_model: true does not write"
            )
        return self

    @property
    def pins(self) -> Pins:
        """The choices that a person fixed under `plan`."""
        return read_pins(self.plan)

    @property
    def granted(self) -> Budget:
        """The budget that the recipe names."""
        return _parse_section(self.budget)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer with its hyperparameters."""
        groups = tuple(
            group.to_group(f"group {number}")
            for number, group in enumerate(self.parameter_groups, start=1)
        )
        if self.optim == "sgd":
            return SGD(
                lr=self.learning_rate,
                momentum=self.sgd_momentum,
                weight_decay=self.weight_decay,
                groups=groups,
            )
        return AdamW(
            lr=self.learning_rate,
            betas=(self.adam_beta1, self.adam_beta2),
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
            groups=groups,
        )

    @property
    def run_folder(self) -> Path:
        """The run folder as a path."""
        return Path(self.output_dir)


def _parse_section(section: str | BudgetSection | None) -> Budget:
    if isinstance(section, BudgetSection):
        content: Mapping[str, object] = section.model_dump(exclude_none=True)
        return parse_budget(content)
    return parse_budget(section)


def _say_as_value_error(check: Callable[[], object]) -> None:
    """Hand an error of ours to pydantic, which collects the errors of all keys."""
    try:
        check()
    except PackhorseError as error:
        raise ValueError("; ".join((error.what, *((error.fix,) if error.fix else ())))) from error
