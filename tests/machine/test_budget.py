import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import InputError
from packhorse.machine.budget import (
    Budget,
    DiskBudget,
    check_scratch,
    free_disk_bytes,
    free_less_margin,
    parse_budget,
    parse_memory,
    with_budget,
)
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.disks import find_disk, takes_direct_io
from packhorse.machine.drives import ROUND_UNITS, UNIT_BYTES, share_units, usable_bytes
from packhorse.machine.spec import Drive, Machine, Tier
from packhorse.storage.scratch_folder import claim_scratch
from packhorse.storage.stripes import UNIT_BYTES as STRIPE_BYTES
from packhorse.storage.stripes import Stripes
from packhorse.units import GIB, MIB

GPU = load_known_machine("rtx-4090")
CPU = load_known_machine("laptop-16gb")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Budget()),
        ("", None),
        (
            {"device": "22GiB", "host": "48GiB", "disk": [{"path": "s", "size": "600GiB"}]},
            Budget(
                device_bytes=22 * GIB,
                host_bytes=48 * GIB,
                disks=(DiskBudget(path="s", size_bytes=600 * GIB),),
            ),
        ),
        (
            "device=22GiB, disk=600GiB",
            Budget(
                device_bytes=22 * GIB, disks=(DiskBudget(path="scratch", size_bytes=600 * GIB),)
            ),
        ),
        ({"device": "1GiB", "disk": "x"}, Budget(device_bytes=GIB, disks=(DiskBudget(path="x"),))),
        ("disk=/a/b:2GiB", Budget(disks=(DiskBudget(path="/a/b", size_bytes=2 * GIB),))),
        ({"disk": {"path": "s"}}, Budget(disks=(DiskBudget(path="s"),))),
        ({"disk": Path("p")}, Budget(disks=(DiskBudget(path="p"),))),
        ({"disk": "./600Gib"}, Budget(disks=(DiskBudget(path="./600Gib"),))),
        (
            "disk=/a:2GiB,device=1GiB,disk=/b",
            Budget(
                device_bytes=GIB,
                disks=(DiskBudget(path="/a", size_bytes=2 * GIB), DiskBudget(path="/b")),
            ),
        ),
        (
            {"disk": [{"path": "a", "size": 5}, {"path": "b"}]},
            Budget(disks=(DiskBudget(path="a", size_bytes=5), DiskBudget(path="b"))),
        ),
        ({"device": 1024}, Budget(device_bytes=1024)),
        (Budget(host_bytes=3), Budget(host_bytes=3)),
    ],
)
def test_forms(value: object, expected: Budget | None) -> None:
    if expected is None:
        with pytest.raises(InputError, match="as TIER=SIZE"):
            parse_budget(value)
    else:
        assert parse_budget(value) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"devise": "1GiB"}, "did you mean 'device'?"),
        ("gpu=1GiB", "tiers are device, host, disk"),
        ("device=1GiB,device=2GiB", "named twice"),
        ("device", "cannot read 'device' as TIER=SIZE"),
        ({"device": "12 gigs"}, "'12 gigs' is no size"),
        ({"device": -1}, "cannot be negative"),
        ({"device": True}, "True is no size"),
        ({"device": 1.5}, "1.5 is no size"),
        ({"disk": "600Gigs"}, "'600Gigs' is no size"),
        ({"disk": []}, "an empty list"),
        ({"disk": [{"path": "a"}, {"path": "./a"}]}, "'a' is named 2 times"),
        ("disk=1GiB,disk=2GiB", "'scratch' is named 2 times"),
        ({"disk": [{"pth": "a"}]}, "the keys are path and size"),
        ({"disk": {"path": 3}}, "3 is no path"),
        ({"disk": ""}, "neither a size nor a folder"),
        (7, "a budget cannot be 7"),
    ],
)
def test_bad_budgets(value: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_budget(value)
    assert words in str(caught.value)
    assert "budget" in str(caught.value.where)


def test_tiers_that_are_not_named_keep_theirs() -> None:
    machine = with_budget(GPU, parse_budget("host=10GiB"))
    assert machine.tier("host") == replace(GPU.tier("host"), budget_bytes=10 * GIB)
    assert machine.tier("device") == GPU.tier("device")
    assert machine.tier("disk") == GPU.tier("disk")
    assert with_budget(GPU, Budget()) == GPU


def test_disk_folder_is_taken_over() -> None:
    disk = with_budget(GPU, parse_budget({"disk": "elsewhere"})).tier("disk")
    assert disk is not None
    assert disk.path == "elsewhere"


def test_more_than_there_is() -> None:
    with pytest.raises(InputError) as caught:
        with_budget(GPU, parse_budget("device=30GiB"))
    assert "the budget of tier device is 30.0 GiB, but rtx-4090 has 23.5 GiB" in str(caught.value)
    assert "grant at most device=24064MiB" in str(caught.value)


def test_a_machine_without_a_gpu_has_no_host() -> None:
    with pytest.raises(InputError, match="names tier host, but laptop-16gb has none") as caught:
        with_budget(CPU, parse_budget("host=1GiB"))
    assert "write device=... instead" in str(caught.value)
    diskless = replace(CPU, tiers=CPU.tiers[:1])
    with pytest.raises(InputError, match="names tier disk"):
        with_budget(diskless, parse_budget({"disk": "scratch"}))


def test_memory_is_short_for_device_without_a_gpu_only() -> None:
    assert parse_memory("2GiB", CPU) == Budget(device_bytes=2 * GIB)
    with pytest.raises(InputError, match="--memory is ambiguous") as caught:
        parse_memory("2GiB", GPU)
    assert "--budget device=2GiB" in str(caught.value)


def test_budget_here_needs_a_folder_with_space(tmp_path: Path) -> None:
    machine = with_budget(
        CPU, parse_budget({"disk": [{"path": str(tmp_path / "s"), "size": "1MiB"}]}), here=True
    )
    disk = machine.tier("disk")
    assert disk is not None
    assert (disk.path, disk.budget_bytes) == (str(tmp_path / "s"), MIB)
    assert not (tmp_path / "s").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="it is no folder"):
        with_budget(CPU, parse_budget({"disk": str(tmp_path / "file")}), here=True)
    huge = f"{find_disk(tmp_path).free_bytes + 1024 * MIB}"
    with pytest.raises(InputError, match="the budget of tier disk is"):
        with_budget(CPU, parse_budget({"disk": {"path": str(tmp_path), "size": huge}}), here=True)


