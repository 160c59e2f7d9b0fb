from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import FileFormatError, InputError
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.cluster import Cluster, find_link, give_links, link_all
from packhorse.machine.cluster_files import (
    format_cluster,
    parse_cluster,
    read_cluster,
    write_cluster,
)
from packhorse.machine.files import write_machine
from packhorse.machine.spec import PeerLink
from tests.machine.test_machine_files import machines, rates, texts

SAMPLE = Path(__file__).parents[2] / "machines" / "eight-unlike-ranks.yaml"
LINK = {"bytes_per_s": 1e9, "latency_ns": 5}


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    ranks = draw(st.lists(machines(), min_size=1, max_size=3))
    pairs = [(a, b) for a in range(len(ranks)) for b in range(len(ranks)) if a != b]
    links = {
        (source, target): PeerLink(
            peer=target,
            bytes_per_s=draw(rates),
            latency_ns=draw(st.integers(0, 10**9)),
            core_ns_per_byte=draw(st.floats(0, 100)),
        )
        for source, target in pairs
        if draw(st.booleans())
    }
    return Cluster(
        name=draw(texts),
        ranks=give_links(ranks, links),
        hosts=tuple(draw(texts) for _ in ranks),
    )


@given(clusters())
def test_round_trip_through_json_and_yaml(cluster: Cluster) -> None:
    text = format_cluster(cluster)
    assert parse_cluster(text) == cluster
    assert parse_cluster(yaml.safe_dump(json.loads(text))) == cluster
    assert format_cluster(parse_cluster(text)) == text


def short(**other: Any) -> dict[str, Any]:
    return {
        "kind": "packhorse/cluster",
        "version": 1,
        "name": "few",
        "ranks": [{"machine": "h200", "count": 2}, {"machine": "laptop-16gb", "host": "desk"}],
        "links": {"all": LINK},
        **other,
    }


def parse(content: dict[str, Any], folder: Path | None = None) -> Cluster:
    return parse_cluster(json.dumps(content), where="c.yaml", folder=folder)


def refuse(content: dict[str, Any]) -> FileFormatError:
    with pytest.raises(FileFormatError) as caught:
        parse(content)
    assert "c.yaml" in str(caught.value.where)
    return caught.value


def test_the_short_form_is_what_it_says() -> None:
    cluster = parse(short())
    assert [machine.name for machine in cluster.ranks] == ["h200", "h200", "laptop-16gb"]
    assert cluster.hosts == ("host-0", "host-0", "desk")
    assert cluster.links == link_all(3, PeerLink(peer=0, **LINK))
    assert cluster.ranks[0].tiers == load_known_machine("h200").tiers


def test_links_within_and_between_hosts() -> None:
    fast, slow = LINK | {"bytes_per_s": 9e9}, LINK | {"core_ns_per_byte": 0.5}
    cluster = parse(short(links={"within_host": fast, "between_hosts": slow}))
    assert cluster.links[0, 1] == PeerLink(peer=1, **fast)
    assert cluster.links[2, 1] == PeerLink(peer=1, **slow)
    near = parse(short(links={"within_host": fast})).links
    assert set(near) == {(0, 1), (1, 0)}
    with pytest.raises(InputError, match="no link from rank 0 to rank 2"):
        find_link(near, 0, 2)


def test_a_link_of_its_own_goes_before_the_rule_for_all() -> None:
    whole = json.loads(format_cluster(parse(short())))
    own = PeerLink(peer=2, bytes_per_s=7.0, latency_ns=3)
    whole["ranks"][0]["machine"]["peers"] = [{"peer": 2, "bytes_per_s": 7.0, "latency_ns": 3}]
    cluster = parse(whole | {"links": {"all": LINK}})
    assert cluster.links == {**link_all(3, PeerLink(peer=0, **LINK)), (0, 2): own}


