"""DeepSpeed ZeRO-3 with all optimizer state on disk, on a CPU, in DeepSpeed's own environment.

    python -m bench.peer_outofcore '{"model": FOLDER, "state": FOLDER, ...}'

In: what `bench.plain_steps` takes; `state` is the folder for DeepSpeed's files. Out: one JSON
document with the wall and CPU time of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time

# Read when they are imported: without the first DeepSpeed looks for other devices; one process.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29713")

import deepspeed  # pyright: ignore[reportMissingImports]  # only in the peer's environment
import torch
from transformers import AutoModelForCausalLM


def main() -> int:
    """Train and print the times."""
    specification = json.loads(sys.argv[1])
    torch.set_num_threads(specification["num_threads"])
    deepspeed.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(specification["model"], dtype=torch.float32)
    model.train()
    offload = {"device": "nvme", "nvme_path": specification["state"], "buffer_count": 4}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_batch_size": specification["rows"],
            "optimizer": {"type": "AdamW", "params": {"lr": specification["learning_rate"]}},
            "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        },
    )
    generator = torch.Generator().manual_seed(0)
    shape = (specification["rows"], specification["length"])
    steps = []
    for _ in range(specification["num_steps"]):
        tokens = torch.randint(0, specification["vocabulary"], shape, generator=generator)
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
        steps.append(
            {
                "cpu_ns": time.process_time_ns() - cpu_ns,
                "wall_ns": time.perf_counter_ns() - wall_ns,
            }
        )
    answer = {"version": deepspeed.__version__, "steps": steps}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
