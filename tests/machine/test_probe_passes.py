import threading
from pathlib import Path

import pytest

from packhorse.errors import StorageError
from packhorse.machine.probe_io import BLOCK_SIZES, IoPath, PathRates, choose_io_path
from packhorse.machine.probe_passes import Moved, Passes, make_memory
from packhorse.machine.probe_sustained import WriteLimits, is_steady, write_until_steady
from packhorse.storage.scratch_file import create_scratch_file
from packhorse.units import GIB, MIB


class FakeDrive(threading.local):
    """A file whose transfers take time on a clock of their own thread, and nothing else."""

    size_bytes = 8 * MIB

    def __init__(self, read_ns: float, write_ns: float) -> None:
        self.now_ns = 0.0
        self.ns_per_byte = {"read": read_ns, "write": write_ns}

    def clock(self) -> int:
        return round(self.now_ns)

    def read_into(self, _target: object, _offset: int, size_bytes: int) -> None:
        self.now_ns += size_bytes * self.ns_per_byte["read"]

    def write_from(self, _source: object, _offset: int, size_bytes: int) -> None:
        self.now_ns += size_bytes * self.ns_per_byte["write"]


def fake_passes(drive: FakeDrive) -> Passes:
    return Passes(drive, make_memory(drive.size_bytes, huge_pages=False), clock=drive.clock)


def test_passes_count_what_moved_and_how_long() -> None:
    passes = fake_passes(FakeDrive(2.0, 4.0))
    assert passes.piece_bytes == 4 * MIB
    assert passes.write(10**12) == Moved(size_bytes=8 * MIB, duration_ns=32 * MIB)
    assert passes.read(10**12) == Moved(size_bytes=8 * MIB, duration_ns=16 * MIB)
    assert passes.read(10**12).bytes_per_s == pytest.approx(5e8)


def test_a_slow_drive_is_measured_as_far_as_the_time_reaches() -> None:
    passes = fake_passes(FakeDrive(2.0, 4.0))
    passes.prime(1)
    assert passes.size_bytes == 4 * MIB
    assert passes.write(10**12).size_bytes == 4 * MIB
    assert passes.mix(10**12) is None


def test_both_ways_run_until_the_limit() -> None:
    passes = fake_passes(FakeDrive(2.0, 4.0))
    found = passes.mix(100 * MIB)
    assert found is not None
    read, written = found
    # Pieces of 4 MiB at 2 and at 4 ns a byte, as many as reach the limit.
    assert read == Moved(size_bytes=52 * MIB, duration_ns=104 * MIB)
    assert written == Moved(size_bytes=28 * MIB, duration_ns=112 * MIB)


def test_both_ways_move_different_halves(tmp_path: Path) -> None:
    with (
        create_scratch_file(tmp_path / "s", 4 * MIB) as file,
        make_memory(4 * MIB, huge_pages=True) as memory,
    ):
        passes = Passes(file, memory)
        passes.prime(10**12)
        found = passes.mix(1)
        assert found is not None
        assert [moved.size_bytes for moved in found] == [2 * MIB, 2 * MIB]
        assert passes.latency_ns(writing=False) > 0
        memory.view(0, 1)[:] = b"x"
        assert passes.write_from(3, 2).size_bytes == 4 * MIB


@pytest.mark.parametrize("broken", ["read_into", "write_from"])
def test_an_error_of_either_way_is_raised(broken: str) -> None:
    drive = FakeDrive(2.0, 4.0)
    passes = fake_passes(drive)

    def fail(*_: object) -> None:
        raise StorageError("the drive is gone")

    class Broken:
        size_bytes = drive.size_bytes
        read_into = drive.read_into
        write_from = drive.write_from

    setattr(Broken, broken, staticmethod(fail))
    passes._file = Broken
    with pytest.raises(StorageError, match="the drive is gone"):
        passes.mix(10**9)


def rates(read: float, write: float) -> PathRates:
    return PathRates(read_bytes_per_s=read, write_bytes_per_s=write)


