import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from packhorse.errors import InputError, RunFailedError, StorageError
from packhorse.machine import probe, probe_compute, probe_disk, probe_heap
from packhorse.machine.budget import parse_budget
from packhorse.machine.contention import CoreClocks
from packhorse.machine.drives import usable_bytes
from packhorse.machine.files import format_machine, parse_machine
from packhorse.machine.limits import find_core_limit
from packhorse.machine.probe import is_here, probe_machine
from packhorse.machine.probe_cache import (
    age_ns,
    default_cache_folder,
    load_measured,
    make_fingerprint,
    store_measured,
)
from packhorse.machine.probe_compute import is_native, measure_matmul, measure_update
from packhorse.machine.probe_disk import measure_disk, remove_dead_probes
from packhorse.machine.probe_heap import measure_heap
from packhorse.machine.probe_saving import measure_saving
from packhorse.machine.probe_sustained import WriteLimits
from packhorse.machine.spec import Emulation, Heap, Link, Machine, MatmulPoint
from packhorse.units import GIB, MIB


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_compute, "_POINT_NS", 1_000_000)
    monkeypatch.setattr(probe_compute, "_CPU_SIZES", (64, 128))
    monkeypatch.setattr(probe_compute, "_COPY_BYTES", MIB)
    monkeypatch.setattr(probe_compute, "_UPDATE_PARAMETERS", MIB)


@pytest.fixture
def no_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "measure_heap", lambda _: Heap(map_cost=0.2, keep_slack=0.1))


@pytest.fixture
def measure(tmp_path: Path, no_heap: None) -> Callable[..., Machine]:
    def run(budget: object = None, **more: object) -> Machine:
        return probe_machine(
            **{
                "budget": parse_budget(budget),
                "scratch": str(tmp_path / "scratch"),
                "cache_folder": tmp_path / "cache",
                "file_bytes": MIB,
                "threads": 1,
                "device": "cpu",
                **more,
            }
        )

    return run


