"""plan.json: round trip, hand edits, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import FileFormatError, MismatchError
from packhorse.machine.spec import Drive
from packhorse.plan.files import format_plan, parse_plan, read_plan
from packhorse.plan.identity import check_plan
from packhorse.plan.spec import (
    BlockPlan,
    Choice,
    ChunkPlan,
    Numerics,
    OptimizerPlan,
    Piece,
    Plan,
    Prediction,
)
from tests.support.models import make_model, make_plan

TEXT = st.text(max_size=30)
COUNT = st.integers(1, 10**6)
SIZE = st.integers(0, 10**13)
RATE = st.floats(1e-3, 1e15)
DRIVES = st.builds(
    Drive,
    path=TEXT,
    budget_bytes=SIZE,
    read_bytes_per_s=RATE,
    write_bytes_per_s=RATE,
    measured_bytes=SIZE,
    direct=st.booleans(),
    block_bytes=SIZE,
    num_threads=COUNT,
    huge_pages=st.booleans(),
)
TIER = st.sampled_from(["device", "host", "disk"])


def choices(values):
    return st.builds(lambda value, because: Choice(value=value, because=because), values, TEXT)


def pieces():
    return st.builds(
        lambda name, start, length: Piece(parameter=name, start=start, stop=start + length),
        st.from_regex(r"[a-z][a-z0-9_.\[\]:-]{0,20}", fullmatch=True),
        SIZE,
        COUNT,
    )


def plans():
    causes = st.dictionaries(TEXT, SIZE, max_size=4)
    return st.builds(
        Plan,
        model=TEXT,
        model_name=TEXT,
        machine=TEXT,
        length=COUNT,
        budget_bytes=st.dictionaries(TIER, SIZE),
        base_bytes=SIZE,
        numerics=st.builds(
            Numerics,
            microbatch_rows=choices(COUNT),
            num_microbatches=COUNT,
            num_workers=COUNT,
            compute_dtype=TEXT,
            loss_chunk_tokens=choices(st.none() | COUNT),
            tied_sum=st.sampled_from(["per_microbatch", "per_step"]),
            attention=st.sampled_from(["causal", "eager", "native"]),
            num_threads=COUNT,
            device=TEXT,
            instructions=st.none() | TEXT,
        ),
        optimizer=st.builds(
            OptimizerPlan,
            name=st.sampled_from(["adamw", "sgd"]),
            states=st.lists(TEXT, max_size=3).map(tuple),
            master=st.booleans(),
            clips=st.booleans(),
        ),
        heap=choices(st.sampled_from(["keep", "map"])),
        heap_slack=st.floats(0, 2),
        chunk_bytes=choices(SIZE),
        chunks=st.lists(
            st.builds(
                ChunkPlan,
                pieces=st.lists(pieces(), max_size=3).map(tuple),
                group=TEXT,
                trainable=st.booleans(),
                parameters=choices(TIER),
                gradients=choices(TIER),
                optimizer=choices(TIER),
                update=choices(st.sampled_from(["device", "host"])),
            ),
            max_size=3,
        ).map(tuple),
        blocks=st.lists(
            st.builds(
                BlockPlan,
                name=TEXT,
                activations=choices(st.sampled_from(["keep", "recompute", "offload"])),
            ),
            max_size=3,
        ).map(tuple),
        pins=st.lists(TEXT, max_size=3).map(tuple),
        prediction=st.none()
        | st.builds(
            Prediction,
            step_ns=SIZE,
            peak_bytes=st.dictionaries(TIER, causes),
            time_ns=causes,
            lane_ns=causes,
            disk_read_bytes=SIZE,
            disk_written_bytes=SIZE,
            scratch_bytes=SIZE,
            bottleneck=TEXT,
        ),
        scratch=st.none() | TEXT,
        drives=st.lists(DRIVES, max_size=2).map(tuple),
        offload=choices(TIER),
        stride=choices(st.integers(0, 9)),
        prefetch=choices(st.integers(0, 9)),
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_round_trip(plan):
    text = format_plan(plan)
    assert parse_plan(text) == plan
    assert parse_plan(yaml.safe_dump(json.loads(text))) == plan


def toy_text():
    return format_plan(make_plan(make_model()))


def edit(**changes):
    content = json.loads(toy_text())
    content.update(changes)
    return json.dumps(content)


def test_is_readable():
    lines = toy_text().splitlines()
    assert max(map(len, lines)) <= 100
    choice = '"activations": {"value": "keep", "because": "a test"}'
    assert any('"name": "layers.1"' in line and choice in line for line in lines)


def test_bare_values_are_choices_by_hand(tmp_path):
    content = json.loads(toy_text())
    content["blocks"][1]["activations"] = "recompute"
    content["heap"] = {"value": "keep"}
    content["budget_bytes"]["device"] = "22GiB"
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(content))
    plan = read_plan(file)
    assert plan.blocks[1].activations == Choice(value="recompute", because="written by hand")
    assert plan.heap == Choice(value="keep", because="written by hand")
    assert plan.budget_bytes["device"] == 22 * 1024**3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (edit(version=2), ["version 2", "versions up to 1"]),
        (edit(kind="packhorse/machine"), ["packhorse/machine", "packhorse/plan"]),
        (edit(hepa="keep"), ["unknown key 'hepa'", "'heap'"]),
        (edit(heap="keeep"), ["heap is 'keeep'", "keep, map", "nearest is 'keep'"]),
        (edit(length=0), ["length is 0", "at least 1"]),
        (edit(length=True), ["length is True"]),
        (edit(blocks=[{"nam": "x", "activations": "keep"}]), ["blocks[0].name", "'nam'"]),
        (edit(chunks=[3]), ["chunks is 3", "mappings"]),
        (edit(budget_bytes={"device": "much"}), ["budget_bytes.device", "'much'"]),
        (edit(budget_bytes={"disc": 1}), ["unknown key 'disc'", "budget_bytes.disc"]),
        ("[1, 2]", ["no plan"]),
        ('{"kind": ', ["neither JSON nor YAML"]),
        ("a: [", ["neither JSON nor YAML"]),
    ],
)
def test_refuses_by_name(text, words):
    with pytest.raises(FileFormatError) as caught:
        parse_plan(text, where="my/plan.json")
    for word in [*words, "my/plan.json"]:
        assert word in str(caught.value)


def test_refuses_a_piece_that_is_none():
    content = json.loads(toy_text())
    content["chunks"][0]["pieces"] = ["embed.weight[5:5]"]
    with pytest.raises(FileFormatError, match=r"embed.weight\[5:5\].* is no piece"):
        parse_plan(json.dumps(content))


def test_refuses_a_missing_or_binary_file(tmp_path):
    with pytest.raises(FileFormatError, match="no such plan"):
        read_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="no text"):
        read_plan(tmp_path / "plan.json")


def test_a_plan_belongs_to_its_model():
    model = make_model()
    check_plan(make_plan(model), model)
    check_plan(make_plan(model, chunk_bytes=1024), model)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (make_model(num_layers=3), "block 3 is head in the plan, layers.3 in the model"),
        (make_model(num_layers=1), "block 2 is layers.2 in the plan, head in the model"),
        (make_model(hidden=64), "embed.weight has 2048 elements in the plan, 4096 in the model"),
        (make_model(tied_head=True), "parameter head.weight of the plan is not in the model"),
        (make_model(frozen=["embed"]), "embed.weight is trained in the plan, not in the model"),
        (make_model(rows=2), "microbatch_rows is 1 in the plan, 2 in the model"),
        (make_model(length=16), "length is 8 in the plan, 16 in the model"),
    ],
)
def test_a_plan_of_another_model_names_the_first_difference(other, words):
    with pytest.raises(MismatchError) as caught:
        check_plan(make_plan(make_model()), other)
    assert words in str(caught.value)


def test_a_plan_of_another_graph_names_the_fingerprints():
    from dataclasses import replace

    model = make_model()
    with pytest.raises(MismatchError, match="does not belong") as caught:
        check_plan(make_plan(model), replace(model, fingerprint="other"))
    assert "other in the model" in str(caught.value)


def test_a_piece_planned_twice_is_named():
    from dataclasses import replace

    model = make_model()
    plan = make_plan(model)
    twice = replace(plan, chunks=(plan.chunks[0], *plan.chunks))
    with pytest.raises(MismatchError) as caught:
        check_plan(twice, model)
    assert "not planned once" in str(caught.value)


def test_a_plan_from_before_updates_had_a_place_updates_in_the_device():
    content = json.loads(toy_text())
    del content["stride"]
    for chunk in content["chunks"]:
        del chunk["update"]
    plan = parse_plan(json.dumps(content))
    assert set(plan.update_tiers) == {"device"}


def test_every_kth_of_the_chunks_that_may_be_in_the_host_visits_the_device():
    def tiers(stride, update):
        plan = make_plan(make_model(num_layers=6), update=update, stride=stride)
        return "".join(tier[0] for tier in plan.update_tiers)

    num_chunks = len(make_plan(make_model(num_layers=6)).chunks)
    assert tiers(0, "host") == "h" * num_chunks
    assert tiers(1, "host") == "d" * num_chunks
    assert tiers(3, "host") == ("hhd" * num_chunks)[:num_chunks]
    assert tiers(2, ["device", "host"]) == ("dhdd" * num_chunks)[:num_chunks]
    assert tiers(4, "device") == "d" * num_chunks
