"""`packhorse train` under torchrun: ranks that are killed, stopped or refused, and what is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import pytest
from cli_cases import run_shell, write_tiny_recipe
from torch import Tensor

from packhorse.checkpoint.folders import find_checkpoints
from packhorse.machine.cluster import Cluster, give_links
from packhorse.machine.cluster_files import format_cluster
from packhorse.machine.files import read_machine
from packhorse.machine.spec import PeerLink
from packhorse.trainer.run_folder import read_metrics

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "support" / "failing_rank.py"
NUM_STEPS = 6
CURVE = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What the ranks said together, and the exit code of each that ended by itself."""

    text: str
    codes: dict[int, int]

    @property
    def errors(self) -> list[str]:
        return re.findall(r"^error: (.*)", self.text, re.MULTILINE)


def write_recipe(folder: Path, **changes: object) -> Path:
    """Write a recipe whose curve is the same for any number of ranks, and a file of two ranks."""
    own = {
        "per_device_train_batch_size": 1,
        "max_steps": NUM_STEPS,
        "eval_data": [str(folder / "rows.jsonl")],
        "eval_steps": 3,
        "plan": {"tied_sum": "per_step"},
    }
    path = write_tiny_recipe(folder, **(own | changes))
    machine = read_machine(folder / "machine.json")
    links = {
        (source, target): PeerLink(peer=target, bytes_per_s=1e9, latency_ns=20_000)
        for source, target in permutations(range(2), 2)
    }
    cluster = Cluster(name="two", ranks=give_links((machine,) * 2, links), hosts=("here",) * 2)
    (folder / "cluster.json").write_text(format_cluster(cluster))
    return path


def run_ranks(folder: Path, *arguments: str, fail: str = "- - -") -> Ended:
    """Train on two ranks, of which one fails as `failing_rank.py` says."""
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(WORKER), "train", "recipe.yaml", "--machine", "cluster.json", *arguments),
    )
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"FAIL": fail, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    found = {int(path.name[-1]): path for path in folder.glob("exit-code-?")}
    ended = Ended(
        text=done.stdout, codes={rank: int(path.read_text()) for rank, path in found.items()}
    )
    for path in found.values():
        path.unlink()
    return ended


def read_curve(run: Path) -> list[tuple[object, ...]]:
    return [tuple(line.get(name) for name in CURVE) for line in read_metrics(run / "metrics.jsonl")]


def read_weights(run: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert read_curve(one) == read_curve(other)
    weights = read_weights(other)
    for name, tensor in read_weights(one).items():
        assert tensor.equal(weights[name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same recipe on one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = write_recipe(folder)
    done = run_shell("train", path, "--machine", folder / "machine.json")
    assert done.code == 0, done.err
    return folder / "run"


def test_a_killed_rank_is_named_once_and_one_rank_goes_on(
    tmp_path: Path, undisturbed: Path
) -> None:
    path = write_recipe(tmp_path)
    ended = run_ranks(tmp_path, fail="1 SIGKILL evaluating after step 3")
    assert ended.codes == {0: 4}
    (error,) = ended.errors
    assert re.fullmatch(
        r"rank 1 on host \S+ \(\S+\): ended by SIGKILL; step 3 is the last that is finished", error
    )
    assert re.search(
        r"rank 0 on host \S+ \(\S+\): step 3 is finished; evaluating after", ended.text
    )
    # The launcher's own.
    assert ended.text.count("Traceback (most recent call last)") == 1
    assert "torchrun --nproc-per-node 2 -m packhorse train recipe.yaml --resume" in ended.text
    assert "ended by SIGKILL" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert [found.name for found in find_checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    done = run_shell("train", path, "--resume", "--machine", tmp_path / "machine.json")
    assert done.code == 0, done.err
    assert "resumed from" in done.out + done.err
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_signal_to_one_rank_stops_all_and_they_go_on(tmp_path: Path, undisturbed: Path) -> None:
    write_recipe(tmp_path)
    ended = run_ranks(tmp_path, fail="1 SIGTERM in step 3")
    assert ended.codes == {0: 75, 1: 75}
    assert ended.text.count("stopped by SIGTERM after step 3 of 6; the state is saved") == 1
    assert ended.errors == []
    gone_on = run_ranks(tmp_path, "--resume")
    assert gone_on.codes == {0: 0, 1: 0}, gone_on.text
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_refusal_is_told_once(tmp_path: Path) -> None:
    write_recipe(tmp_path, learning_rate="fast")
    ended = run_ranks(tmp_path)
    assert ended.codes == {0: 2, 1: 2}
    (error,) = ended.errors
    assert "learning_rate" in error
