"""Measures what the processor and its memory do: products, copies, fused AdamW, pinned transfers.

In: a device and what memory may be used for it. Out: rates. Every figure is the median of several
runs after one that does not count; a size whose run would take longer than its cap is left out.
Single-threaded or not is the caller's choice (`torch.set_num_threads`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final, cast

import torch

from packhorse.machine.spec import Link, MatmulPoint, TierName
from packhorse.units import MIB

_MIN_RUNS: Final = 3
_MAX_RUNS: Final = 50
_POINT_NS: Final = 150_000_000
_CAP_NS: Final = 500_000_000
_CPU_SIZES: Final = (128, 256, 512, 1024, 2048)
_GPU_SIZES: Final = (256, 1024, 2048, 4096, 8192)
_COPY_BYTES: Final = 128 * MIB
# Half a GiB of states: those of a run are in no cache either.
_UPDATE_PARAMETERS: Final = 32 * 1024**2
_PARAMETER_BYTES: Final = 16  # value, gradient and two moments in fp32


def measure_matmul(device: str, dtype: torch.dtype) -> tuple[MatmulPoint, ...]:
    """Measure n x n x n products of growing n until one would take too long.

    Returns:
        at least one point.
    """
    name = str(dtype).removeprefix("torch.")
    points: list[MatmulPoint] = []
    expected_ns = 0.0
    for size in _CPU_SIZES if device == "cpu" else _GPU_SIZES:
        if expected_ns > _CAP_NS:
            break
        generator = torch.Generator(device).manual_seed(0)
        left = torch.randn(size, size, device=device, generator=generator).to(dtype)
        right = torch.randn(size, size, device=device, generator=generator).to(dtype)
        out = torch.empty(size, size, device=device, dtype=dtype)
        duration_ns = _median_ns(lambda a=left, b=right, o=out: torch.mm(a, b, out=o), device)
        points.append(
            MatmulPoint(dtype=name, size=size, flops_per_s=2 * size**3 * 1e9 / duration_ns)
        )
        expected_ns = 8 * duration_ns
    return tuple(points)


def is_native(points: tuple[MatmulPoint, ...], baseline: tuple[MatmulPoint, ...]) -> bool:
    """Decide whether a dtype has units of its own.

    It has when it is no slower than the baseline at the largest size both were measured at.
    """
    rates = {point.size: point.flops_per_s for point in baseline}
    common = [point for point in points if point.size in rates]
    return bool(common) and common[-1].flops_per_s >= rates[common[-1].size]


def measure_memory(device: str, free_bytes: int) -> float:
    """Measure a large copy inside one memory: bytes read plus bytes written, per second."""
    size_bytes = max(MIB, min(_COPY_BYTES, free_bytes // 8))
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size_bytes * 1e9 / _median_ns(lambda: target.copy_(source), device)


def measure_update(device: str, free_bytes: int) -> float:
    """Measure fused AdamW on fp32 state: parameters per second."""
    num_parameters = max(MIB // 4, min(_UPDATE_PARAMETERS, free_bytes // (4 * _PARAMETER_BYTES)))
    parameter = torch.nn.Parameter(torch.full((num_parameters,), 0.5, device=device))
    parameter.grad = torch.full((num_parameters,), 1e-3, device=device)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    step = cast("Callable[[], object]", optimizer.step)  # torch annotates its closure in part
    return num_parameters * 1e9 / _median_ns(step, device)


def measure_link(source: TierName, target: TierName, free_bytes: int) -> Link:
    """Measure copies between pinned host memory and the CUDA device, in one direction."""
    size_bytes = max(MIB, min(2 * _COPY_BYTES, free_bytes // 8))
    host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
    here, there = (host, device) if source == "host" else (device, host)
    small_ns = _median_ns(lambda: there[:64].copy_(here[:64], non_blocking=True), "cuda")
    large_ns = _median_ns(lambda: there.copy_(here, non_blocking=True), "cuda")
    return Link(
        source=source,
        target=target,
        bytes_per_s=size_bytes * 1e9 / max(1.0, large_ns - small_ns),
        latency_ns=round(small_ns),
    )


def _median_ns(run: Callable[[], object], device: str) -> float:
    """Median duration of one run; the first does not count unless it alone exceeds the cap."""
    first_ns = _time_ns(run, device)
    if first_ns > _CAP_NS:
        return first_ns
    durations_ns: list[int] = []
    while len(durations_ns) < _MIN_RUNS or (
        sum(durations_ns) < _POINT_NS and len(durations_ns) < _MAX_RUNS
    ):
        durations_ns.append(_time_ns(run, device))
    return max(1.0, statistics.median(durations_ns))


def _time_ns(run: Callable[[], object], device: str) -> int:
    began = time.perf_counter_ns()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter_ns() - began
