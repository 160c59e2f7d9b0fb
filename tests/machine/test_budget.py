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
    free_less_margin,
    parse_budget,
    parse_memory,
    with_budget,
)
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.disks import find_disk, takes_direct_io
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
                disk=DiskBudget(path="s", size_bytes=600 * GIB),
            ),
        ),
        (
            "device=22GiB, disk=600GiB",
            Budget(device_bytes=22 * GIB, disk=DiskBudget(path="scratch", size_bytes=600 * GIB)),
        ),
        ({"device": "1GiB", "disk": "x"}, Budget(device_bytes=GIB, disk=DiskBudget(path="x"))),
        ("disk=/a/b:2GiB", Budget(disk=DiskBudget(path="/a/b", size_bytes=2 * GIB))),
        ({"disk": {"path": "s"}}, Budget(disk=DiskBudget(path="s"))),
        ({"disk": Path("p")}, Budget(disk=DiskBudget(path="p"))),
        ({"disk": "./600Gib"}, Budget(disk=DiskBudget(path="./600Gib"))),
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
        ({"disk": []}, "exactly one"),
        ({"disk": [{"path": "a"}, {"path": "b"}]}, "exactly one"),
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
