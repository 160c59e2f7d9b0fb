"""The plain PyTorch loop in a process that tells how large it became.

    python -m bench.plain_loop MEMORY.json '{"model": FOLDER, "batches": FILE, ...}'

In: a model folder, batches made beforehand, a learning rate and clipping. Out: the loss of each
step, as one JSON document. `from_pretrained`, eager mode, autograd, `torch.optim.AdamW` with
`fused=True`; only the norm for clipping is the project's own, because a float32 norm depends on
how it is cut.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.memory_gauge import read_status_bytes, write_memory
from packhorse.optim.norm import clip_coefficient, global_norm


def main() -> int:
    """Train, print the losses, write the memory file."""
    report, text = sys.argv[1:]
    imports_bytes = read_status_bytes("VmRSS")
    specification = json.loads(text)
    batches = json.loads(Path(specification["batches"]).read_text(encoding="utf-8"))
    torch.set_num_threads(specification["num_threads"])
    losses = train_plainly(specification, batches)
    sys.stdout.write(json.dumps({"losses": losses}) + "\n")
    write_memory(Path(report), imports_bytes=imports_bytes)
    return 0


def train_plainly(
    specification: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Give the loss of every step."""
    model = AutoModelForCausalLM.from_pretrained(specification["model"], dtype=torch.float32)
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=specification["learning_rate"], weight_decay=0.0, fused=True
    )
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(
            input_ids=torch.tensor(batch["input_ids"]),
            labels=torch.tensor(batch["labels"]),
            num_items_in_batch=torch.tensor(float(batch["num_items"])),
            use_cache=False,
        ).loss
        loss.backward()
        norm = global_norm([parameter.grad for parameter in parameters])
        coefficient = clip_coefficient(norm, specification["max_grad_norm"])
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    sys.exit(main())