def test_probe_measures_this_machine(tmp_path: Path, measure: Callable[..., Machine]) -> None:
    seen: list[tuple[str, int, int]] = []
    threads = torch.get_num_threads()
    machine = measure({"device": "64MiB"}, progress=lambda *part: seen.append(part))
    assert [index for _, index, _ in seen] == list(range(seen[0][2]))
    assert torch.get_num_threads() == threads
    assert parse_machine(format_machine(machine)) == machine
    assert (machine.source, machine.device, machine.num_threads) == ("probe", "cpu", 1)
    assert machine.num_cores == find_core_limit().num_cores
    assert [tier.name for tier in machine.tiers] == ["device", "disk"]
    assert machine.tiers[0].budget_bytes == 64 * MIB
    assert machine.tiers[1].path == str(tmp_path / "scratch")
    assert {point.dtype for point in machine.matmul} == {"float32", "bfloat16"}
    assert {(link.source, link.target) for link in machine.links} == {
        ("device", "disk"),
        ("disk", "device"),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_second_probe_is_cached_and_budgets_are_not(measure: Callable[..., Machine]) -> None:
    first = measure({"device": "64MiB"})
    seen: list[tuple[str, int, int]] = []
    second = measure({"device": "32MiB"}, progress=lambda *part: seen.append(part))
    assert seen == []
    assert second.links == first.links
    assert second.tiers[0].budget_bytes == 32 * MIB
    measure({"device": "32MiB"}, fresh=True, progress=lambda *part: seen.append(part))
    assert len(seen) == 7
    age = age_ns(second)
    assert age is not None
    assert age < 600 * 10**9


def test_a_small_file_in_the_cache_is_measured_again(
    tmp_path: Path, measure: Callable[..., Machine]
) -> None:
    seen: list[tuple[str, int, int]] = []
    (drive,) = measure(file_bytes=MIB).tiers[1].drives
    assert drive.measured_bytes == MIB
    for file_bytes, again in ((2 * MIB, False), (8 * MIB, True), (8 * MIB, False)):
        seen.clear()
        machine = measure(file_bytes=file_bytes, progress=lambda *part: seen.append(part))
        assert bool(seen) is again
    (drive,) = machine.tiers[1].drives
    assert (drive.measured_bytes, drive.path) == (8 * MIB, str(tmp_path / "scratch"))
    # What the time allows is all that another measurement would reach.
    seen.clear()
    measure(file_bytes=64 * MIB, disk_limit_ns=1, progress=lambda *part: seen.append(part))
    assert seen == []


def test_several_folders_are_measured_together(
    tmp_path: Path, measure: Callable[..., Machine]
) -> None:
    paths = str(tmp_path / "a"), str(tmp_path / "b")
    text = ",".join(f"disk={path}:64MiB" for path in paths)
    machine = measure(text, file_bytes=4 * MIB)
    disk = machine.tiers[1]
    assert tuple(drive.path for drive in disk.drives) == paths
    assert disk.path == paths[0]
    assert disk.budget_bytes == usable_bytes(disk.drives) <= 128 * MIB
    assert len(machine.links) == 2
    assert parse_machine(format_machine(machine)) == machine
    seen: list[tuple[str, int, int]] = []
    again = measure(text, file_bytes=4 * MIB, progress=lambda *part: seen.append(part))
    assert (again.tiers[1].drives, seen) == (disk.drives, [])
    # Other folders on the same drives: the rates are known, the paths are those of now.
    moved = measure(text.replace("/a:", "/c:"), file_bytes=4 * MIB)
    assert moved.tiers[1].path == str(tmp_path / "c")
    # One of them alone is another machine.
    assert measure({"disk": paths[0]}).fingerprint != machine.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_sustained_rates_are_kept(measure: Callable[..., Machine]) -> None:
    seen: list[tuple[str, int, int]] = []
    limits = WriteLimits(size_bytes=4 * MIB, duration_ns=10**11)
    machine = measure(sustained=limits, file_bytes=None, progress=lambda *part: seen.append(part))
    told = [part for part in seen if part[0].startswith("writing until the rate is steady")]
    assert {total for _, _, total in told} == {4 * MIB}
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] <= 4 * MIB
    write = machine.link("device", "disk")
    assert write is not None
    assert write.bytes_per_s > 0
    assert measure(file_bytes=MIB).link("device", "disk") == write


def test_other_threads_are_another_machine(measure: Callable[..., Machine]) -> None:
    if find_core_limit().num_cores < 2:
        pytest.skip("one core only")
    assert measure(threads=1).fingerprint != measure(threads=2).fingerprint


def test_a_measured_machine_is_this_computer_and_no_other_is(
    tmp_path: Path, measure: Callable[..., Machine]
) -> None:
    machine = measure()
    assert is_here(parse_machine(format_machine(machine)))
    # Budgets and where they came from make no other computer of it; what was measured does.
    assert is_here(measure({"device": "64MiB", "disk": {"path": str(tmp_path), "size": "64MiB"}}))
    others = (
        replace(machine, source="hand"),
        replace(machine, fingerprint="0123456789abcdef"),
        replace(machine, num_threads=10_000),
        replace(machine, device="tpu"),
        replace(machine, emulation=Emulation(of="another", slowdown=2.0)),
    )
    assert [is_here(other) for other in others] == [False] * len(others)


