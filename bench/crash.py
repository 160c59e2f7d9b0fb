"""Crashes: SIGKILL at random moments of training and saving, then `--resume`, bit for bit.

A tiny Llama is trained by `packhorse train` in processes of their own. A run that nothing
interrupts gives the curve and the weights. Then run after run is killed from outside, its whole
process group at once, at seeded random moments: half of them spread over the steps, each somewhere
between a step and the next, half when a checkpoint or the model has a random share of its bytes on
the disk. Each is resumed, some are killed again first, and must end with the same lines in
`metrics.jsonl`, the same weights and the same optimizer state. Runs alternate between a plan with
everything in memory and one with everything on disk. Further runs are resumed under the other
plan, and stopped by SIGTERM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.report import Bench, at_most, exactly, run_bench, shown
from packhorse.machine.files import write_machine
from packhorse.machine.spec import Heap, Link, Machine, MatmulPoint, Tier, UpdateRate
from packhorse.units import GIB, format_ns

NUM_KILLS: Final = 20
NUM_QUICK_KILLS: Final = 4
NUM_STEPS: Final = 24
SAVE_STEPS: Final = 3
SEED: Final = 20
STOPPED: Final = 75
# What must be the same; rates and times are not.
CURVE: Final = ("step", "epoch", "loss", "eval_loss", "grad_norm", "learning_rate")
_NUM_WORDS: Final = 500
_RUN_LIMIT_S: Final = 600.0
_POLL_S: Final = 0.002

Place = Literal["memory", "disk"]
PINS: Final[Mapping[Place, Mapping[str, str]]] = {
    "memory": {
        "parameters": "device",
        "gradients": "device",
        "optimizer": "device",
        "recompute": "none",
    },
    "disk": {
        "parameters": "disk",
        "gradients": "disk",
        "optimizer": "disk",
        "recompute": "all",
        "chunk_bytes": "256KiB",
    },
}
OTHER: Final[Mapping[Place, Place]] = {"memory": "disk", "disk": "memory"}


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


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the trials came to."""

    resumed: int = 0
    same: int = 0
    trials: int = 0
    most_lost: int = 0
    during_saves: int = 0
    kills: list[str] = field(default_factory=list)


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
        self, run: Path, place: Place, *, resume: bool, plan: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `packhorse train` in a process group of its own; its output goes to a log."""
        command = [sys.executable, "-m", "packhorse", "train", str(self.folder / f"{place}.yaml")]
        command += ["--machine", str(self.folder / "machine.json")]
        command += ["--set", f"output_dir={run}"]
        command += ["--resume"] if resume else []
        command += ["--plan", str(plan)] if plan is not None else []
        with run.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def measure(bench: Bench) -> None:
    """Kill and resume; one table."""
    num_kills = bench.options.kills or (NUM_QUICK_KILLS if bench.quick else NUM_KILLS)
    draw = random.Random(bench.options.seed)
    with tempfile.TemporaryDirectory(prefix="packhorse-crash-") as scratch:
        site = Site(Path(scratch))
        references = {place: _run_through(bench, site, place) for place in PINS}
        same_plans = references["memory"].ending == references["disk"].ending
        tally = Tally()
        for index, moments in enumerate(draw_moments(draw, num_kills)):
            place: Place = "memory" if index % 2 else "disk"
            _kill_and_resume(bench, site, references[place], place, index, moments, tally)
        killed = len(tally.kills)
        bench.add(
            "Killed and resumed",
            [
                exactly("kills that struck", killed, num_kills),
                shown("of them while a checkpoint or the model was written", tally.during_saves),
                exactly("resumed and finished", tally.resumed, tally.trials),
                exactly("curve, weights, state with the same bits", tally.same, tally.trials),
                at_most("most steps lost by a kill", tally.most_lost, SAVE_STEPS),
                exactly("the two plans with the same bits", int(same_plans), 1),
            ],
        )
        others = [_change_plan(bench, site, references, place, draw) for place in PINS]
        stops = [_stop_and_resume(bench, site, references, place, draw) for place in PINS]
        left = [path.name for path in (site.folder / "scratch").glob("*")]
        bench.add(
            "Other ends",
            [
                exactly("killed, resumed under the other plan: same bits", sum(others), 2),
                exactly("SIGTERM: exit 75, resumed, same bits", sum(stops), 2),
                exactly("scratch files left", len(left), 0),
            ],
        )


def draw_moments(draw: random.Random, count: int) -> list[tuple[Moment, ...]]:
    """Draw the moments of each run: half in the steps, half in saves, some runs with one of each.

    A run that is killed twice is first killed in the first half of its steps.
    """
    num_bytes = count // 2
    early = list(range(SAVE_STEPS, NUM_STEPS // 2 + 1, SAVE_STEPS))
    saves: list[int | None] = [*range(SAVE_STEPS, NUM_STEPS + 1, SAVE_STEPS), None]
    num_steps = count - num_bytes
    steps = [ByProgress(share=(at + draw.random()) / num_steps) for at in range(num_steps)]
    draw.shuffle(steps)
    num_pairs = num_bytes // 2
    pairs: list[tuple[Moment, ...]] = [
        (ByBytes(step=draw.choice(early), share=draw.random()), step) for step in steps[:num_pairs]
    ]
    singles: list[tuple[Moment, ...]] = [(step,) for step in steps[num_pairs:]]
    singles += [
        (ByBytes(step=draw.choice(saves) if at else None, share=draw.random()),)
        for at in range(num_bytes - num_pairs)
    ]
    trials = pairs + singles
    draw.shuffle(trials)
    return trials


def _run_through(bench: Bench, site: Site, place: Place) -> Reference:
    run = site.folder / f"straight-{place}"
    process = site.start(run, place, resume=False)
    began_s = _wait_for(process, lambda: _has_begun(run))
    _wait_for(process, lambda: False)
    ended_s = time.monotonic()
    if process.returncode:
        raise SystemExit(_explain(run, process.returncode))
    bench.say(f"{place}: a run of {NUM_STEPS} steps took {format_ns((ended_s - began_s) * 1e9)}")
    last = run / f"checkpoint-{NUM_STEPS}"
    return Reference(
        folder=run,
        ending=_read_ending(run),
        training_s=ended_s - began_s,
        saved_bytes=_stored_bytes([last]),
        model_bytes=_stored_bytes([run / "model.safetensors"]),
    )


def _kill_and_resume(
    bench: Bench,
    site: Site,
    reference: Reference,
    place: Place,
    index: int,
    moments: Sequence[Moment],
    tally: Tally,
) -> None:
    run = site.folder / f"killed-{index}"
    for number, moment in enumerate(moments):
        process = site.start(run, place, resume=number > 0)
        _kill_at(process, run, moment, reference)
        if process.returncode == -signal.SIGKILL:
            steps, saving = _last_step(run), _is_saving(run)
            tally.during_saves += saving
            tally.kills.append(f"{place} {moment}")
            newest = max((s for s in _saved_steps(run)), default=0)
            tally.most_lost = max(tally.most_lost, steps - newest)
            bench.say(
                f"{place}: killed after step {steps}{', while saving' if saving else ''};"
                f" newest checkpoint {newest or 'none'}"
            )
        else:
            bench.say(f"{place}: {moment} came too late, exit {process.returncode}")
    tally.trials += 1
    code = _finish(site, run, place)
    tally.resumed += code == 0
    if code:
        bench.say(_explain(run, code))
        return
    tally.same += _is_same(bench, run, reference)


def _change_plan(
    bench: Bench,
    site: Site,
    references: Mapping[Place, Reference],
    place: Place,
    draw: random.Random,
) -> bool:
    run = site.folder / f"changed-{place}"
    process = site.start(run, place, resume=False)
    _kill_at(process, run, ByProgress(share=draw.uniform(0.3, 0.8)), references[place])
    other = OTHER[place]
    bench.say(f"{place}: killed after step {_last_step(run)}, resumed under the plan for {other}")
    code = _finish(site, run, place, plan=references[other].folder / "plan.json")
    if code:
        bench.say(_explain(run, code))
        return False
    return _is_same(bench, run, references[place])


def _stop_and_resume(
    bench: Bench,
    site: Site,
    references: Mapping[Place, Reference],
    place: Place,
    draw: random.Random,
) -> bool:
    run = site.folder / f"stopped-{place}"
    process = site.start(run, place, resume=False)
    share = draw.uniform(0.1, 0.6)
    _kill_at(process, run, ByProgress(share=share), references[place], number=signal.SIGTERM)
    bench.say(f"{place}: SIGTERM after step {_last_step(run)}, exit {process.returncode}")
    stopped = process.returncode == STOPPED and max(_saved_steps(run)) == _last_step(run)
    code = _finish(site, run, place)
    if code:
        bench.say(_explain(run, code))
        return False
    return stopped and _is_same(bench, run, references[place])


def _finish(site: Site, run: Path, place: Place, *, plan: Path | None = None) -> int:
    process = site.start(run, place, resume=True, plan=plan)
    _wait_for(process, lambda: False)
    return int(process.returncode)


def _kill_at(
    process: subprocess.Popen[bytes],
    run: Path,
    moment: Moment,
    reference: Reference,
    *,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    """Send a signal to the process group at a moment, and wait for its end."""
    begun = _last_step(run)
    match moment:
        case ByProgress(share=share):
            whole, part = divmod(share * (NUM_STEPS - begun), 1)
            _wait_for(process, lambda: _last_step(run) >= begun + max(1, whole))
            until_s = time.monotonic() + part * reference.training_s / NUM_STEPS
            _wait_for(process, lambda: time.monotonic() >= until_s)
        case ByBytes(step=step, share=share):
            name = "model" if step is None else f"checkpoint-{step}"
            whole = reference.model_bytes if step is None else reference.saved_bytes
            _wait_for(
                process,
                lambda: (
                    (step is not None and (run / name).is_dir())
                    or _stored_bytes(run.glob(f"{name}.tmp-*")) >= max(1, share * whole)
                ),
            )
    if process.poll() is None:
        os.killpg(process.pid, number)
    _wait_for(process, lambda: False)


def _wait_for(process: subprocess.Popen[bytes], has_come: Callable[[], bool]) -> float:
    """Wait until something is so, or the process has ended; give the time."""
    limit_s = time.monotonic() + _RUN_LIMIT_S
    while process.poll() is None and not has_come():
        if time.monotonic() > limit_s:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"a run took more than {_RUN_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
    return time.monotonic()


def _has_begun(run: Path) -> bool:
    return (run / "metrics.jsonl").is_file()


def _is_saving(run: Path) -> bool:
    return any(run.glob("*.tmp-*"))


def _saved_steps(run: Path) -> list[int]:
    return [
        int(path.name.removeprefix("checkpoint-"))
        for path in run.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal()
    ]


def _last_step(run: Path) -> int:
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


def _read_ending(run: Path) -> Ending:
    last = run / f"checkpoint-{NUM_STEPS}"
    return Ending(
        curve=tuple(tuple(line.get(key) for key in CURVE) for line in _read_lines(run)),
        weights=_digest([run / "model.safetensors", last / "model.safetensors"]),
        state=_digest(sorted(last.rglob("*optim*"))),
    )


def _is_same(bench: Bench, run: Path, reference: Reference) -> bool:
    found, wanted = _read_ending(run), reference.ending
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


def _stored_bytes(paths: Iterable[Path]) -> int:
    """Bytes that files and the files of folders occupy; what vanishes meanwhile counts nothing."""
    total = 0
    for path in paths:
        try:
            for each in [path] if path.is_file() else list(path.rglob("*")):
                total += each.stat().st_blocks * 512
        except OSError:
            continue
    return total


def _explain(run: Path, code: int) -> str:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own options."""
    parser.add_argument("--kills", type=int, help="how many times a run is killed")
    parser.add_argument("--seed", type=int, default=SEED, help="of the moments")


if __name__ == "__main__":
    sys.exit(run_bench("crash", __doc__.splitlines()[0], measure, add_arguments=add_arguments))
