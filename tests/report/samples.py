"""A small step and a plan with a prediction, the same in all tests of reports."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from packhorse.machine.spec import Heap, Link, Machine, Tier
from packhorse.plan.spec import BlockPlan, Choice, Prediction
from packhorse.program.buffers import PoolId
from packhorse.timeline.spec import MemoryPoint, Span, Timeline
from tests.support.models import make_model, make_plan

DEVICE, DISK = PoolId("device"), PoolId("disk")
MIB = 1 << 20
CAPACITIES = {DEVICE: 64 * MIB, DISK: 1 << 40}
MACHINE = Machine(
    name="two-core desk",
    source="hand",
    fingerprint="",
    measured_at="",
    device="cpu",
    num_cores=2,
    num_threads=2,
    bf16_native=False,
    tiers=(
        Tier(
            name="disk",
            total_bytes=1 << 40,
            budget_bytes=1 << 40,
            path="scratch",
            endurance_bytes=600 * 10**12,
        ),
    ),
    links=(Link(source="device", target="disk", bytes_per_s=1e9, latency_ns=0),),
    matmul=(),
    memory_bytes_per_s=1e10,
    updates=(),
    heap=Heap(map_cost=0.0, keep_slack=0.0),
)


def make_step(*, num_blocks=4, source="simulated", slowness=1):
    """A step of a model whose chunks lie on disk; every chunk is 8 MiB."""
    spans: list[Span] = []
    points = [MemoryPoint(at_ns=0, used_bytes=0)]
    free_at = {"compute": 0, "disk_read": 0, "disk_write": 0}

    def add(name, kind, lane, after_ns, duration_ns, change):
        start_ns = max(free_at[lane], after_ns)
        end_ns = free_at[lane] = start_ns + duration_ns * slowness
        index = len(spans)
        spans.append(
            Span(index=index, name=name, kind=kind, lane=lane, start_ns=start_ns, end_ns=end_ns)
        )
        at_ns = start_ns if change > 0 else end_ns
        changes.append((at_ns, change * MIB))
        return end_ns

    changes: list[tuple[int, int]] = []
    for block in range(num_blocks):
        read = f"copy param/{block} disk -> device"
        ready = add(read, "disk_read", "disk_read", 0, 9_000_000, 8)
        add(f"forward {block}@0", "forward", "compute", ready, 21_000_000, 2)
    for block in reversed(range(num_blocks)):
        add(f"recompute {block}@0", "recompute", "compute", 0, 20_000_000, 4)
        done = add(f"backward {block}@0", "backward", "compute", 0, 43_000_000, -6)
        done = add(f"norm {block}", "norm", "compute", done, 1_500_000, 1)
        done = add(f"update {block}", "update", "compute", done, 7_000_000, -1)
        write = f"copy param/{block} device -> disk"
        done = add(write, "disk_write", "disk_write", done, 12_000_000, 0)
        add(f"free param/{block} device", "free", "compute", done, 10_000, -8)
    used = 0
    for at_ns, change in sorted(changes):
        used += change
        points.append(MemoryPoint(at_ns=at_ns, used_bytes=used))
    return Timeline(
        source=source,
        rank=0,
        spans=tuple(spans),
        memory={DEVICE: tuple(points), DISK: (MemoryPoint(at_ns=0, used_bytes=96 * MIB),)},
    )


def make_predicted_plan():
    """A plan with reasons and a prediction."""
    plan = make_plan(
        make_model(num_layers=6),
        parameters="disk",
        optimizer="disk",
        num_microbatches=4,
        heap="map",
        budget_bytes={"device": 128 * MIB, "disk": 1 << 40},
    )
    kept = Choice(value="keep", because="nothing is gained by recomputing it")
    again = Choice(value="recompute", because="keeping it needs 412 MiB more than there is")
    return replace(
        plan,
        model_name="small-llama",
        machine="two-core desk",
        blocks=tuple(
            BlockPlan(name=block.name, activations=kept if at in (0, 7) else again)
            for at, block in enumerate(plan.blocks)
        ),
        heap=Choice(value="map", because="a kept heap would need 15 % more memory"),
        pins=("heap",),
        prediction=Prediction(
            step_ns=4_312_345_678,
            peak_bytes={
                "device": {
                    "parameters": 40 * MIB,
                    "gradients": 35 * MIB,
                    "optimizer": 0,
                    "activations": 20 * MIB,
                    "logits": 16 * MIB,
                    "workspace": 9 * MIB,
                    "base": 2 * MIB,
                },
                "disk": {"parameters": 540 * MIB, "optimizer": 1080 * MIB},
            },
            time_ns={
                "forward": 900_000_000,
                "backward": 1_900_000_000,
                "recompute": 640_000_000,
                "update": 310_000_000,
                "norm": 54_000_000,
                "disk_read": 400_000_000,
                "disk_write": 300_000_000,
            },
            lane_ns={"compute": 3_804_000_000, "disk": 700_000_000},
            disk_read_bytes=1620 * MIB,
            disk_written_bytes=1620 * MIB,
            scratch_bytes=1640 * MIB,
            bottleneck="compute: busy 88.2 % of the step",
        ),
    )


def render(renderable, *, width=80, encoding="utf-8"):
    """What a pipe would get, without trailing blanks."""
    data = io.BytesIO()
    file = io.TextIOWrapper(data, encoding=encoding, write_through=True)
    console = Console(file=file, width=width, color_system=None, _environ={})
    console.print(renderable)
    lines = data.getvalue().decode(encoding).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
