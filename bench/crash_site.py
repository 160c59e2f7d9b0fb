"""A place to crash in: what runs are made of, moments to kill them at, and what they leave.

In: a folder. Out: runs of `packhorse train` in processes of their own, moments to kill them at, and
their endings: curve, weights, state.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.report import Bench
from packhorse.machine.files import write_machine
from packhorse.machine.spec import Heap, Link, Machine, MatmulPoint, Tier, UpdateRate
from packhorse.storage.kept_state import find_kept
from packhorse.units import GIB

Place = Literal["memory", "disk"]
NUM_STEPS: Final = 24
KEEP_STEPS: Final[Mapping[Place, int]] = {"memory": 4, "disk": 1}
SAVE_STEPS: Final = 3
STOPPED: Final = 75
# What must be the same; rates and times are not.
CURVE: Final = ("step", "epoch", "loss", "eval_loss", "grad_norm", "learning_rate")
_NUM_WORDS: Final = 500
_RUN_LIMIT_S: Final = 600.0
_POLL_S: Final = 0.002
PINS: Final[Mapping[Place, Mapping[str, str]]] = {
    "memory": {
        "parameters": "device",
        "gradients": "device",
        "optimizer": "device",
        "recompute": "none",
        "durable": "off",
    },
    "disk": {
        "parameters": "disk",
        "gradients": "disk",
        "optimizer": "disk",
        "recompute": "all",
        "chunk_bytes": "256KiB",
        "durable": "off",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByProgress:
    """A moment by the share of the steps that are still to come.

    The whole part of `share * steps` is waited for, the rest is a part of a step's time.
    """

    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ByBytes:
    """A moment when a share of what is saved is on the disk; `step` None is the final model."""

    step: int | None
    share: float


Moment = ByProgress | ByBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a finished run left: its curve, and digests of its weights and optimizer state."""

    curve: tuple[tuple[object, ...], ...]
    weights: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A run that nothing interrupted."""

    folder: Path
    ending: Ending
    training_s: float
    saved_bytes: int
    model_bytes: int


class Site:
    """A folder with model, data, recipe and machine, and the runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _write_model(folder / "model")
        _write_rows(folder / "train.jsonl", 64, first=0)
        _write_rows(folder / "eval.jsonl", 6, first=5000)
        write_machine(_describe_machine(folder / "scratch"), folder / "machine.json")
        for place, pins in PINS.items():
            recipe = {**_recipe(folder), "plan": dict(pins)}
            (folder / f"{place}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")

    def start(
        self,
        run: Path,
        place: Place,
        *,
        resume: bool,
        plan: Path | None = None,
        settings: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start `packhorse train` in a process group of its own; its output goes to a log."""
        command = [sys.executable, "-m", "packhorse", "train", str(self.folder / f"{place}.yaml")]
        command += ["--machine", str(self.folder / "machine.json")]
        command += ["--set", f"output_dir={run}"]
        command += ["--resume"] if resume else []
        command += ["--plan", str(plan)] if plan is not None else []
        command += [word for setting in settings for word in ("--set", setting)]
        with run.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def keep(place: Place) -> tuple[str, ...]:
    """Settings with which a run keeps steps, and saves nothing before the end."""
    return f"plan.durable={KEEP_STEPS[place]}", f"save_steps={NUM_STEPS}"


def kept_step(site: Site) -> int:
    """The step that the scratch folder keeps, 0 for none."""
    kept, _ = find_kept(site.folder / "scratch")
    return kept[0].entry.step if kept else 0


def kill_at(
    process: subprocess.Popen[bytes],
    run: Path,
    moment: Moment,
    reference: Reference,
    *,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    """Send a signal to the process group at a moment, and wait for its end."""
    begun = last_step(run)
    match moment:
        case ByProgress(share=share):
            whole, part = divmod(share * (NUM_STEPS - begun), 1)
            wait_for(process, lambda: last_step(run) >= begun + max(1, whole))
            until_s = time.monotonic() + part * reference.training_s / NUM_STEPS
            wait_for(process, lambda: time.monotonic() >= until_s)
        case ByBytes(step=step, share=share):
            name = "model" if step is None else f"checkpoint-{step}"
            whole = reference.model_bytes if step is None else reference.saved_bytes
            wait_for(
                process,
                lambda: (
                    (step is not None and (run / name).is_dir())
                    or stored_bytes(run.glob(f"{name}.tmp-*")) >= max(1, share * whole)
                ),
            )
    if process.poll() is None:
        os.killpg(process.pid, number)
    wait_for(process, lambda: False)


def wait_for(process: subprocess.Popen[bytes], has_come: Callable[[], bool]) -> float:
    """Wait until something is so, or the process has ended; give the time."""
    limit_s = time.monotonic() + _RUN_LIMIT_S
    while process.poll() is None and not has_come():
        if time.monotonic() > limit_s:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"a run took more than {_RUN_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
    return time.monotonic()


def has_begun(run: Path) -> bool:
    """Whether a run has loaded its states."""
    return (run / "metrics.jsonl").is_file()


def is_saving(run: Path) -> bool:
    """Whether a checkpoint or the model is being written."""
    return any(run.glob("*.tmp-*"))


def saved_steps(run: Path) -> list[int]:
    """Steps of the checkpoints."""
    return [
        int(path.name.removeprefix("checkpoint-"))
        for path in run.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal()
    ]


def last_step(run: Path) -> int:
    """The last step that a run has finished, 0 for none."""
    return max((int(str(line["step"])) for line in _read_lines(run) if "loss" in line), default=0)


def _read_lines(run: Path) -> list[dict[str, object]]:
    path = run / "metrics.jsonl"
    lines: list[dict[str, object]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break  # a line that is being written, or that a kill cut short
    return lines


def read_ending(run: Path) -> Ending:
    """Read what a finished run left."""
    last = run / f"checkpoint-{NUM_STEPS}"
    return Ending(
        curve=tuple(tuple(line.get(key) for key in CURVE) for line in _read_lines(run)),
        weights=_digest([run / "model.safetensors", last / "model.safetensors"]),
        state=_digest(sorted(last.rglob("*optim*"))),
    )


def is_same(bench: Bench, run: Path, reference: Reference) -> bool:
    """Whether a run ended as the one that nothing interrupted; says what differs."""
    found, wanted = read_ending(run), reference.ending
    for name in ("curve", "weights", "state"):
        if getattr(found, name) != getattr(wanted, name):
            bench.say(f"{run.name}: another {name} than the uninterrupted run's")
    return found == wanted


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in (path for path in paths if path.is_file()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stored_bytes(paths: Iterable[Path]) -> int:
    """Bytes that files and the files of folders occupy; what vanishes meanwhile counts nothing."""
    total = 0
    for path in paths:
        try:
            for each in [path] if path.is_file() else list(path.rglob("*")):
                total += each.stat().st_blocks * 512
        except OSError:
            continue
    return total


def explain(run: Path, code: int) -> str:
    """The end of the log of a run that failed."""
    lines = run.with_suffix(".log").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"{run.name} ended with exit code {code}:", *lines[-15:]])


def _recipe(folder: Path) -> dict[str, object]:
    return {
        "model_name_or_path": str(folder / "model"),
        "train_data": [str(folder / "train.jsonl")],
        "eval_data": [str(folder / "eval.jsonl")],
        "data_cache": str(folder / "cache"),
        "data_format": "text",
        "max_length": 32,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "eval_steps": 5,
    }


def _write_model(folder: Path) -> None:
    """A random Llama with a tied head and dropout, and a tokenizer of words."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder.mkdir(parents=True)
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    vocabulary |= {f"w{word}": word + len(vocabulary) for word in range(_NUM_WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)


def _write_rows(path: Path, count: int, *, first: int) -> None:
    draw = random.Random(first)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            words = [f"w{draw.randrange(_NUM_WORDS)}" for _ in range(draw.randrange(8, 40))]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def _describe_machine(scratch: Path) -> Machine:
    """A machine by hand: nothing is measured, so that a run starts quickly."""
    return Machine(
        name="by hand",
        source="hand",
        fingerprint="by-hand",
        measured_at="2026-01-01T00:00:00+00:00",
        device="cpu",
        num_cores=1,
        num_threads=1,
        bf16_native=False,
        tiers=(
            Tier(name="device", total_bytes=GIB, budget_bytes=GIB),
            Tier(name="disk", total_bytes=GIB, budget_bytes=GIB, path=str(scratch)),
        ),
        links=(
            Link(source="device", target="disk", bytes_per_s=1e9, latency_ns=100_000),
            Link(source="disk", target="device", bytes_per_s=1e9, latency_ns=100_000),
        ),
        matmul=(MatmulPoint(dtype="float32", size=1024, flops_per_s=2e10),),
        memory_bytes_per_s=1e10,
        updates=(UpdateRate(tier="device", parameters_per_s=1e8),),
        heap=Heap(map_cost=0.1, keep_slack=0.2),
    )
