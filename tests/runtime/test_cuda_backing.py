# ruff: noqa: ARG002  the names and arguments are the driver's own
"""The CUDA backing against a driver that only keeps books; a GPU runs the same calls for real."""

from __future__ import annotations

import ctypes
import threading

import pytest

from packhorse.errors import RefusedError, RunFailedError
from packhorse.runtime.memory.cuda import CudaBacking

GRAIN = 2 << 20
BASE = 0x7000_0000_0000


class BookkeepingDriver:
    """Counts what is mapped where, as the CUDA driver would, and refuses what it would refuse."""

    def __init__(self, *, memory_bytes: int = 1 << 40) -> None:
        self.free_bytes = memory_bytes
        self.handles: dict[int, int] = {}
        self.num_created = 0
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.reserved = 0

    def cuMemGetAllocationGranularity(self, grain, properties, flags) -> int:
        grain._obj.value = GRAIN
        assert properties._obj.type == 1
        assert properties._obj.location.id == 3
        return 0

    def cuMemAddressReserve(self, address, size, alignment, hint, flags) -> int:
        assert size.value % GRAIN == 0
        address._obj.value = BASE
        self.reserved = size.value
        return 0

    def cuMemCreate(self, handle, size, properties, flags) -> int:
        if size.value > self.free_bytes:
            return 2
        self.free_bytes -= size.value
        self.num_created += 1
        handle._obj.value = self.num_created
        self.handles[handle._obj.value] = size.value
        return 0

    def cuMemMap(self, place, size, offset, handle, flags) -> int:
        assert place.value >= BASE
        assert place.value + size.value <= BASE + self.reserved
        assert place.value not in self.mapped
        self.mapped[place.value] = (size.value, handle.value)
        return 0

    def cuMemSetAccess(self, place, size, access, count) -> int:
        assert access._obj.flags == 3
        self.accessible.add(place.value)
        return 0

    def cuMemUnmap(self, place, size) -> int:
        assert self.mapped.pop(place.value)[0] == size.value
        self.accessible.discard(place.value)
        return 0

    def cuMemRelease(self, handle) -> int:
        self.free_bytes += self.handles.pop(handle.value)
        return 0

    def cuMemAddressFree(self, place, size) -> int:
        assert not self.mapped
        self.reserved = 0
        return 0


def test_ranges_are_mapped_when_committed_and_released_when_dropped() -> None:
    driver = BookkeepingDriver()
    backing = CudaBacking(10 * GRAIN + 5, device=3, driver=driver)
    assert (backing.address, driver.reserved) == (BASE, 11 * GRAIN)
    before = driver.free_bytes
    backing.commit(2 * GRAIN, GRAIN + 1)
    backing.commit(2 * GRAIN, GRAIN + 1)
    backing.commit(6 * GRAIN, 4096)
    assert sorted(driver.mapped) == [BASE + n * GRAIN for n in (2, 3, 6)]
    assert driver.accessible == set(driver.mapped)
    assert before - driver.free_bytes == 3 * GRAIN
    backing.drop(2 * GRAIN, GRAIN + 1)
    backing.drop(2 * GRAIN, GRAIN + 1)
    assert before - driver.free_bytes == GRAIN
    backing.commit(2 * GRAIN, GRAIN + 1)
    backing.close()
    backing.close()
    assert (driver.free_bytes, driver.reserved) == (before, 0)


def test_ranges_that_share_a_granule_hold_it_together() -> None:
    driver = BookkeepingDriver()
    backing = CudaBacking(8 * GRAIN, device=3, driver=driver)
    half = GRAIN // 2
    backing.commit(0, 3 * half)
    backing.commit(3 * half, GRAIN)
    assert len(driver.mapped) == 3
    backing.drop(0, 3 * half)
    assert sorted(driver.mapped) == [BASE + GRAIN, BASE + 2 * GRAIN]
    backing.drop(3 * half, GRAIN)
    assert not driver.mapped


def test_threads_may_commit_ranges_that_share_a_granule() -> None:
    class SlowDriver(BookkeepingDriver):
        def cuMemCreate(self, handle, size, properties, flags) -> int:
            # Long enough for the other thread to come by, if nothing holds it.
            entered.set()
            passed.wait(0.05)
            return super().cuMemCreate(handle, size, properties, flags)

    entered, passed = threading.Event(), threading.Event()
    driver = SlowDriver()
    backing = CudaBacking(4 * GRAIN, device=3, driver=driver)
    half = GRAIN // 2
    first = threading.Thread(target=backing.commit, args=(0, half))
    first.start()
    entered.wait()
    backing.commit(half, half)
    passed.set()
    first.join()
    assert (len(driver.mapped), driver.num_created) == (1, 1)
    backing.drop(0, half)
    assert len(driver.mapped) == 1
    backing.drop(half, half)
    assert not driver.mapped


def test_a_device_that_has_failed_can_be_closed() -> None:
    class BrokenDriver(BookkeepingDriver):
        def cuMemUnmap(self, place, size) -> int:
            return 700

        def cuMemAddressFree(self, place, size) -> int:
            return 700

    backing = CudaBacking(4 * GRAIN, device=3, driver=BrokenDriver())
    backing.commit(0, GRAIN)
    backing.close()
    backing.close()


def test_a_full_device_says_what_this_process_holds() -> None:
    backing = CudaBacking(8 * GRAIN, device=3, driver=BookkeepingDriver(memory_bytes=GRAIN))
    backing.commit(0, GRAIN)
    with pytest.raises(RunFailedError, match="no memory left") as caught:
        backing.commit(GRAIN, GRAIN)
    assert "2.00 MiB held here" in str(caught.value)


def test_a_driver_without_virtual_memory_is_refused() -> None:
    class OldDriver(BookkeepingDriver):
        def cuMemAddressReserve(self, *args: ctypes.c_uint64) -> int:
            return 801

    with pytest.raises(RefusedError, match="cuMemAddressReserve with code 801"):
        CudaBacking(GRAIN, device=3, driver=OldDriver())
