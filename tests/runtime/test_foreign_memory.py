"""Tensors of memory that torch does not own, on the CPU; a CUDA device differs in one number."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from packhorse.runtime.memory.foreign import tensor_at

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_is_the_memory_at_its_address(dtype: torch.dtype) -> None:
    memory = (ctypes.c_char * 64)()
    address = ctypes.addressof(memory)
    tensor = tensor_at(address, 16, dtype, CPU)
    assert (tensor.dtype, tensor.shape, tensor.device) == (dtype, (16,), CPU)
    assert tensor.data_ptr() == address
    tensor.copy_(torch.arange(16))
    again = tensor_at(address + 4 * dtype.itemsize, 3, dtype, CPU)
    assert again.tolist() == [4, 5, 6]


def test_nothing_is_touched_when_it_is_made_or_goes() -> None:
    """An address with nothing behind it would end the process if it were."""
    tensor = tensor_at(0x10_0000, 1 << 40, torch.float32, CPU)
    part = tensor[5:10].view(torch.int32)
    assert tensor.numel() == 1 << 40
    del tensor
    gc.collect()
    assert part.data_ptr() == 0x10_0000 + 20


def test_memory_outlives_its_tensors() -> None:
    memory = (ctypes.c_char * 8)()
    for value in range(1000):
        tensor_at(ctypes.addressof(memory), 2, torch.float32, CPU).fill_(float(value))
        gc.collect(0)
    assert tensor_at(ctypes.addressof(memory), 2, torch.float32, CPU).tolist() == [999.0, 999.0]
