from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_cases import (
    add_config,
    cut_pieces,
    make_layout,
    make_plan,
    make_run,
    make_values,
)

from packhorse.checkpoint.folders import clean_leftovers, find_checkpoints, newest_complete
from packhorse.checkpoint.resume import SavedRun
from packhorse.checkpoint.save import save_checkpoint
from packhorse.errors import StorageError
from packhorse.storage import space

LAYOUT = make_layout(256)


class Killed(BaseException):
    """Stands for the end of the process: no handler of the product may rely on it."""


class Fuse:
    """Lets calls of `os` functions through until one of them is the `at`-th."""

    NAMES = (
        "pwrite",
        "fdatasync",
        "fsync",
        "rename",
        "replace",
        "mkdir",
        "unlink",
        "rmdir",
        "open",
    )

    def __init__(self, at: int | None, failure: BaseException) -> None:
        self.at = at
        self.failure = failure
        self.count = 0

    def arm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.at is not None and self.count >= self.at:
                raise self.failure
            return real(*args, **kwargs)

        return call


def save(output_dir: Path, step: int, *, limit: int | None = None) -> Path:
    return save_checkpoint(
        output_dir,
        make_run(step),
        make_plan(LAYOUT),
        cut_pieces(make_values(step), LAYOUT),
        add_files=add_config,
        save_total_limit=limit,
    )


def check_whole(path: Path, step: int) -> None:
    with SavedRun(path) as saved:
        assert saved.run == make_run(step)
        for piece in cut_pieces(make_values(step), LAYOUT):
            target = torch.zeros_like(piece.values)
            stop = piece.start + piece.values.numel()
            saved.read_into(piece.parameter, piece.state, piece.start, stop, target)
            assert torch.equal(target, piece.values)


def count_calls(folder: Path, **options) -> int:
    fuse = Fuse(None, Killed())
    with pytest.MonkeyPatch.context() as patch:
        fuse.arm(patch)
        save(folder, 2, **options)
    return fuse.count


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("again", [False, True], ids=["new", "same_step"])
def test_killed_at_any_call(tmp_path: Path, limit: int | None, again: bool) -> None:
    base = tmp_path / "base"
    save(base, 1)
    if again:
        save(base, 2)
    shutil.copytree(base, tmp_path / "count")
    num_calls = count_calls(tmp_path / "count", limit=limit)
    assert num_calls > 30
    for at in range(1, num_calls + 1):
        folder = tmp_path / f"run{at}"
        shutil.copytree(base, folder)
        with pytest.MonkeyPatch.context() as patch:
            Fuse(at, Killed()).arm(patch)
            # After the fuse has blown every further call fails too, as in a process that is gone.
            with pytest.raises(Killed):
                save(folder, 2, limit=limit)
        clean_leftovers(folder)
        newest = newest_complete(folder)
        assert newest.skipped == ()
        assert newest.path is not None
        check_whole(newest.path, int(newest.path.name.removeprefix("checkpoint-")))
        assert again <= (newest.path.name == "checkpoint-2")
        names = {path.name for path in folder.iterdir()}
        assert names <= {"checkpoint-1", "checkpoint-2"}
        check_whole(save(folder, 2), 2)
        shutil.rmtree(folder)