def test_bad_requests_measure_nothing(tmp_path: Path, measure: Callable[..., Machine]) -> None:
    with pytest.raises(InputError, match="the budget of tier device is"):
        measure({"device": "900TiB"})
    with pytest.raises(InputError, match="cannot use 0 threads"):
        measure(threads=0)
    with pytest.raises(InputError, match="there is no device 'tpu' here"):
        measure(device="tpu")
    with pytest.raises(InputError, match="names tier host"):
        measure({"host": "1GiB"})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="it is no folder"):
        measure({"disk": str(tmp_path / "file")})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_unwritable_cache_costs_nothing_but_time(
    tmp_path: Path, measure: Callable[..., Machine]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert measure().source == "probe"


def test_damaged_cache_is_measured_again(tmp_path: Path, measure: Callable[..., Machine]) -> None:
    fingerprint = measure().fingerprint
    (path,) = (tmp_path / "cache").iterdir()
    assert fingerprint in path.name
    path.write_text(path.read_text()[:100])
    assert load_measured(tmp_path / "cache", fingerprint) is None
    assert measure().fingerprint == fingerprint
    assert load_measured(tmp_path / "cache", fingerprint) is not None


def test_cache_names_and_ages(tmp_path: Path, measure: Callable[..., Machine]) -> None:
    assert default_cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/packhorse")
    assert default_cache_folder({}) == Path.home() / ".cache/packhorse"
    facts = {"cpu": "a", "cores": 2}
    assert make_fingerprint(facts) == make_fingerprint(dict(reversed(facts.items())))
    assert make_fingerprint(facts) != make_fingerprint(facts | {"cores": 3})
    machine = measure()
    then = datetime.fromisoformat(machine.measured_at)
    assert age_ns(machine, then + timedelta(hours=2)) == 2 * 3600 * 10**9
    assert then.tzinfo == UTC
    (tmp_path / "block").write_text("")
    with pytest.raises(StorageError, match="cannot make the cache folder"):
        store_measured(tmp_path / "block", machine)


def test_matmul_stops_before_a_size_that_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_compute, "_CPU_SIZES", (64, 128, 256))
    monkeypatch.setattr(probe_compute, "_CAP_NS", 0)
    points = measure_matmul("cpu", torch.float32)
    assert [point.size for point in points] == [64]
    assert points[0].dtype == "float32"
    assert points[0].flops_per_s > 1e6


def test_native_is_decided_by_the_largest_common_size() -> None:
    def curve(*rates: float) -> tuple[MatmulPoint, ...]:
        return tuple(
            MatmulPoint(dtype="x", size=2**index, flops_per_s=rate)
            for index, rate in enumerate(rates)
        )

    assert is_native(curve(1, 9), curve(5, 5, 50))
    assert not is_native(curve(9, 1), curve(5, 5))
    assert not is_native((), curve(5))


def test_update_fits_in_little_memory() -> None:
    assert measure_update("cpu", 0) > 0


def test_disk_probe_leaves_nothing(tmp_path: Path) -> None:
    rates = measure_disk(str(tmp_path / "not" / "there"), file_bytes=2 * MIB)
    assert rates.mixed_read_bytes_per_s is not None
    assert rates.mixed_write_bytes_per_s is not None
    assert rates.measured_bytes == 2 * MIB
    assert rates.read_bytes_per_s > 0
    assert rates.write_bytes_per_s > 0
    assert rates.read_latency_ns > 0
    assert rates.write_latency_ns > 0
    there, back = rates.links("host")
    assert (there.source, there.target) == ("host", "disk")
    assert there.bytes_per_s == rates.write_bytes_per_s
    assert there.mixed_bytes_per_s == rates.mixed_write_bytes_per_s
    assert (back.source, back.target) == ("disk", "host")
    # Whatever moves a byte takes some of a core's time; a microsecond for each would be absurd.
    assert 0 < back.core_ns_per_byte < 1000
    assert 0 < there.core_ns_per_byte < 1000
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_disk, "free_bytes", lambda _: 1000)
    with pytest.raises(StorageError, match="too little space to measure the disk"):
        measure_disk(str(tmp_path))


def test_nothing_stays_when_a_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("the drive is gone")

    monkeypatch.setattr(probe_disk.Passes, "read", fail)
    with pytest.raises(StorageError, match="the drive is gone"):
        measure_disk(str(tmp_path), file_bytes=MIB)
    with pytest.raises(StorageError, match="the drive is gone"):
        measure_disk(str(tmp_path), file_bytes=MIB, sustained=WriteLimits(size_bytes=MIB))
    assert list(tmp_path.iterdir()) == []