def test_the_usual_way_wins_a_draw() -> None:
    seen: list[IoPath] = []

    def trial(path: IoPath) -> PathRates:
        seen.append(path)
        return rates(1e9, 1e9) if path == IoPath() else rates(1.09e9, 1.09e9)

    assert choose_io_path(trial) == (IoPath(), rates(1e9, 1e9))
    assert len(seen) == len(set(seen)) == len(BLOCK_SIZES) + 3


def test_the_fastest_is_put_together_one_thing_at_a_time() -> None:
    def trial(path: IoPath) -> PathRates:
        factor = 1.0
        factor *= 2 if not path.direct else 1
        factor *= {32 * MIB: 1.5, 16 * MIB: 1.4}.get(path.block_bytes, 1)
        factor *= 1.2 if path.num_threads == 2 else 1
        factor *= 1.3 if not path.huge_pages else 1
        return rates(factor * 1e9, factor * 1e9)

    best, found = choose_io_path(trial)
    assert best == IoPath(direct=False, block_bytes=32 * MIB, num_threads=2, huge_pages=False)
    assert found.read_bytes_per_s == pytest.approx(2 * 1.5 * 1.2 * 1.3 * 1e9)


def test_both_directions_count() -> None:
    def trial(path: IoPath) -> PathRates:
        # Faster reads that cost more at writing.
        return rates(4e9, 0.4e9) if path.num_threads == 2 else rates(1e9, 1e9)

    assert choose_io_path(trial)[0].num_threads == 1


def test_a_file_system_that_refuses_direct_transfers_is_buffered() -> None:
    def trial(path: IoPath) -> PathRates | None:
        return None if path.direct else rates(1e9, 1e9)

    assert choose_io_path(trial)[0] == IoPath(direct=False)
    with pytest.raises(ValueError, match="buffered transfers gave nothing"):
        choose_io_path(lambda _: None)


def windows(*rates: float) -> list[Moved]:
    return [Moved(size_bytes=GIB, duration_ns=round(GIB / rate)) for rate in rates]


def test_a_cache_that_fills_up_is_not_where_it_ends() -> None:
    written = iter(windows(*[2.0] * 10, 1.2, *[0.5] * 30))
    told: list[int] = []
    limits = WriteLimits(size_bytes=32 * GIB, duration_ns=10**15)
    found = write_until_steady(lambda: next(written), limits, tell=told.append)
    # 2 GB/s was steady for ten windows, but half of the limit was not written.
    assert found.steady
    assert found.bytes_per_s == pytest.approx(0.5e9, rel=0.01)
    assert found.early_bytes_per_s == pytest.approx(2e9, rel=0.01)
    assert 16 * GIB <= found.written_bytes < 32 * GIB
    assert told == [GIB * (at + 1) for at in range(len(told))]


def test_space_that_was_never_written_only_fills_the_cache() -> None:
    written = iter(windows(*[0.9] * 8, *[2.0] * 4, *[1.0] * 20))
    limits = WriteLimits(size_bytes=32 * GIB)
    found = write_until_steady(lambda: next(written), limits, first_bytes=8 * GIB)
    assert found.steady
    assert found.early_bytes_per_s == pytest.approx(2e9, rel=0.01)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.01)
    # Where the time ends before that, it is all there is.
    limits = WriteLimits(size_bytes=32 * GIB, duration_ns=1)
    found = write_until_steady(lambda: windows(0.9)[0], limits, first_bytes=8 * GIB)
    assert found.bytes_per_s == pytest.approx(0.9e9, rel=0.01)
    assert not found.steady


def test_limits_end_what_never_gets_steady() -> None:
    def falling():
        rate = 4.0
        while True:
            yield from windows(rate)
            rate *= 0.9

    source = falling()
    found = write_until_steady(lambda: next(source), WriteLimits(size_bytes=16 * GIB))
    assert not found.steady
    assert found.written_bytes == 16 * GIB
    source = falling()
    found = write_until_steady(lambda: next(source), WriteLimits(duration_ns=2 * 10**9))
    assert not found.steady
    assert found.written_bytes < 16 * GIB


def test_noise_around_a_rate_is_steady() -> None:
    assert is_steady(windows(*[0.8, 1.2] * 8))
    assert not is_steady(windows(*[1.0] * 7))
    assert not is_steady(windows(*[1.0] * 12, *[0.9] * 4))
