"""Optimizer updates of flat shards, in place, equal to torch.optim on separate parameters.

In: views of chunks: parameters, gradients and states, 1-D, float32, of one length, and where in
them each parameter lies. Out: the same memory, updated. Nothing of the shard's size is allocated.

`torch.optim`'s fused kernels treat each element alone, whatever the number of threads, but the last
elements of a tensor, which do not fill a vector, are computed without fused multiply-add and may
round differently. So a tensor may begin anywhere and be cut at multiples of 32 elements, and must
end where its parameter ends unless that is a multiple of 32: then the bits are those of separate
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from packhorse.optim.optimizers import SGD, AdamW, Optimizer

CUT_ELEMENTS: Final = 32  # two AVX-512 vectors of float32; also a multiple of every shorter vector


@torch.no_grad()
def update_shard(
    group: Optimizer,
    *,
    step: int,
    learning_rate: float,
    param: Tensor,
    grad: Tensor,
    states: Mapping[str, Tensor],
    pieces: Sequence[tuple[int, int]] | None = None,
    clip_coefficient: Tensor | None = None,
    compute_param: Tensor | None = None,
) -> None:
    """Apply one optimizer step to a shard.

    Changes `param`, `states` and `compute_param`; also `grad` when it is clipped; all of them only
    inside `pieces`. At step 1 the content of SGD's momentum buffer does not matter, it becomes the
    gradient as in torch.

    Args:
        group: hyperparameters from `hyperparameters`; its `lr` is not used.
        step: number of this update, the first is 1.
        learning_rate: from the schedule.
        param: float32; the master weights when `compute_param` is given.
        grad: float32.
        states: float32, by the optimizer's `state_names`; AdamW's are zeros before step 1.
        pieces: where each parameter, or the part of it that the shard holds, starts and stops, in
            elements of the shard and in order. Each starts at a multiple of 32; one that stops
            elsewhere is the end of its parameter. By default the shard is one piece.
        clip_coefficient: float32 scalar, multiplies the gradient first.
        compute_param: the copy that forward and backward read, for example bfloat16; receives the
            rounded parameters.

    Raises:
        ValueError: a state is missing or has another length, a piece starts off the grid, or
            `step` is below 1.
    """
    _check_shard(group, step, param, grad, states)
    runs = merge_pieces(((0, param.numel()),) if pieces is None else pieces)
    grads = _cut(grad, runs)
    if clip_coefficient is not None and not _is_one_on_cpu(clip_coefficient):
        for part in grads:
            part.mul_(clip_coefficient)
    params = _cut(param, runs)
    match group:
        case AdamW():
            _update_adamw(group, step, learning_rate, params, grads, _cut_all(states, runs))
        case SGD():
            _update_sgd(group, step, learning_rate, params, grads, _cut_all(states, runs))
        case _:
            assert_never(group)
    if compute_param is not None:
        for part, copy in zip(params, _cut(compute_param, runs), strict=True):
            copy.copy_(part)


def merge_pieces(pieces: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join neighbouring pieces where the bits allow it, so that kernels get long runs.

    Raises:
        ValueError: pieces overlap, or one starts at no multiple of 32.
    """
    runs: list[tuple[int, int]] = []
    for start, stop in pieces:
        previous = runs[-1][1] if runs else 0
        if start % CUT_ELEMENTS or start < previous or stop < start:
            raise ValueError(
                f"piece ({start}, {stop}) must start at a multiple of {CUT_ELEMENTS}, at or after"
                f" element {previous}"
            )
        if runs and start == previous:
            runs[-1] = (runs[-1][0], stop)
        elif start < stop:
            runs.append((start, stop))
    return tuple(runs)


def _cut(tensor: Tensor, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [tensor[start:stop] for start, stop in runs]


def _cut_all(
    states: Mapping[str, Tensor], runs: Sequence[tuple[int, int]]
) -> Mapping[str, list[Tensor]]:
    return {name: _cut(state, runs) for name, state in states.items()}


def _update_adamw(
    group: AdamW,
    step: int,
    learning_rate: float,
    params: list[Tensor],
    grads: list[Tensor],
    states: Mapping[str, list[Tensor]],
) -> None:
    if not params:
        return
    # The kernel that torch.optim's fused AdamW calls, without its way there: a chunk has streamed
    # through the caches by then, and of an interpreter that has to be read anew every call counts.
    counter = torch.tensor(float(step), dtype=torch.float32, device=params[0].device)
    beta1, beta2 = group.betas
    torch._fused_adamw_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]  # as above
        params,
        grads,
        states["exp_avg"],
        states["exp_avg_sq"],
        [],
        [counter] * len(params),
        lr=learning_rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group.weight_decay,
        eps=group.eps,
        amsgrad=False,
        maximize=False,
    )


def _update_sgd(
    group: SGD,
    step: int,
    learning_rate: float,
    params: list[Tensor],
    grads: list[Tensor],
    states: Mapping[str, list[Tensor]],
) -> None:
    buffers = states["momentum_buffer"] if group.momentum else []
    dampening = group.dampening
    if buffers and step == 1:
        # torch clones the first gradient. -0.0 * momentum + 1.0 * gradient is the gradient in every
        # bit (0.0 would turn -0.0 into 0.0) and allocates nothing.
        for buffer in buffers:
            buffer.fill_(-0.0)
        dampening = 0.0
    sgd(
        params,
        grads,
        [*buffers] or [None] * len(params),
        fused=True,
        weight_decay=group.weight_decay,
        momentum=group.momentum,
        lr=learning_rate,
        dampening=dampening,
        nesterov=group.nesterov,
        maximize=False,
    )


def _check_shard(
    group: Optimizer, step: int, param: Tensor, grad: Tensor, states: Mapping[str, Tensor]
) -> None:
    if step < 1:
        raise ValueError(f"step is {step}, the first update is step 1")
    tensors = {"param": param, "grad": grad}
    for name in group.state_names:
        if name not in states:
            raise ValueError(f"state {name!r} is missing; given: {', '.join(states) or 'none'}")
        tensors[name] = states[name]
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.shape != param.shape:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, it must be"
                f" torch.float32 of shape {tuple(param.shape)}"
            )


def _is_one_on_cpu(coefficient: Tensor) -> bool:
    """Tell whether a multiplication can be left out without waiting for an accelerator."""
    return coefficient.device.type == "cpu" and coefficient.item() == 1.0
