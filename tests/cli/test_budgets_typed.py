"""What is typed about budgets, and what the recipe says of them."""

from __future__ import annotations

import pytest

from packhorse.cli.machines import merge_budgets
from packhorse.errors import InputError
from packhorse.machine.budget import DiskBudget, parse_budget

TWO = "disk=/a:1GiB,disk=/b:2GiB"


def merge(typed, granted):
    return merge_budgets(parse_budget(typed), parse_budget(granted))


def test_what_is_typed_wins():
    merged = merge("device=1GiB,disk=/c:3GiB", f"device=2GiB,{TWO}")
    assert (merged.device_bytes, merged.host_bytes) == (1 << 30, None)
    assert merged.disks == (DiskBudget(path="/c", size_bytes=3 << 30),)
    assert merge(TWO, "disk=/c").disks == parse_budget(TWO).disks


def test_the_recipe_fills_in():
    assert merge("device=1GiB", TWO).disks == parse_budget(TWO).disks
    assert merge(None, "host=1GiB").host_bytes == 1 << 30


def test_a_size_alone_keeps_the_folder_of_the_recipe():
    assert merge("disk=3GiB", "disk=/c").disks == (DiskBudget(path="/c", size_bytes=3 << 30),)
    with pytest.raises(InputError, match="a size alone was typed; the recipe names 2") as caught:
        merge("disk=3GiB", TWO)
    assert "disk=/a:SIZE,disk=/b:SIZE" in str(caught.value)


def test_probe_refuses_sizes_that_measure_nothing(shell, tmp_path):
    out = tmp_path / "m.json"
    done = shell("probe", "--file-size", "1KiB", "--out", out)
    assert done.code == 2
    assert "too little to measure a disk with" in done.err
    done = shell("probe", "--sustained", "--write-limit", "plenty", "--out", out)
    assert done.code == 2
    assert "--write-limit" in done.err
    assert not out.exists()