def test_machines_come_from_files_beside_it_and_have_budgets(tmp_path: Path) -> None:
    write_machine(load_known_machine("rtx-4090"), tmp_path / "mine.json")
    budgets = ("device=3GiB,host=2GiB", {"device": "3GiB", "host": "2GiB"})
    entries = [{"machine": "mine.json", "budget": budget} for budget in budgets]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(short(ranks=entries)))
    cluster = read_cluster(tmp_path / "c.yaml")
    for machine in cluster.ranks:
        tiers = {tier.name: tier.budget_bytes for tier in machine.tiers}
        assert (machine.name, tiers["device"], tiers["host"]) == ("rtx-4090", 3 << 30, 2 << 30)
    (tmp_path / "mine.json").write_text(json.dumps({"kind": "packhorse/machine", "version": 9}))
    with pytest.raises(FileFormatError, match="machine file has version 9") as caught:
        read_cluster(tmp_path / "c.yaml")
    assert caught.value.where == (
        f"{tmp_path / 'mine.json'}\nnamed in {tmp_path / 'c.yaml'}: ranks[0].machine"
    )


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        ({"version": 2}, "c.yaml", "cluster file has version 2; this program reads versions up"),
        ({"kind": "packhorse/plan"}, "c.yaml", "no cluster file: its kind is 'packhorse/plan'"),
        ({"rank": []}, "c.yaml", "unknown key 'rank'"),
        ({"ranks": []}, "c.yaml: ranks", "at least one rank"),
        ({"ranks": [{"machines": "h200"}]}, "c.yaml: ranks[0]", "unknown key 'machines'"),
        ({"ranks": [{"count": 2}]}, "c.yaml", "key 'ranks[0].machine' is missing"),
        ({"ranks": [{"machine": 7}]}, "c.yaml: ranks[0].machine", "a machine cannot be 7"),
        (
            {"ranks": [{"machine": "h20"}]},
            "c.yaml: ranks[0].machine",
            "no machine named 'h20' in the catalogue",
        ),
        (
            {"ranks": [{"machine": "h200", "count": 0}]},
            "c.yaml: ranks[0].count",
            "must be at least 1, not 0",
        ),
        (
            {"ranks": [{"machine": "h200", "count": 10**7}]},
            "c.yaml: ranks",
            "10000000 ranks are more than 4096",
        ),
        (
            {"ranks": [{"machine": "h200", "budget": "device=999GiB"}]},
            "c.yaml: ranks[0].budget: device",
            "the budget of tier device is 999 GiB",
        ),
        ({"links": {"any": LINK}}, "c.yaml: links", "unknown key 'any'"),
        ({"links": {"all": {"rate": 1}}}, "c.yaml: links.all", "unknown key 'rate'"),
        ({"links": {"all": {"latency_ns": 1}}}, "c.yaml", "'links.all.bytes_per_s' is missing"),
        (
            {"links": {"all": LINK | {"bytes_per_s": 0}}},
            "c.yaml: links.all.bytes_per_s",
            "a rate must be a positive number, not 0",
        ),
        (
            {"links": {"within_host": LINK | {"latency_ns": -1}}},
            "c.yaml: links.within_host.latency_ns",
            "a latency cannot be negative",
        ),
        ({"links": {"all": LINK, "within_host": LINK}}, "c.yaml: links", "all is there beside"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], where: str, words: str) -> None:
    error = refuse(short() | change)
    assert words in error.what
    assert error.where == where
    assert error.fix


@pytest.mark.parametrize(
    ("peers", "where", "words"),
    [
        ([{"peer": 9}], "rank 1, peers[0]", "there is no rank 9: the last one is 2"),
        ([{"peer": 0}, {"peer": 1}], "rank 1, peers[1]", "rank 1 has a link to itself"),
        (
            [{"peer": 2}, {"peer": 2}],
            "ranks[1].machine: peers[1].peer",
            "a second link to rank 2",
        ),
        ([{"peer": -1}], "ranks[1].machine: peers[0].peer", "there is no rank -1"),
        ([{"per": 0}], "ranks[1].machine: peers[0]", "unknown key 'per'"),
        (
            [{"peer": 0, "core_ns_per_byte": -1}],
            "ranks[1].machine: peers[0].core_ns_per_byte",
            "a core's time must be 0 or more",
        ),
    ],
)
def test_links_that_lead_nowhere(peers: list[dict[str, Any]], where: str, words: str) -> None:
    content = json.loads(format_cluster(parse(short())))
    content["ranks"][1]["machine"]["peers"] = [LINK | peer for peer in peers]
    error = refuse(content)
    assert words in error.what
    assert error.where == f"c.yaml: {where}"


def test_files(tmp_path: Path) -> None:
    cluster = read_cluster(SAMPLE)
    assert (cluster.num_ranks, len(cluster.links)) == (8, 56)
    for name in ("c.json", "c.yaml"):
        write_cluster(cluster, tmp_path / name)
        assert read_cluster(tmp_path / name) == cluster
    with pytest.raises(FileFormatError, match="cannot read the cluster file: No such file"):
        read_cluster(tmp_path / "none.json")
    with pytest.raises(FileFormatError, match="cannot write the cluster file"):
        write_cluster(cluster, tmp_path / "no" / "c.json")
