import errno
import os
from pathlib import Path

import pytest

from packhorse.errors import StorageError
from packhorse.storage.durable import commit_folder, fsync_folder, write_durably
from packhorse.storage.space import ensure_space, free_bytes, nearest_folder


def test_writes_texts_and_bytes_and_replaces(tmp_path: Path) -> None:
    write_durably(tmp_path / "f", "one")
    write_durably(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write_durably(tmp_path / "f", "old")
    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StorageError, match=r"cannot write 3 B: Input/output error"):
        write_durably(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_content_is_on_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_sync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        order.append("rename")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    part = tmp_path / "step.tmp"
    (part / "sub").mkdir(parents=True)
    (part / "sub" / "weights").write_bytes(b"w")
    (part / "state").write_bytes(b"s")
    commit_folder(part, tmp_path / "step")
    assert order == ["weights", "sub", "state", "step.tmp", "rename", tmp_path.name]
    assert (tmp_path / "step" / "sub" / "weights").read_bytes() == b"w"


def test_a_taken_name_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(StorageError, match="its final name is taken"):
        commit_folder(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_dir()
    fsync_folder(tmp_path)


def test_space_is_checked_for_paths_that_do_not_exist_yet(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there"
    assert nearest_folder(path) == tmp_path
    have = free_bytes(path)
    assert have > 0
    ensure_space(path, 0, "a checkpoint")
    with pytest.raises(StorageError, match="a checkpoint does not fit on the disk: need") as caught:
        ensure_space(path, have * 2, "a checkpoint")
    assert caught.value.exit_code == 4
    assert str(path) in str(caught.value)
