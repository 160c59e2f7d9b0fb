import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.storage.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping
from packhorse.storage.scratch_file import create_scratch_file
from packhorse.units import GIB, MIB


def process_resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_a_huge_reservation_costs_only_what_is_touched() -> None:
    before = process_resident_bytes()
    with Mapping(64 * GIB) as mapping:
        assert mapping.size_bytes == 64 * GIB
        assert mapping.resident_bytes(0, GIB) == 0
        mapping.view(40 * GIB, 4 * MIB)[:] = b"\x01" * (4 * MIB)
        assert mapping.resident_bytes(40 * GIB, GIB) == 4 * MIB
        assert process_resident_bytes() - before < 32 * MIB


def test_resident_falls_to_the_byte_after_drop() -> None:
    with Mapping(16 * MIB) as mapping:
        assert mapping.address % HUGE_PAGE_BYTES == 0
        mapping.view(0, 16 * MIB)[:] = b"\x07" * (16 * MIB)
        assert mapping.resident_bytes() == 16 * MIB
        before = process_resident_bytes()
        mapping.drop(2 * MIB, 8 * MIB)
        assert mapping.resident_bytes() == 8 * MIB
        assert mapping.resident_bytes(2 * MIB, 8 * MIB) == 0
        assert before - process_resident_bytes() == 8 * MIB
        mapping.drop(12 * MIB + PAGE_BYTES, PAGE_BYTES)
        assert mapping.resident_bytes() == 8 * MIB - PAGE_BYTES


def test_zeros_after_drop_and_neighbours_stay() -> None:
    with Mapping(3 * PAGE_BYTES) as mapping:
        mapping.view(0, 3 * PAGE_BYTES)[:] = b"\x09" * (3 * PAGE_BYTES)
        mapping.drop(PAGE_BYTES, PAGE_BYTES)
        content = bytes(mapping.view(0, 3 * PAGE_BYTES))
        assert content == b"\x09" * PAGE_BYTES + bytes(PAGE_BYTES) + b"\x09" * PAGE_BYTES


def test_loads_what_was_dropped_into_the_same_place(tmp_path: Path) -> None:
    with Mapping(8 * MIB) as mapping, create_scratch_file(tmp_path / "s", 8 * MIB) as file:
        view = mapping.view(2 * MIB, 4 * MIB)
        view[:] = bytes(range(256)) * (4 * MIB // 256)
        file.write_from(mapping.address + 2 * MIB, 0, 4 * MIB)
        mapping.drop(2 * MIB, 4 * MIB)
        assert not any(view[:: PAGE_BYTES + 1])
        mapping.drop(2 * MIB, 4 * MIB)
        file.read_into(mapping.address + 2 * MIB, 0, 4 * MIB)
        assert bytes(view) == bytes(range(256)) * (4 * MIB // 256)
        assert mapping.resident_bytes() == 4 * MIB


def test_close_gives_memory_back_though_views_live() -> None:
    mapping = Mapping(4 * MIB)
    view = mapping.view(0, 4 * MIB)
    view[:] = b"\x05" * (4 * MIB)
    before = process_resident_bytes()
    mapping.close()
    mapping.close()
    assert before - process_resident_bytes() == 4 * MIB
    assert view[0] == 0
    with pytest.raises(ValueError, match="closed"):
        mapping.view(0, 1)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Mapping(0)
    with Mapping(PAGE_BYTES) as mapping:
        with pytest.raises(ValueError, match="outside the mapping"):
            mapping.view(1, PAGE_BYTES)
        with pytest.raises(ValueError, match="multiples of"):
            mapping.drop(1, 1)


def test_refused_reservation_names_the_limit() -> None:
    script = (
        "import resource\n"
        "from packhorse.errors import RefusedError\n"
        "from packhorse.storage.mapping import Mapping\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB}))\n"
        f"try:\n    Mapping({8 * GIB})\n"
        "except RefusedError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "cannot reserve 8.00 GiB of address space" in done.stdout
    assert "ulimit -v" in done.stdout


_MOVE_WITHOUT_ROOM = """
import os, resource
from packhorse.errors import RefusedError
from packhorse.storage.mapping import HUGE_PAGE_BYTES, Mapping

with Mapping(4 * HUGE_PAGE_BYTES) as mapping:
    mapping.view(0, HUGE_PAGE_BYTES)[:] = bytes(HUGE_PAGE_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (HUGE_PAGE_BYTES, resource.RLIM_INFINITY))
    try:
        moved = mapping.move(0, 2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
    except RefusedError:
        os._exit(7)  # nothing else can be had either
    mapping.view(2 * HUGE_PAGE_BYTES, 1)[:] = b"x"
    os._exit(8 if moved else 9)
"""


def test_a_move_that_fails_leaves_no_hole_that_is_written_to() -> None:
    done = subprocess.run([sys.executable, "-c", _MOVE_WITHOUT_ROOM], check=False)
    assert done.returncode in (7, 9)


def test_pages_move_with_what_they_hold() -> None:
    with Mapping(4 * HUGE_PAGE_BYTES) as mapping:
        mapping.view(0, HUGE_PAGE_BYTES)[:] = b"a" * HUGE_PAGE_BYTES
        assert mapping.move(0, 2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
        assert bytes(mapping.view(2 * HUGE_PAGE_BYTES, 3)) == b"aaa"
        assert mapping.resident_bytes(0, HUGE_PAGE_BYTES) == 0
        assert bytes(mapping.view(0, 3)) == bytes(3)
        with pytest.raises(ValueError, match="multiples of 4096"):
            mapping.move(1, 2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)