def test_unwritable_folder_and_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tier = replace(CPU.tiers[1], path=str(tmp_path), budget_bytes=MIB)
    check_scratch(tier)
    with pytest.raises(InputError, match="are free"):
        check_scratch(replace(tier, budget_bytes=2**60))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="cannot be written") as caught:
        check_scratch(tier)
    assert str(tmp_path) in str(caught.value)


@given(st.integers(0, 2**50))
def test_margin(free: int) -> None:
    for kind, least in (("memory", 512 * MIB), ("disk", 2 * GIB)):
        left = free_less_margin(free, kind)
        taken = free - left
        assert 0 <= left <= free
        assert taken >= min(free, least)
        assert taken >= int(free * 0.1)
        assert taken <= max(least, int(free * 0.1))


def test_disk_facts(tmp_path: Path) -> None:
    disk = find_disk(tmp_path / "not" / "there")
    assert disk.folder == tmp_path
    assert 0 < disk.free_bytes <= disk.total_bytes
    assert disk.writable
    takes_direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 1 0:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:2 / {str(tmp_path).replace(' ', chr(92) + '040')} rw - tmpfs none rw\n"
        "3 1 0:3 / /elsewhere rw - nfs4 server rw\n"
    )
    assert find_disk(tmp_path, tmp_path).in_memory
    assert not find_disk("/", tmp_path).in_memory


def drive(path: object, rate: float = 1e9, budget: int = GIB) -> Drive:
    return Drive(
        path=str(path),
        budget_bytes=budget,
        read_bytes_per_s=rate,
        write_bytes_per_s=rate,
        measured_bytes=MIB,
        direct=True,
        block_bytes=MIB,
        num_threads=1,
        huge_pages=True,
    )


def with_drives(*drives: Drive) -> Machine:
    device, disk = CPU.tiers
    disk = replace(
        disk, path=drives[0].path, drives=drives, total_bytes=10 * GIB, budget_bytes=2 * GIB
    )
    return replace(CPU, tiers=(device, disk))


def disk_of(machine: Machine) -> Tier:
    disk = machine.tier("disk")
    assert disk is not None
    return disk


def test_shares_follow_the_rates() -> None:
    assert share_units([drive("a")]) == (1,)
    assert share_units([drive("a"), drive("b")]) == (8, 8)
    assert share_units([drive("a", 3e9), drive("b", 1e9)]) == (12, 4)
    assert share_units([drive("a", 1e12), drive("b", 1.0)]) == (15, 1)
    assert share_units([drive(n) for n in range(20)]) == (2,) * 20
    reads = replace(drive("a"), write_bytes_per_s=0.5e9)
    assert share_units([reads, drive("b", 2 / 3 * 1e9)]) == (8, 8)


