"""A tiny Llama folder with tokenizer and data, a machine, and plans for it; needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from packhorse.machine.spec import Heap, Link, Machine, MatmulPoint, Tier, UpdateRate
from packhorse.optim.norm import clip_coefficient, global_norm
from packhorse.optim.schedules import learning_rate_at
from packhorse.plan.spec import Plan
from packhorse.search.search import find_plan
from packhorse.search.space import Arithmetic, Candidate
from packhorse.trainer.candidates import Candidates
from packhorse.trainer.preparation import PreparedRun, offer_candidates, prepare_run
from packhorse.trainer.recipe_files import make_recipe
from packhorse.trainer.run_data import model_inputs
from packhorse.units import GIB

WORDS = [f"w{index}" for index in range(60)]
_OFFERED: dict[str, Candidates] = {}
ALL_ON_DISK = {
    "parameters": "disk", "gradients": "disk", "optimizer": "disk", "recompute": "all",
    "chunk_bytes": "64KiB",
}  # fmt: skip
ALL_IN_MEMORY = {
    "parameters": "device", "gradients": "device", "optimizer": "device", "recompute": "none",
}  # fmt: skip


def write_model(folder: Path, **changes: object) -> Path:
    """Write a random Llama with a tied head, and a tokenizer of words."""
    options: dict[str, object] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**{**options, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {w: i + 3 for i, w in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def write_rows(path: Path, num_rows: int, *, first: int = 0) -> Path:
    """Write rows of different lengths with words that follow a rule, so that there is a pattern."""
    lines: list[str] = []
    for row in range(first, first + num_rows):
        words = [WORDS[(row * 7 + index * (1 + row % 3)) % 60] for index in range(6 + row % 11)]
        lines.append(json.dumps({"text": " ".join(words)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_machine(folder: Path, *, device_bytes: int = GIB) -> Machine:
    """A slow machine whose scratch folder lies in `folder`."""
    return Machine(
        name="tiny",
        source="hand",
        fingerprint="tiny",
        measured_at="2026-01-01T00:00:00+00:00",
        device="cpu",
        num_cores=1,
        num_threads=1,
        bf16_native=False,
        tiers=(
            Tier(name="device", total_bytes=GIB, budget_bytes=device_bytes),
            Tier(name="disk", total_bytes=GIB, budget_bytes=GIB, path=str(folder / "scratch")),
        ),
        links=(
            Link(source="device", target="disk", bytes_per_s=1e9, latency_ns=100_000),
            Link(source="disk", target="device", bytes_per_s=1e9, latency_ns=100_000),
        ),
        matmul=tuple(
            MatmulPoint(dtype=dtype, size=size, flops_per_s=1e10)
            for dtype in ("float32", "bfloat16")
            for size in (64, 1024)
        ),
        memory_bytes_per_s=1e10,
        updates=(UpdateRate(tier="device", parameters_per_s=1e8),),
        heap=Heap(map_cost=0.1, keep_slack=0.2),
    )


def prepare(folder: Path, machine: Machine, **changes: object) -> PreparedRun:
    """Prepare a run of the tiny model; makes model and data in `folder` when they are missing."""
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_rows(folder / "train.jsonl", 40)
        write_rows(folder / "eval.jsonl", 10, first=1000)
    content: dict[str, object] = {
        "model_name_or_path": str(folder / "model"),
        "train_data": str(folder / "train.jsonl"),
        "data_cache": str(folder / "cache"),
        "data_format": "text",
        "max_length": 16,
        "global_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "output_dir": str(folder / "run"),
        "save_steps": 3,
    }
    return prepare_run(make_recipe({**content, **changes}).recipe, machine)


def offer(prepared: PreparedRun, machine: Machine) -> Candidates:
    """Trace a prepared run without measuring; what was traced before is taken again.

    A trace depends on no weights, so all tests of a file may share it.
    """
    parts: list[object] = [
        prepared.source.config.read_text(),
        prepared.cut,
        prepared.compute_dtype,
        prepared.frozen,
        sorted(prepared.request.groups.items()),
        prepared.data.row_length,
        prepared.recipe.pins.loss_chunk_tokens,
        prepared.recipe.pins.attention,
        *prepared.example,
    ]
    key = repr(parts)
    if key not in _OFFERED:
        _OFFERED[key] = offer_candidates(prepared, machine, limit_s=0)
    return _OFFERED[key]


def plan_run(prepared: PreparedRun, machine: Machine, *, num_threads: int = 1) -> Plan:
    """Search a plan for a prepared run, without measuring."""
    offered = offer(prepared, machine)
    return find_plan(
        [
            Candidate(
                model=entry.traced.model,
                profile=entry.profile,
                loss_chunk_tokens=entry.loss_chunk_tokens,
            )
            for entry in offered.entries
        ],
        machine,
        optimizer=prepared.optimizer_plan,
        arithmetic=Arithmetic(
            compute_dtype=prepared.compute_dtype,
            tied_sum="per_microbatch",
            attention=offered.attention,
            num_threads=num_threads,
            device="cpu",
            num_workers=1,
        ),
        global_batch_rows=prepared.cut.global_rows,
        pins=prepared.recipe.pins,
    )


class PlainLoop:
    """The loop that everyone writes, with torch's own fused optimizer."""

    def __init__(self, module: nn.Module, prepared: PreparedRun, microbatch_rows: int) -> None:
        self.module = module.train()
        self.prepared = prepared
        self.rows = microbatch_rows
        self.losses: list[float] = []
        self.norms: list[float] = []
        recipe = prepared.recipe
        parameters = dict(module.named_parameters())
        groups = prepared.request.groups
        decays = [p for n, p in parameters.items() if groups[n] in ("decay", "all")]
        rest = [p for n, p in parameters.items() if groups[n] == "no_decay"]
        self.trained = list(parameters.values())
        options: list[dict[str, object]] = [
            {"params": decays, "weight_decay": recipe.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        options = [group for group in options if group["params"]]
        self.optimizer: torch.optim.Optimizer
        if recipe.optim == "sgd":
            self.optimizer = torch.optim.SGD(
                options, lr=recipe.learning_rate, momentum=recipe.sgd_momentum, fused=True
            )
        else:
            self.optimizer = torch.optim.AdamW(options, lr=recipe.learning_rate, fused=True)

    def run(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self._step(step)

    def _step(self, step: int) -> None:
        recipe, data = self.prepared.recipe, self.prepared.data
        batch = data.train.batch(step - 1)
        inputs: Mapping[str, Tensor] = model_inputs(batch)
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for index, first in enumerate(range(0, data.train.global_batch_size, self.rows)):
            part = {name: tensor[first : first + self.rows] for name, tensor in inputs.items()}
            items = torch.tensor(float(batch.num_items))
            loss = self.module(**part, num_items_in_batch=items, use_cache=False).loss
            loss.backward()
            total = loss.detach() if index == 0 else total + loss.detach()
        norm = global_norm(parameter.grad for parameter in self.trained)
        self.norms.append(float(norm))
        if recipe.max_grad_norm is not None:
            coefficient = clip_coefficient(norm, recipe.max_grad_norm)
            for parameter in self.trained:
                assert parameter.grad is not None
                parameter.grad.mul_(coefficient)
        rate = learning_rate_at(
            step - 1,
            base=recipe.learning_rate,
            kind=recipe.lr_scheduler_type,
            warmup_steps=recipe.warmup_steps,
            total_steps=data.num_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.losses.append(float(total))
