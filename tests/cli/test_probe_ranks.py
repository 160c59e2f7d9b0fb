"""`packhorse probe` under torchrun: one spawn of two ranks, with short measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import run_shell
from torch.distributed import HashStore

from packhorse.cli.probe_ranks import cluster_table, naming_peer
from packhorse.cli.screen import Screen
from packhorse.errors import PeerLostError
from packhorse.machine.cluster_files import read_cluster
from packhorse.runtime.transport.meeting import Attendee, Meeting
from packhorse.runtime.transport.seats import Seat
from packhorse.units import MIB

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "support" / "short_probe.py"


def test_two_processes_make_one_file(tmp_path: Path) -> None:
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(WORKER), "probe", "--file-size", "1MiB", "--json"),
        *("--budget", "device=600MiB,disk=scratch:20MiB", "--out", "found/cluster.json"),
    )
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ
        | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # One rank speaks: one document, one word of the file.
    document = json.loads(done.stdout)
    assert done.stderr.count("wrote found/cluster.json") == 1
    cluster = read_cluster(tmp_path / "found" / "cluster.json")
    assert document["cluster"]["name"] == cluster.name == "2 ranks on 1 host"
    assert len(set(cluster.hosts)) == 1
    assert set(cluster.links) == {(0, 1), (1, 0)}
    for machine in cluster.ranks:
        budgets = {tier.name: tier.budget_bytes for tier in machine.tiers}
        assert budgets == {"device": 300 * MIB, "disk": 10 * MIB}
        assert machine.source == "probe"
    for link in cluster.links.values():
        assert link.bytes_per_s > 1e6
        # On a busy machine it says little, but it is said.
        assert 0 < link.core_ns_per_byte < 1000
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("packhorse-probe-")]
    assert run_shell("check", tmp_path / "found" / "cluster.json").code == 0


def test_the_table_has_a_line_for_ranks_and_links_that_are_alike(capsys) -> None:
    cluster = read_cluster(ROOT / "machines" / "eight-unlike-ranks.yaml")
    Screen().show(cluster_table(cluster))
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("0-3 big a100-80gb", "4-7 small rtx-4090", "within big"):
        assert words in shown
    assert "small -> big 1.02 GiB/s 60.0 us 0.0 %" in shown


def test_a_peer_that_falls_silent_between_messages_is_named() -> None:
    attendees = tuple(
        Attendee(rank=rank, host=f"node-{rank}", address=f"10.0.0.{rank}", port=1, pid=rank)
        for rank in range(2)
    )
    meeting = Meeting(
        Seat(rank=0, num_ranks=2, local_rank=0, num_local=1, place="x"), HashStore(), ""
    )
    meeting.attendees = attendees
    with (
        pytest.raises(PeerLostError, match="rank 1 on host node-1") as caught,
        naming_peer(meeting, 1),
    ):
        raise PeerLostError("another rank is gone", where="sending to rank 1: timed out")
    assert caught.value.what == (
        "no more messages between rank 0 on host node-0 (10.0.0.0) and"
        " rank 1 on host node-1 (10.0.0.1): another rank is gone"
    )
    assert caught.value.where == "sending to rank 1: timed out"


def test_an_environment_that_is_half_torchruns_is_refused(shell, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    done = shell("probe")
    assert done.code == 2
    assert "LOCAL_WORLD_SIZE is missing" in done.err
