"""The plan.json of several ranks: round trip, hand edits, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

from packhorse.errors import FileFormatError
from packhorse.plan.rank_files import format_rank_plans, parse_rank_plans, read_rank_plans
from packhorse.plan.ranks import Rejected
from tests.support.rank_sets import make_case

PLANS = replace(
    make_case().plans,
    rejected=(Rejected(name="gpipe", num_stages=2, because="3.00 ms a step, 8.0 % longer"),),
)


def edited(change):
    content = json.loads(format_rank_plans(PLANS))
    change(content)
    return json.dumps(content)


def test_round_trip():
    assert parse_rank_plans(format_rank_plans(PLANS)) == PLANS
    unpredicted = replace(PLANS, step_ns=None, compute_ns=(), rejected=())
    assert parse_rank_plans(format_rank_plans(unpredicted)) == unpredicted
    assert unpredicted.idle is None


def test_yaml_is_read_alike():
    assert parse_rank_plans(yaml.safe_dump(json.loads(format_rank_plans(PLANS)))) == PLANS


def test_every_rank_has_the_pipeline():
    read = parse_rank_plans(format_rank_plans(PLANS))
    assert [plan.pipeline for plan in read.ranks] == [PLANS.pipeline] * 2
    assert json.loads(format_rank_plans(PLANS))["orders"][0].startswith("0F0,")


def test_an_edit_by_hand_is_taken():
    def change(content):
        content["ranks"][1]["heap"] = {"value": "map", "because": "tried"}

    read = parse_rank_plans(edited(change))
    assert (read.ranks[1].heap.value, read.ranks[1].heap.because) == ("map", "tried")
    assert read.ranks[0] == PLANS.ranks[0]


def set_to(*keys, value):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop_task(content):
    cells = content["orders"][1].split(",")
    content["orders"][1] = ",".join(cells[:-1])


def swap_backward(content):
    # The first backward of rank 0 before its forward: the rank would wait for itself.
    cells = content["orders"][0].split(",")
    cells.insert(0, cells.pop(cells.index("0B0")))
    content["orders"][0] = ",".join(cells)


@pytest.mark.parametrize(
    ("change", "what", "where"),
    [
        (set_to("order", value=[]), "unknown key 'order'", "plan: order"),
        (set_to("ranks", 1, "heaps", value="map"), "unknown key 'heaps'", "ranks[1].heaps"),
        (set_to("rejected", 0, "why", value=""), "unknown key 'why'", "rejected[0].why"),
        (set_to("version", value=9), "version 9", "plan"),
        (set_to("kind", value="packhorse/plan"), "no plan of several ranks", "plan"),
        (set_to("orders", 0, value="0F0,zero"), "'zero' is no task", "row 1, column 2"),
        (drop_task, "the orders are no schedule", "plan: orders"),
        (swap_backward, "the orders are no schedule", "plan: orders"),
        (set_to("bounds", "value", value=[0, 3]), "[0, 3] are not the bounds of 2", "bounds"),
        (set_to("bounds", "value", value=[0, 8, 8]), "are not the bounds", "bounds"),
        (set_to("bounds", "value", value=[1, 4, 8]), "are not the bounds", "bounds"),
        (set_to("step_ns", value="soon"), "step_ns", "step_ns"),
        (set_to("ranks", value=[]), "plans of 0 ranks and orders of 2", "plan: ranks"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change, what, where):
    with pytest.raises(FileFormatError) as refused:
        parse_rank_plans(edited(change))
    assert what in str(refused.value)
    assert where in (refused.value.where or "")
    assert refused.value.fix


def test_a_file_that_is_not_there_or_no_notation(tmp_path):
    with pytest.raises(FileFormatError, match="the plan cannot be read"):
        read_rank_plans(tmp_path / "plan.json")
    with pytest.raises(FileFormatError, match="neither JSON nor YAML"):
        parse_rank_plans("{")
    path = tmp_path / "plan.json"
    path.write_text(format_rank_plans(PLANS))
    assert read_rank_plans(path) == PLANS
