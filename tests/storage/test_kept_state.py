"""Whatever a record says, it is told what is kept, or why nothing can be read: never believed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import InputError, StorageError
from packhorse.storage import stripes
from packhorse.storage.extents import lay_out_extents
from packhorse.storage.kept_check import find_stale
from packhorse.storage.kept_layout import describe_layout, read_layout, second
from packhorse.storage.kept_state import (
    KeptState,
    Unreadable,
    find_kept,
    refuse_unreadable,
    remove_kept,
)
from packhorse.storage.page_marks import mark_pages
from packhorse.storage.record import Entry, create_record, open_record, read_record
from packhorse.storage.scratch_space import Scratch, ScratchPart, claim_space

PAGE = 4096
# Frozen, in two slots, moved every step, in two slots.
SIZES = {"param/0": 3 * PAGE, "exp_avg/1": 5 * PAGE + 12, "grad/1": PAGE, "param/1": 4 * PAGE}
SLOTTED = ("exp_avg/1", "param/1")
ONE = ("a",)
THREE = ("a", "b", "c")


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "UNIT_BYTES", PAGE)


def keep(root: Path, names: tuple[str, ...], *steps: int) -> Path:
    """Keep the state after some steps in some folders; gives the first folder."""
    folders = [root / name for name in names]
    scratch = Scratch(parts=tuple(ScratchPart(folder=folder) for folder in folders))
    extents = lay_out_extents(SIZES | {second(name): SIZES[name] for name in SLOTTED})
    with claim_space(scratch) as space:
        header = {"owner": "run", **describe_layout(space, extents, ("param/0",))}
        layout = read_layout(header)
        record = create_record(space.file_path("record"), header, num_buffers=len(layout.marked))
        with space.create_file("state", extents.total_bytes) as file:
            for number, step in enumerate(steps):
                slot = number % 2
                marks: list[int] = []
                for name in layout.marked:
                    extent = extents[second(name) if slot and name in SLOTTED else name]
                    age = step if name in SLOTTED else 0
                    content = f"{name} {age} ".encode() * (extent.size_bytes // 4)
                    file.write_from(content, extent.offset_bytes, extent.size_bytes)
                    marks.append(mark_pages(content, extent.size_bytes))
                record.add(
                    Entry(step=step, slots=(slot,) * len(SLOTTED), state={}, marks=tuple(marks))
                )
        record.close()
    return folders[0]


def kept_in(folder: Path) -> KeptState:
    ((kept,), unreadable) = find_kept(folder)
    assert unreadable == ()
    return kept


def unreadable_in(folder: Path) -> Unreadable:
    found, (unreadable,) = find_kept(folder)
    assert found == ()
    return unreadable


@pytest.mark.parametrize("names", [ONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize("steps", [(1,), (1, 2), (1, 2, 3)])
def test_what_was_written_is_not_stale(
    tmp_path: Path, names: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    kept = kept_in(keep(tmp_path, names, *steps))
    assert kept.entry.step == steps[-1]
    assert kept.layout.marked == ("exp_avg/1", "param/1", "param/0")
    assert find_stale(kept) is None
    assert len(kept.files) == len(names) + 1
    remove_kept(kept)
    assert not any(tmp_path.rglob("*.scratch"))


@pytest.mark.parametrize("name", ["exp_avg/1", "param/1", "param/0"])
@pytest.mark.parametrize("names", [ONE, THREE], ids=["one", "three"])
def test_a_page_that_was_never_written_is_found(
    tmp_path: Path, names: tuple[str, ...], name: str
) -> None:
    kept = kept_in(keep(tmp_path, names, 1, 2))
    _, *offsets = kept.layout.buffers[name]
    for piece in kept.layout.stripes.pieces(offsets[-1], PAGE):
        with (kept.file, *kept.parts)[piece.file].open("r+b") as file:
            file.seek(piece.offset_bytes)
            file.write(bytes(PAGE))
    assert find_stale(kept) == name


def test_what_steps_write_after_the_kept_one_does_not_count(tmp_path: Path) -> None:
    kept = kept_in(keep(tmp_path, ONE, 1, 2))
    with kept.file.open("r+b") as file:
        for name in ("grad/1", *SLOTTED):
            size_bytes, first, *_ = kept.layout.buffers[name]
            file.seek(first)
            file.write(bytes(size_bytes))
    assert find_stale(kept) is None


def test_a_part_of_an_older_step_is_found(tmp_path: Path) -> None:
    first = keep(tmp_path, THREE, 1, 2, 3)
    kept = kept_in(first)
    newer = [path.read_bytes() for path in (kept.file, *kept.parts)]
    keep(tmp_path, THREE, 1, 2, 4)
    kept = kept_in(first)
    assert find_stale(kept) is None
    for path, content in zip((kept.file, *kept.parts), newer, strict=True):
        mine = path.read_bytes()
        path.write_bytes(content)
        assert find_stale(kept) is not None
        path.write_bytes(mine)
    assert find_stale(kept) is None


def test_drives_that_changed_places_are_told(tmp_path: Path) -> None:
    first = keep(tmp_path, THREE, 1)
    (tmp_path / "b").rename(tmp_path / "x")
    (tmp_path / "c").rename(tmp_path / "b")
    (tmp_path / "x").rename(tmp_path / "c")
    found = unreadable_in(first)
    assert found.may_return
    assert "is missing" in found.reason
    (tmp_path / "b").rename(tmp_path / "x")
    (tmp_path / "c").rename(tmp_path / "b")
    (tmp_path / "x").rename(tmp_path / "c")
    assert find_stale(kept_in(first)) is None


def rename(path: Path) -> None:
    path.rename(path.with_suffix(".mine"))


def link(path: Path) -> None:
    rename(path)
    path.symlink_to(path.with_suffix(".mine"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - PAGE)


def extend(path: Path) -> None:
    os.truncate(path, path.stat().st_size + PAGE)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unmount(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize(
    ("damage", "may_return", "reason"),
    [
        (rename, True, "is missing"),
        (replace_by_folder, True, "is missing"),
        (link, True, "is a link"),
        (truncate, False, "bytes, not"),
        (extend, False, "bytes, not"),
        (unmount, True, "is missing"),
    ],
)
def test_a_part_that_is_not_as_it_was_is_named(
    tmp_path: Path, part: int, damage: Callable[[Path], None], may_return: bool, reason: str
) -> None:
    kept = kept_in(keep(tmp_path, THREE, 1))
    if damage is unmount and not part:
        return  # nothing says then that anything was kept
    path = (kept.file, *kept.parts)[part]
    damage(path)
    found = unreadable_in(tmp_path / "a")
    assert (found.may_return, found.owner, found.step) == (may_return, "run", 1)
    assert found.files == kept.files
    assert str(path) in found.reason
    assert reason in found.reason
    refusal = refuse_unreadable(found, tmp_path / "a")
    assert isinstance(refusal, InputError)
    assert "the state of the run in run after step 1, which cannot be read" in str(refusal)
    assert f"packhorse clean {tmp_path / 'a'}" in str(refusal)


def test_another_version_is_left_to_who_can_read_it(tmp_path: Path) -> None:
    first = keep(tmp_path, ONE, 1)
    for version in (0, 1, 3, 10**30, "two", None, True):
        rewrite(first / "packhorse-record.scratch", header={"version": version})
        found = unreadable_in(first)
        assert found.may_return
        assert f"has version {version!r}"[:30] in found.reason


_HEAD = struct.Struct("<8sII")


def rewrite(
    path: Path,
    *,
    header: Mapping[str, object] | None = None,
    layout: Mapping[str, object] | None = None,
    entry: Mapping[str, object] | None = None,
) -> None:
    """Change a record as one would who knows its checksums."""
    content = path.read_bytes()
    said, start = unpack(content)
    entry_bytes = (len(content) - start) // 2
    said["header"] |= layout or {}
    said |= header or {}
    body, _ = unpack(content[start:])
    body |= entry or {}
    blocks = pack(said).ljust(-(-len(pack(said)) // PAGE) * PAGE, b"\0")
    path.write_bytes(blocks + 2 * pack(body).ljust(entry_bytes, b"\0"))


def unpack(block: bytes) -> tuple[dict[str, Any], int]:
    _, length, _ = _HEAD.unpack_from(block)
    return json.loads(block[_HEAD.size : _HEAD.size + length]), -(
        -(_HEAD.size + length) // PAGE
    ) * PAGE


def pack(content: object) -> bytes:
    body = json.dumps(content, separators=(",", ":")).encode()
    return _HEAD.pack(b"PHRECORD", len(body), zlib.crc32(body)) + body


def nest(depth: int) -> object:
    return [nest(depth - 1)] if depth else []


HEADERS: dict[str, tuple[object, ...]] = {
    "entry_bytes": (-1, 1.5, "x", None, True, 10**40),
    "header": (None, [], "x", {}, {"owner": 3}),
}
LAYOUTS: dict[str, tuple[object, ...]] = {
    "file_bytes": (-1, 10**40, "8192", None, True, float("nan")),
    "units": (
        [0, 1, 1], [1, 1], [1, -1, 1], [1, 10**30, 1], [True, 1, 1], ["1", 1, 1], 3, None,
    ),
    "folders": (["b", "c"], ["/b"], ["/b", 3], ["/b\0", "/c"], ["/a/../b", "/c"], {}, None),
    "tag": ("", "../../xx", "0123456/", "00000000\n", 12345678, None),
    "buffers": (
        None, [], {}, {"param/0": 3}, {"param/0": []}, {"param/0": [PAGE]},
        {"param/0": [PAGE, 5]}, {"param/0": [PAGE, -PAGE]}, {"param/0": [10**40, 0]},
        {"param/0": [PAGE, 1 << 50]}, {"param/0": [PAGE, 0, PAGE, PAGE]}, {"param/0": ["a", 0]},
    ),
    "fixed": (None, {}, ["nobody"], ["exp_avg/1"], [3], nest(400)),
}  # fmt: skip
ENTRIES: dict[str, tuple[object, ...]] = {
    "number": (-1, None, "1", True),
    "step": (-1, 1.5, None, "1", True),
    "slots": ("", "0", "000", "02", "0x", [0, 0], None, 10),
    "marks": ("", "0" * 8, "0" * 23, "g" * 24, None, 3),
    "state": (None, [], "x"),
}
HOSTILE: list[dict[str, Mapping[str, object]]] = [
    {where: {key: value}}
    for where, keys in (("header", HEADERS), ("layout", LAYOUTS), ("entry", ENTRIES))
    for key, values in keys.items()
    for value in values
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: str(change)[:60])
def test_a_hostile_record_is_named_and_touches_nothing(
    tmp_path: Path, change: dict[str, Mapping[str, object]]
) -> None:
    first = keep(tmp_path, THREE, 1)
    rewrite(first / "packhorse-record.scratch", **change)
    found = unreadable_in(first)
    assert found.reason
    assert not found.may_return
    remove_kept(found)
    left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.scratch")}
    assert left <= {"b", "c"}


def test_a_rewritten_record_is_read_as_before(tmp_path: Path) -> None:
    """What the hostile ones are made of is not refused by itself."""
    first = keep(tmp_path, THREE, 1)
    before = kept_in(first)
    rewrite(first / "packhorse-record.scratch")
    assert kept_in(first) == before
    assert find_stale(before) is None


def test_a_record_that_is_no_record_is_named(tmp_path: Path) -> None:
    first = keep(tmp_path, ONE, 1)
    record = first / "packhorse-record.scratch"
    whole = record.read_bytes()
    deep = b"[" * 100_000
    for content in (b"", b"x", whole[:10], whole[:-1][:100], bytes(8192), os.urandom(8192),
                    _HEAD.pack(b"PHRECORD", len(deep), zlib.crc32(deep)) + deep):  # fmt: skip
        record.write_bytes(content)
        assert not unreadable_in(first).may_return
    with record.open("wb") as file:
        file.truncate(1 << 40)
    assert "more than" in unreadable_in(first).reason


def test_a_record_that_is_removed_or_replaced_under_a_run_is_told(tmp_path: Path) -> None:
    record = open_record(keep(tmp_path, ONE, 1) / "packhorse-record.scratch")
    entry = read_record(record.path).entry
    assert entry is not None
    record.add(entry)
    content = record.path.read_bytes()
    for replace in (False, True):
        record.path.unlink()
        if replace:
            record.path.write_bytes(content)
        with pytest.raises(Exception, match="changed under the run: it was removed or replaced"):
            record.add(entry)
        record.path.write_bytes(content)
    record.remove()
    assert record.path.exists()  # it is another's


@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_this_user_may_not_read_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    first = keep(tmp_path, THREE, 1)
    path = kept_in(first).files[part]
    inner = os.access

    def refuse(asked: Path, mode: int) -> bool:
        return asked != path and inner(asked, mode)

    monkeypatch.setattr(os, "access", refuse)
    found = unreadable_in(first)
    assert found.may_return
    assert f"may not read {path}" in found.reason


def test_what_may_not_be_written_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_in(keep(tmp_path, THREE, 1))
    inner = os.open

    def refuse(path: Path, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return inner(path, flags, *rest)

    def fail(path: Path, *, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    assert find_stale(kept) is None
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(StorageError, match="cannot remove kept state: Read-only file system"):
        remove_kept(kept)
