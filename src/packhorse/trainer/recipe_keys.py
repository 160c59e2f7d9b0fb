"""Keys of other tools: what they are called here, and what the plan decides instead.

In: the mapping that a person wrote. Out: the same in Packhorse's keys, warnings for what was
renamed, and a `BadKey` for each key that is unknown or decided by the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class BadKey:
    """A key that cannot be used, and what to do about it."""

    key: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Keys as Packhorse has them, warnings in words, and what cannot be used."""

    values: Mapping[str, object]
    warnings: tuple[str, ...]
    bad: tuple[BadKey, ...]


RENAMED: Final[Mapping[str, str]] = {
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "base_model": "model_name_or_path",
    "tokenizer_name": "tokenizer_name_or_path",
    "train_file": "train_data",
    "validation_file": "eval_data",
    "eval_file": "eval_data",
    "val_set_size": "eval_split",
    "max_seq_length": "max_length",
    "block_size": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "sample_packing": "packing",
    "completion_only_loss": "assistant_only_loss",
    "train_batch_size": "global_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps",
    "optimizer": "optim",
    "gradient_clipping": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "evaluation_steps": "eval_steps",
    "data_seed": "seed",
}

_RECOMPUTE: Final = "plan: {recompute: all}"
_TIERS: Final = "budget, or plan: {parameters: disk, gradients: disk, optimizer: disk}"
_ROWS: Final = "plan: {microbatch_rows: 4}"
DECIDED: Final[Mapping[str, str]] = {
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "activation_checkpointing": _RECOMPUTE,
    "activation_offloading": "plan: {activations: offload}",
    "deepspeed": _TIERS,
    "fsdp": _TIERS,
    "fsdp_config": _TIERS,
    "fsdp_min_num_params": _TIERS,
    "device_map": _TIERS,
    "max_memory": _TIERS,
    "cpu_offload": _TIERS,
    "offload_optimizer": _TIERS,
    "offload_param": _TIERS,
    "auto_find_batch_size": _ROWS,
    "per_device_eval_batch_size": _ROWS,
    "per_gpu_eval_batch_size": _ROWS,
    "eval_batch_size": _ROWS,
    "use_liger_kernel": "plan: {loss_chunk_tokens: 1024}",
    "attn_implementation": "plan: {attention: causal}",
    "torch_dtype": "bf16: true, or plan: {compute_dtype: bfloat16}",
    "dtype": "bf16: true, or plan: {compute_dtype: bfloat16}",
    "eval_accumulation_steps": _ROWS,
}

_STRATEGIES: Final[Mapping[str, str]] = {
    "eval_strategy": "eval_steps",
    "evaluation_strategy": "eval_steps",
    "save_strategy": "save_steps",
}
_ADAMW_NAMES: Final = ("adamw", "adamw_torch", "adamw_hf", "AdamW")


def translate_keys(content: Mapping[str, object], known: Iterable[str]) -> Translation:
    """Put a recipe's top-level keys into Packhorse's words."""
    names = tuple(known)
    values: dict[str, object] = {}
    warnings: list[str] = []
    bad: list[BadKey] = []
    for key, value in content.items():
        if key in names:
            values[key] = value
        elif key in DECIDED:
            bad.append(
                BadKey(
                    key=key,
                    what="the plan decides this",
                    fix=f"remove it; to fix the choice yourself: {DECIDED[key]}",
                )
            )
        elif key in _STRATEGIES:
            _translate_strategy(key, value, content, values, warnings, bad)
        elif key in RENAMED:
            target = RENAMED[key]
            others = [other for other in _names_of(target, content) if other != key]
            if others:
                bad.append(
                    BadKey(
                        key=key,
                        what=f"it is called {target} here, and {others[0]} gives that as well",
                        fix=f"keep {target} alone",
                    )
                )
                continue
            values[target] = value
            warnings.append(f"{key} is called {target} here")
        else:
            bad.append(_unknown(key, names))
    for rewrite in (_rewrite_optimizer, _rewrite_max_steps):
        rewrite(values, warnings)
    return Translation(values=values, warnings=tuple(warnings), bad=tuple(bad))


def nearest_key(key: str, names: Iterable[str]) -> str | None:
    """Find the known key that is most like a mistyped one."""
    near = get_close_matches(key.lower(), tuple(names), n=1, cutoff=0.6)
    return near[0] if near else None


def _unknown(key: str, names: tuple[str, ...]) -> BadKey:
    candidates = (*names, *RENAMED, *DECIDED)
    near = nearest_key(key, candidates)
    if near is None:
        fix = "remove it; `packhorse schema` lists all keys"
    else:
        fix = f"did you mean {RENAMED.get(near, near)}?"
    return BadKey(key=key, what="there is no such key", fix=fix)


def _names_of(target: str, content: Mapping[str, object]) -> list[str]:
    """List the names, its own and those of other tools, under which a recipe gives a key."""
    return [key for key in content if RENAMED.get(key, key) == target]


def _translate_strategy(
    key: str,
    value: object,
    content: Mapping[str, object],
    values: dict[str, object],
    warnings: list[str],
    bad: list[BadKey],
) -> None:
    target = _STRATEGIES[key]
    if value in ("no", False):
        # YAML reads a bare `no` as false.
        given = [name for name in _names_of(target, content) if content[name] is not None]
        if given:
            bad.append(
                BadKey(
                    key=key,
                    what=f"no contradicts {given[0]}: {content[given[0]]}",
                    fix="keep one of them",
                )
            )
            return
        values[target] = None
        warnings.append(f"{key}: no is written {target}: null here")
    elif value == "steps":
        warnings.append(f"{key}: steps is how it always is; {target} says how many")
    else:
        bad.append(
            BadKey(
                key=key,
                what=f"{value!r} is not offered",
                fix=f"give {target}, in optimizer steps, or null",
            )
        )


def _rewrite_optimizer(values: dict[str, object], warnings: list[str]) -> None:
    if values.get("optim") in _ADAMW_NAMES:
        warnings.append(f"optim: {values['optim']} is computed as adamw_torch_fused")
        values["optim"] = "adamw_torch_fused"


def _rewrite_max_steps(values: dict[str, object], warnings: list[str]) -> None:
    if values.get("max_steps") == -1:
        warnings.append("max_steps: -1 is written by leaving the key out here")
        del values["max_steps"]