def test_killed_probes_are_cleaned_and_live_ones_stay(tmp_path: Path) -> None:
    folder = tmp_path / "packhorse-probe-x"
    holder = (
        "import sys\n"
        "from packhorse.storage.scratch_folder import claim_scratch\n"
        f"folder = claim_scratch({str(folder)!r})\n"
        "folder.create_file('probe', 4096)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert remove_dead_probes(tmp_path) == ()
        process.send_signal(signal.SIGKILL)
    assert remove_dead_probes(tmp_path) == (folder,)
    assert list(tmp_path.iterdir()) == []


def test_heap_is_measured_in_a_child() -> None:
    heap = measure_heap(1)
    assert 0 <= heap.map_cost < 10
    assert heap.keep_slack == probe_heap.KEEP_SLACK


def test_heap_child_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RunFailedError, match="cannot measure the cost of the heap modes") as caught:
        measure_heap(1)
    assert "packhorse.machine.probe_heap 1" in str(caught.value)


def test_cuda_probe(measure: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    monkeypatch.setattr(probe_compute, "_GPU_SIZES", (256, 1024))
    machine = measure({"device": "1GiB"}, device="cuda")
    assert [tier.name for tier in machine.tiers] == ["device", "host", "disk"]
    assert machine.tiers[0].budget_bytes == GIB
    for source, target in (("host", "device"), ("device", "host"), ("host", "disk")):
        assert machine.link(source, target) is not None
    assert {update.tier for update in machine.updates} == {"device", "host"}


def test_cuda_tiers_and_links_are_put_together(
    measure: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = MatmulPoint(dtype="float32", size=64, flops_per_s=1e12)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    monkeypatch.setattr(probe, "measure_matmul", lambda *_: (point,))
    monkeypatch.setattr(probe, "measure_memory", lambda *_: 1e12)
    monkeypatch.setattr(
        probe, "measure_update", lambda device, _: 1e10 if device == "cuda" else 1e9
    )
    monkeypatch.setattr(
        probe,
        "measure_link",
        lambda source, target, _: Link(
            source=source, target=target, bytes_per_s=2e10, latency_ns=1
        ),
    )
    machine = measure({"host": "64MiB"}, device=None)
    assert (machine.name, machine.device) == ("Test GPU", "cuda")
    device, host, disk = machine.tiers
    assert (device.total_bytes, device.budget_bytes) == (24 * GIB, 18 * GIB)
    assert (host.name, host.budget_bytes) == ("host", 64 * MIB)
    assert disk.name == "disk"
    assert [(link.source, link.target) for link in machine.links] == [
        ("host", "disk"),
        ("disk", "host"),
        ("host", "device"),
        ("device", "host"),
    ]
    assert {update.tier: update.parameters_per_s for update in machine.updates} == {
        "device": 1e10,
        "host": 1e9,
    }


def test_saving_is_measured_on_a_file_without_a_name(tmp_path: Path) -> None:
    saving = measure_saving(str(tmp_path / "not" / "there"), file_bytes=3 * MIB)
    assert saving.write_bytes_per_s > 0
    assert saving.checksum_bytes_per_s > saving.write_bytes_per_s / 100
    assert saving.sync_ns > 0
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_cannot_be_measured_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError) as caught:
        measure_saving(str(tmp_path), file_bytes=MIB)
    assert str(tmp_path) in str(caught.value)


def test_a_probe_says_what_others_took_meanwhile(
    measure: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(
        CoreClocks(at_s=at_s, busy_s=busy_s, own_s=own_s, num_cores=1)
        for at_s, busy_s, own_s in ((0.0, 0.0, 0.0), (10.0, 10.0, 6.0))
    )
    monkeypatch.setattr(probe, "read_core_clocks", lambda: next(looks))
    machine = measure()
    assert machine.busy_share == pytest.approx(0.4)
    assert measure().busy_share == machine.busy_share  # from the cache
