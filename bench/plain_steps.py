"""Plain PyTorch steps in a process that tells how long each took and how large it became.

    python -m bench.plain_steps MEMORY.json '{"model": FOLDER, "state": null, ...}'

In: a model folder, the shape of a step, the number of steps, threads, and a folder for the
optimizer's states or null. Out: one JSON document with the wall and CPU time of each step.
`from_pretrained`, eager mode, autograd, `torch.optim.AdamW(fused=True)`, no clipping. With a folder
the two moments of each parameter are files mapped into memory (`torch.from_file`), and the kernel
decides what of them stays in memory and when it is written.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from bench.memory_gauge import read_status_bytes, write_memory


def main() -> int:
    """Train, print the times, write the memory file."""
    report, text = sys.argv[1:]
    imports_bytes = read_status_bytes("VmRSS")
    specification = json.loads(text)
    torch.set_num_threads(specification["num_threads"])
    steps = time_steps(specification)
    sys.stdout.write(json.dumps({"steps": steps}) + "\n")
    write_memory(Path(report), imports_bytes=imports_bytes)
    return 0


def time_steps(specification: Mapping[str, Any]) -> list[Mapping[str, int]]:
    """Give the wall and CPU time of every step in ns."""
    model = AutoModelForCausalLM.from_pretrained(specification["model"], dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=specification["learning_rate"], weight_decay=0.0, fused=True
    )
    if specification["state"] is not None:
        map_states(model, optimizer, Path(specification["state"]))
    generator = torch.Generator().manual_seed(0)
    shape = (specification["rows"], specification["length"])
    taken: list[Mapping[str, int]] = []
    for _ in range(specification["num_steps"]):
        tokens = torch.randint(0, specification["vocabulary"], shape, generator=generator)
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        taken.append(
            {
                "cpu_ns": time.process_time_ns() - cpu_ns,
                "wall_ns": time.perf_counter_ns() - wall_ns,
            }
        )
    return taken


def map_states(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Put zero moments into files that are mapped into memory."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, parameter in enumerate(model.parameters()):
        state = {"step": torch.tensor(0.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            file = str(folder / f"{name}-{index}")
            flat = torch.from_file(file, shared=True, size=parameter.numel(), dtype=torch.float32)
            state[name] = flat.view(parameter.shape)
        optimizer.state[parameter] = state


if __name__ == "__main__":
    sys.exit(main())
