"""Tensors of memory that torch does not own, at addresses that may have nothing behind them yet.

In: an address, a number of elements, a dtype, a device. Out: a 1-D tensor of it, made through
DLPack, where the maker says on which device the memory is: torch asks the driver about an address
otherwise, and a range that is only reserved is unknown to it. What lies there is not touched, and
not given back when the tensor goes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor

_CPU: Final = 1
_CUDA: Final = 2
_FLOAT: Final = 2
_BFLOAT: Final = 4
_CODES: Final = {
    torch.float32: _FLOAT,
    torch.float16: _FLOAT,
    torch.bfloat16: _BFLOAT,
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("num_dimensions", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    # The shape follows in the same block, so that one `free` gives back both.
    _fields_ = [
        ("array", _Array),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("shape", ctypes.c_int64),
    ]


def tensor_at(address: int, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a 1-D tensor of memory at an address; whoever owns the memory keeps it long enough."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    # torch frees the description with its last tensor, which may live longer than anything here.
    place: int = libc.malloc(ctypes.sizeof(_Managed))
    managed = _Managed.from_address(place)
    managed.array = _Array(
        data=address,
        device=_Device(type=_CUDA if device.type == "cuda" else _CPU, id=device.index or 0),
        num_dimensions=1,
        dtype=_DataType(code=_CODES[dtype], bits=8 * dtype.itemsize, lanes=1),
        shape=place + _Managed.shape.offset,
        strides=None,
        byte_offset=0,
    )
    managed.manager = None
    managed.deleter = ctypes.cast(libc.free, ctypes.c_void_p).value  # ctypes, not typing
    managed.shape = num_elements
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype = ctypes.py_object
    make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    take = cast("Callable[[Any], Tensor]", torch.from_dlpack)  # Any, cast: a capsule has no type
    return take(make_capsule(place, b"dltensor", None))