@given(rates=st.lists(st.floats(1e6, 1e10), min_size=2, max_size=12))
def test_shares_fill_a_round(rates: list[float]) -> None:
    drives = [drive(at, rate) for at, rate in enumerate(rates)]
    units = share_units(drives)
    assert sum(units) == max(ROUND_UNITS, 2 * len(rates))
    assert min(units) >= 1
    for (one, rate), (other, slower) in zip(
        sorted(zip(units, rates, strict=True), key=lambda pair: pair[1])[1:],
        sorted(zip(units, rates, strict=True), key=lambda pair: pair[1]),
        strict=False,
    ):
        assert one >= other - 1
        assert rate >= slower


def test_the_smallest_for_its_share_limits_all() -> None:
    assert usable_bytes([drive("a", budget=7)]) == 7
    assert usable_bytes([drive("a", budget=GIB), drive("b", budget=3 * GIB)]) == 2 * GIB
    assert usable_bytes([drive("a", 3e9, 3 * GIB), drive("b", 1e9, 3 * GIB)]) == 4 * GIB
    assert usable_bytes([drive("a", budget=GIB), drive("b", budget=0)]) == 0


def test_shares_of_drives_are_those_of_stripes() -> None:
    drives = [drive("a", 3e9, 300 * MIB), drive("b", 1e9, 100 * MIB)]
    sizes = Stripes(units=share_units(drives)).sizes(usable_bytes(drives))
    assert UNIT_BYTES == STRIPE_BYTES
    assert all(size <= d.budget_bytes for size, d in zip(sizes, drives, strict=True))


def test_several_folders_are_granted_one_by_one() -> None:
    machine = with_drives(drive("a"), drive("b"))
    disk = disk_of(with_budget(machine, parse_budget("disk=b:3GiB,disk=a:1GiB")))
    assert [each.budget_bytes for each in disk.drives] == [GIB, 3 * GIB]
    assert (disk.path, disk.budget_bytes) == ("a", 2 * GIB)
    disk = disk_of(with_budget(machine, parse_budget("disk=b,disk=a")))
    assert disk.budget_bytes == 2 * GIB
    with pytest.raises(InputError, match=r"has 10\.0 GiB"):
        with_budget(machine, parse_budget("disk=b:9GiB,disk=a:9GiB"))


def test_one_folder_keeps_its_drive() -> None:
    machine = with_drives(drive("a", 7e9))
    disk = disk_of(with_budget(machine, parse_budget("disk=elsewhere:1MiB")))
    assert disk.drives == (drive("elsewhere", 7e9, MIB),)
    assert (disk.path, disk.budget_bytes) == ("elsewhere", MIB)


@pytest.mark.parametrize("text", ["disk=a", "disk=a,disk=c", "disk=1GiB"])
def test_folders_that_were_not_measured_together_are_refused(text: str) -> None:
    machine = with_drives(drive("a"), drive("b"))
    with pytest.raises(InputError, match="was measured with a, b") as caught:
        with_budget(machine, parse_budget(text))
    assert "packhorse probe --budget disk=" in str(caught.value)
    with pytest.raises(InputError, match="was measured with scratch"):
        with_budget(CPU, parse_budget("disk=a,disk=b"))


def test_space_is_checked_for_each_folder(tmp_path: Path) -> None:
    paths = str(tmp_path / "a"), str(tmp_path / "b")
    machine = with_drives(*(drive(path) for path in paths))
    small = ",".join(f"disk={path}:32MiB" for path in paths)
    disk = disk_of(with_budget(machine, parse_budget(small), here=True))
    assert disk.budget_bytes == 64 * MIB
    free = find_disk(tmp_path).free_bytes
    huge = f"disk={paths[0]}:32MiB,disk={paths[1]}:{free + GIB}"
    with pytest.raises(InputError, match=r"but .* are free") as caught:
        with_budget(machine, parse_budget(huge), here=True)
    assert paths[1] in str(caught.value.where)
    Path(paths[1]).write_text("")
    with pytest.raises(InputError, match="it is no folder"):
        with_budget(machine, parse_budget(small), here=True)


def test_folders_of_one_file_system_share_what_is_free(tmp_path: Path) -> None:
    free = free_disk_bytes([str(tmp_path / "a"), str(tmp_path / "b")])
    whole = find_disk(tmp_path).free_bytes
    assert all(abs(part - whole // 2) < GIB for part in free.values())


def test_what_scratch_files_take_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    status = os.statvfs(tmp_path)
    monkeypatch.setattr("packhorse.machine.disks.os.statvfs", lambda _: status)
    before = find_disk(tmp_path).free_bytes
    with claim_scratch(tmp_path) as folder:
        folder.create_file("state", 8 * MIB).close()
        (tmp_path / "mine.bin").write_bytes(bytes(MIB))
        assert 8 * MIB <= find_disk(tmp_path).free_bytes - before < 9 * MIB
