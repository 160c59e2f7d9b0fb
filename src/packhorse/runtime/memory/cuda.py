"""Reserved addresses on a CUDA device: physical memory is mapped in and out of a fixed range.

In: a size and a device. Out: the same interface as on CPU, by the driver's virtual memory calls:

    cuMemAddressReserve                    once: addresses only
    cuMemCreate, cuMemMap, cuMemSetAccess  commit: physical memory behind a chunk's range
    cuMemUnmap, cuMemRelease               drop

The driver maps whole granules (2 MiB today). Ranges may share a granule at their ends: it stays
mapped until the last of them is dropped. The caller has synchronised with whatever uses a range
before it is dropped: unmapping does not wait for kernels. Threads may commit and drop ranges at the
same time, each its own.
"""

from __future__ import annotations

import contextlib
import ctypes
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from packhorse.errors import RefusedError, RunFailedError
from packhorse.runtime.memory.foreign import tensor_at
from packhorse.units import format_bytes

_SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2
_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: plain device memory
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


Driver = Any  # Any: a ctypes library has no type of its symbols


class CudaBacking:
    """A reserved range of a CUDA device's addresses.

    Args:
        size_bytes: rounded up to the granularity; costs addresses only.
        device: index of the device.
        driver: the CUDA driver library; by default libcuda.

    Raises:
        RefusedError: the driver has no virtual memory management or grants no range.
    """

    def __init__(self, size_bytes: int, *, device: int, driver: Driver = None) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        self._committed: dict[int, int] = {}
        self._granules: dict[int, tuple[ctypes.c_uint64, int]] = {}
        # Lanes commit while the executor drops; two ranges may meet in a granule.
        self._lock = Lock()
        self._grain = 0
        self._location = _Location(type=_ON_DEVICE, id=device)
        self._properties = _AllocationProperties(type=_PINNED, location=self._location)
        grain = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(grain),
            ctypes.byref(self._properties),
            ctypes.c_int(0),
        )
        self._grain = grain.value
        self._size = self._round(max(size_bytes, 1))
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(self._size),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._address = address.value

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self._address

    def tensor(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """A 1-D view of a range of the device's memory."""
        device = torch.device("cuda", self._location.id)
        return tensor_at(self._address + offset, size_bytes // dtype.itemsize, dtype, device)

    def commit(self, offset: int, size_bytes: int) -> None:
        """Map physical memory behind a range; one that is committed stays so.

        Raises:
            RunFailedError: the device has no memory left: something else uses it.
        """
        with self._lock:
            if offset in self._committed:
                return
            for granule in self._granules_of(offset, size_bytes):
                handle, num_users = self._granules.get(granule, (None, 0))
                self._granules[granule] = (handle or self._map(granule), num_users + 1)
            self._committed[offset] = size_bytes

    def drop(self, offset: int, size_bytes: int) -> None:
        """Unmap a range and release its memory; a range that is not committed stays so."""
        del size_bytes
        with self._lock:
            held = self._committed.pop(offset, None)
            if held is None:
                return
            for granule in self._granules_of(offset, held):
                handle, num_users = self._granules.pop(granule)
                if num_users > 1:
                    self._granules[granule] = (handle, num_users - 1)
                    continue
                place = ctypes.c_uint64(self._address + granule)
                self._call("cuMemUnmap", place, ctypes.c_size_t(self._grain))
                self._call("cuMemRelease", handle)

    def shrink(self, offset: int, size_bytes: int, keep_bytes: int) -> int:
        """Release the whole range: ranges share granules, which have no parts."""
        del keep_bytes
        self.drop(offset, size_bytes)
        return 0

    def move(self, source: int, target: int, size_bytes: int) -> bool:
        """Never: ranges may share a granule at their ends."""
        del source, target, size_bytes
        return False

    def close(self) -> None:
        """Release everything, the addresses too."""
        for offset in tuple(self._committed):
            # A device that has failed answers nothing any more; what it did is told elsewhere.
            with contextlib.suppress(RefusedError):
                self.drop(offset, 0)
        address, self._address = self._address, 0
        if address:
            with contextlib.suppress(RefusedError):
                self._call(
                    "cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(self._size)
                )

    def _granules_of(self, offset: int, size_bytes: int) -> range:
        return range(offset // self._grain * self._grain, offset + size_bytes, self._grain)

    def _map(self, granule: int) -> ctypes.c_uint64:
        handle = ctypes.c_uint64()
        size = ctypes.c_size_t(self._grain)
        properties = ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), size, properties, ctypes.c_uint64(0))
        place = ctypes.c_uint64(self._address + granule)
        self._call("cuMemMap", place, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(location=self._location, flags=_READ_WRITE)
        self._call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
        return handle

    def _round(self, size_bytes: int) -> int:
        return -(-size_bytes // self._grain) * self._grain

    def _call(self, name: str, *args: object) -> None:
        code: int = getattr(self._driver, name)(*args)
        if code == _SUCCESS:
            return
        if code == _OUT_OF_MEMORY:
            raise RunFailedError(
                f"the device has no memory left for {name}",
                where=f"cuda:{self._location.id}, {format_bytes(self._held_bytes())} held here",
                fix="end other programs on this device, or lower the device budget",
            )
        raise RefusedError(
            f"the CUDA driver refused {name} with code {code}",
            where=f"cuda:{self._location.id}",
            fix="virtual memory management needs CUDA 11 or newer",
        )

    def _held_bytes(self) -> int:
        return len(self._granules) * self._grain