def test_full_disk_at_any_write(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        fuse = Fuse(None, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        fuse.NAMES = ("pwrite", "fdatasync")
        fuse.arm(patch)
        for at in range(1, 200):
            fuse.at, fuse.count = at, 0
            try:
                save(tmp_path, 2)
            except StorageError as error:
                assert "the disk is full: cannot" in str(error)  # noqa: PT017
                assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
            else:
                break
    assert at > 20
    check_whole(tmp_path / "checkpoint-1", 1)
    check_whole(tmp_path / "checkpoint-2", 2)


def test_too_small_a_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free_bytes", lambda _path: 1000)
    with pytest.raises(StorageError, match=r"saving checkpoint-2 does not fit.* have 1000 B"):
        save(tmp_path / "run", 2)
    assert list((tmp_path / "run").iterdir()) == []


CHILD = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoint_crash import save
folder = Path(sys.argv[1])
"""


def start_child(code: str, folder: Path, **options) -> subprocess.Popen:
    script = CHILD.format(tests=str(Path(__file__).parent)) + code
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_sigkill_while_saving(tmp_path: Path) -> None:
    save(tmp_path, 1)
    code = "step = 2\nwhile True:\n    save(folder, step, limit=2)\n    print(step, flush=True)\n"
    code += "    step += 1\n"
    with start_child(code, tmp_path) as child:
        assert child.stdout is not None
        last = [int(child.stdout.readline()) for _ in range(5)][-1]
        child.send_signal(signal.SIGKILL)
        last = max([last, *map(int, child.stdout.read().split())])
    clean_leftovers(tmp_path)
    newest = newest_complete(tmp_path)
    assert newest.skipped == ()
    assert newest.path is not None
    step = int(newest.path.name.removeprefix("checkpoint-"))
    assert step >= last
    check_whole(newest.path, step)
    assert len(find_checkpoints(tmp_path)) <= 3


def test_file_size_limit_is_a_storage_error(tmp_path: Path) -> None:
    code = (
        "from packhorse.errors import StorageError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n    save(folder, 2)\nexcept StorageError as error:\n    print(error)\n"
    )
    save(tmp_path, 1)
    with start_child(code, tmp_path) as child:
        out, err = child.communicate()
    assert "model.safetensors" in out, err
    assert "cannot allocate" in out
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


MEMORY = """
import torch
from packhorse.checkpoint.resume import SavedRun
from packhorse.checkpoint.save import Piece, save_checkpoint
from packhorse.checkpoint.header import TensorSpec
from packhorse.checkpoint.tensor_plan import StateTensor, TensorPlan
from checkpoint_cases import add_config, make_run

torch.set_num_threads(1)
NUM, SHAPE, CUT = 16, (2048, 1024), 512 * 1024
spec = lambda name, dtype: TensorSpec(name=name, dtype=dtype, shape=SHAPE)
plan = TensorPlan(
    model=tuple(
        StateTensor(spec=spec(f"p{i}", "bfloat16"), parameter=f"p{i}", state="param")
        for i in range(NUM)
    ),
    optimizer=tuple(
        StateTensor(spec=spec(f"p{i}/master", "float32"), parameter=f"p{i}", state="param")
        for i in range(NUM)
    ),
)
values = torch.linspace(-1, 1, CUT)
warm = TensorPlan(model=plan.model[:1], optimizer=plan.optimizer[:1])
pieces = lambda n: (
    Piece(parameter=f"p{i}", state="param", start=start, values=values)
    for i in range(n)
    for start in range(0, SHAPE[0] * SHAPE[1], CUT)
)
save_checkpoint(folder, make_run(1), warm, pieces(1), add_files=add_config)

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

before = peak_kib()
path = save_checkpoint(folder, make_run(2), plan, pieces(NUM), add_files=add_config)
saved = peak_kib()
target = torch.empty(CUT)
with SavedRun(path) as run:
    for i in range(NUM):
        for start in range(0, SHAPE[0] * SHAPE[1], CUT):
            run.read_into(f"p{i}", "param", start, start + CUT, target)
            assert torch.equal(target, values)
print(saved - before, peak_kib() - before, sum(f.stat().st_size for f in path.iterdir()) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_of_a_large_save_and_load_is_small(tmp_path: Path) -> None:
    with start_child(MEMORY, tmp_path) as child:
        out, err = child.communicate()
    assert child.returncode == 0, err
    save_kib, load_kib, file_kib = map(int, out.split())
    assert file_kib >= 192 * 1024
    assert save_kib <= 4 * 1024
    assert load_kib <= 8 * 1024
