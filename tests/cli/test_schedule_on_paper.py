"""`packhorse schedule --model`: a model on ranks that are not there, the whole way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import make_model
from picture_texts import assert_texts_are_apart

from packhorse.cli.rank_link import ASSUMED, choose_link, read_link
from packhorse.errors import InputError
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.spec import PeerLink
from packhorse.model.files import format_model
from packhorse.report.svg import WIDTH
from packhorse.schedule.csv_text import parse_csv

SIZES = ("--ranks", 4, "--microbatches", 8)


@pytest.fixture
def model_path(tmp_path):
    """Ten layers, an embedding and a head; large enough that computing outweighs issuing."""
    path = tmp_path / "model.json"
    model = make_model(num_layers=10, hidden=4096, vocabulary=4096, length=512, halved=True)
    path.write_text(format_model(model), encoding="utf-8")
    return path


@pytest.fixture
def on_paper(shell, model_path):
    def run(name, *arguments, sizes=SIZES):
        options = ("--model", model_path, "--machine", "rtx-4090", *arguments)
        return shell("schedule", name, *sizes, *options)

    return run


def test_one_command_goes_the_whole_way(on_paper, tmp_path):
    svg, csv = tmp_path / "step.svg", tmp_path / "step.csv"
    done = on_paper("1f1b", "--replicas", 16, "--svg", svg, "--csv", csv)
    assert done.code == 0, done.err
    assert done.out.startswith("toy, 1f1b: 4 ranks, 4 stages, 8 microbatches, 16 replicas\nrank 0")
    said = " ".join(done.out.split())
    assert "one of 16 replicas, all alike: 64 ranks in all, 128 microbatches a step" in said
    assert "times of blocks: estimated for rtx-4090" in said
    assert "links between ranks: 12.5 GB/s each way after 10.0 us, assumed: give --link" in said
    assert "fullest: rank " in said
    assert all(f" {part} " in said for part in ("cut", "lower", "verify", "simulate"))
    assert f"wrote {svg}, {csv}" in done.err
    assert_texts_are_apart(svg.read_text(), WIDTH)
    assert "all-reduce" in svg.read_text()
    assert parse_csv(csv.read_text()).num_tasks == 2 * 4 * 8


def test_what_is_told_of_it_adds_up(on_paper):
    told = on_paper("1f1b", "--json").document
    assert told["bounds"][0] == 0
    assert told["bounds"][-1] == 12
    assert len(told["peak_bytes"]) == told["ranks"] == 4
    assert told["fullest_rank"] == told["peak_bytes"].index(max(told["peak_bytes"]))
    assert max(told["peak_bytes"]) <= told["budget_bytes"]
    tokens = 8 * 512
    assert told["tokens_per_s"] == pytest.approx(tokens * 1e9 / told["step_ns"])
    assert told["bubble"] == pytest.approx(sum(told["bubble_of_rank"]) / 4)
    assert list(told["taken_s"]) == ["read", "cut", "lower", "verify", "simulate", "draw"]
    # States of all ranks: float32 parameters, gradients and two moments.
    num_parameters = 10 * 4096 * 4098 + 2 * 4096 * 4096
    assert sum(told["peak_bytes"]) > 16 * num_parameters


def test_replicas_lengthen_the_step_by_what_the_last_sum_takes(on_paper):
    alone = on_paper("1f1b", "--link", "1GB/s", "--json").document
    many = on_paper("1f1b", "--link", "1GB/s", "--replicas", 4, "--json").document
    assert many["tasks"] == alone["tasks"]
    assert many["peak_bytes"] == alone["peak_bytes"]
    assert many["placement"]["3"] == [3, 7, 11, 15]
    tokens = 4 * 8 * 512
    assert many["tokens_per_s"] == pytest.approx(tokens * 1e9 / many["step_ns"])
    # Rank 0 ends last, and sums its gradients behind its last backward: the embedding's and those
    # of its layers, three quarters of them there and back.
    num_elements = 4096 * 4096 + (many["bounds"][1] - 1) * 4096 * 4098
    longer_ns = many["step_ns"] - alone["step_ns"]
    assert longer_ns == pytest.approx(2 * 3 / 4 * num_elements * 4, rel=0.02)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1", "zb-v", "searched"])
def test_any_schedule_goes_the_whole_way(on_paper, name):
    done = on_paper(name, "--json", sizes=("--ranks", 2, "--microbatches", 5))
    assert done.code == 0, done.err
    told = done.document
    assert 0 < told["bubble"] < 0.5
    assert told["stages"] + 1 == len(told["bounds"])


def test_a_memory_that_is_too_small_recomputes_or_refuses(on_paper):
    sizes = ("--ranks", 4, "--microbatches", 64)
    roomy = on_paper("gpipe", "--json", sizes=sizes).document
    assert not any(roomy["recomputes"])
    # A little more than the states, workspace and the inputs of blocks need.
    budget = f"device={max(roomy['peak_bytes']) * 7 // 10}"
    tight = on_paper("gpipe", "--budget", budget, "--json", sizes=sizes).document
    assert any(tight["recomputes"])
    assert max(tight["peak_bytes"]) <= tight["budget_bytes"]
    assert tight["step_ns"] > roomy["step_ns"]
    done = on_paper("gpipe", "--budget", "device=600MiB", sizes=sizes)
    assert (done.code, done.out) == (3, "")
    assert "toy does not fit its 4 ranks" in done.err


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("1f1b", ("--costs", "F=1"), "--costs has no effect with --model"),
        ("1f1b", ("--memory-cap", "3"), "--memory-cap has no effect with --model"),
        ("1f1b", ("--link", "fast"), "'fast' is no link between ranks"),
        ("1f1b", ("--ranks", 13), "toy has 12 blocks and cannot be cut into 13 stages"),
        ("searched", ("--stages", 4), "--stages is for a schedule that leaves their number open"),
    ],
)
def test_what_cannot_be_done_ends_with_2(on_paper, name, arguments, said):
    done = on_paper(name, *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_a_model_needs_a_schedule(shell, model_path):
    done = shell("schedule", *SIZES, "--model", model_path)
    assert done.code == 2
    assert "--model is for one schedule" in done.err


def test_links_as_typed():
    assert read_link("25GB, 5us") == PeerLink(peer=0, bytes_per_s=25e9, latency_ns=5000)
    assert read_link("1GB/s") == PeerLink(peer=0, bytes_per_s=1e9, latency_ns=0)
    for text in ("", "25GB,", "25GB,5", "0", "25GB,5h"):
        with pytest.raises(InputError, match="is no link"):
            read_link(text)
    machine = load_known_machine("h200")
    assert choose_link(None, machine)[0] == ASSUMED
    peers = tuple(
        PeerLink(peer=at, bytes_per_s=rate, latency_ns=7) for at, rate in enumerate((3e9, 2e9))
    )
    link, words = choose_link(None, replace(machine, peers=peers))
    assert link == PeerLink(peer=0, bytes_per_s=2e9, latency_ns=7)
    assert words.endswith("the slowest of h200")
