import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse.errors import InputError, StorageError
from packhorse.storage.record import create_record
from packhorse.storage.scratch_folder import LOCK_NAME, claim_scratch, clean_scratch, find_leftovers
from packhorse.storage.scratch_space import Scratch, ScratchPart, claim_space

HOLDER = """
import sys
from packhorse.storage.scratch_folder import claim_scratch
folder = claim_scratch(sys.argv[1])
folder.create_file("states", 8192)
print("ready", flush=True)
sys.stdin.read()
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_second_run_is_refused_and_a_dead_one_is_cleaned(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    (tmp_path / "scratch").mkdir()
    (folder / "mine.txt").write_text("keep")
    with start_holder(folder) as process:
        with pytest.raises(InputError, match=f"in use by process {process.pid}") as caught:
            claim_scratch(folder)
        assert caught.value.where == str(folder)
        with pytest.raises(InputError, match="in use"):
            clean_scratch(folder)
        assert len(find_leftovers(folder)) == 1
        process.kill()
    (leftover,) = find_leftovers(folder)
    assert (leftover.path.name, leftover.size_bytes) == ("packhorse-states.scratch", 8192)
    assert clean_scratch(folder) == (leftover,)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_folder_is_made_and_can_be_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with claim_scratch(folder) as claimed:
        assert (folder / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        with claimed.create_file("x", 1) as file:
            assert file.path == claimed.file_path("x")
        assert [leftover.size_bytes for leftover in claimed.remove_files()] == [4096]
        with pytest.raises(InputError, match=str(os.getpid())):
            claim_scratch(folder)
    claim_scratch(folder).close()
    assert list(folder.iterdir()) == []


def test_nothing_to_clean(tmp_path: Path) -> None:
    assert clean_scratch(tmp_path / "none") == ()
    assert find_leftovers(tmp_path / "none") == ()


def test_a_full_disk_keeps_nobody_from_what_has_its_space_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock's own few bytes are for others to read; it holds without them."""

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        claimed = claim_scratch(tmp_path / "other")
    with pytest.raises(InputError, match=r"in use by process \(unknown\)"):
        claim_scratch(tmp_path / "other")
    claimed.close()
    claim_scratch(tmp_path / "other").close()


def test_a_drive_that_takes_no_more_writes_is_told_and_held_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = claim_scratch(tmp_path)
    file = claimed.create_file("states", 8192)
    record = create_record(claimed.file_path("record"), {}, num_buffers=1)

    def refuse(_path: Path, *, missing_ok: bool = False) -> None:
        del missing_ok
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for remove in (file.remove, record.remove, claimed.remove_files):
            with pytest.raises(StorageError, match=r"cannot remove .*: Read-only file system"):
                remove()
        claimed.close()
    with claim_scratch(tmp_path) as again:
        assert len(again.remove_files()) == 2


def test_a_folder_that_is_named_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for names in (("a", "a"), ("a", "b"), ("c", "c")):
        parts = tuple(ScratchPart(folder=tmp_path / name) for name in names)
        with pytest.raises(InputError, match="two of the scratch folders are the same"):
            claim_space(Scratch(parts=parts))
