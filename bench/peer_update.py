"""DeepSpeed's CPU Adam against torch's fused AdamW, in DeepSpeed's own environment.

    python -m bench.peer_update '{"shapes": [[8, 8]], "num_turns": 3, "num_threads": 1}'

In: shapes of parameters. Out: one JSON document with a (CPU, wall, CPU, wall) quadruple in ns for
each pair of turns, the fused one's first, as `bench.update` takes them.
"""

from __future__ import annotations

import json
import os
import sys

# Read when it is imported: without it DeepSpeed looks for other devices first.
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # pyright: ignore[reportMissingImports]  # only in the peer's environment
import torch
from deepspeed.ops.adam import (  # pyright: ignore[reportMissingImports]  # as above
    DeepSpeedCPUAdam,
)

from bench.turns import take_turns

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


def main() -> int:
    """Take turns and print what they took."""
    specification = json.loads(sys.argv[1])
    torch.set_num_threads(specification["num_threads"])
    torch.manual_seed(0)
    sides = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in specification["shapes"]]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).mul_(1e-3)
        sides.append(parameters)
    theirs, ours = sides
    options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    fused = torch.optim.AdamW(theirs, fused=True, **options)
    peer = DeepSpeedCPUAdam(ours, adamw_mode=True, **options)
    pairs = take_turns(lambda _: fused.step(), lambda _: peer.step(), specification["num_turns"])
    quadruples = [(t.cpu_ns, t.wall_ns, o.cpu_ns, o.wall_ns) for t, o in pairs]
    sys.stdout.write(
        "\n" + json.dumps({"version": deepspeed.__version__, "pairs": quadruples}) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
