import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import FileFormatError, InputError
from packhorse.machine.catalogue import list_known_machines, load_known_machine
from packhorse.machine.files import format_machine, parse_machine, read_machine, write_machine
from packhorse.machine.spec import Drive, Heap, Link, Machine, MatmulPoint, Saving, Tier, UpdateRate

rates = st.floats(1e-3, 1e18, allow_nan=False, allow_infinity=False)
SAVING = {"write_bytes_per_s": 1e9, "checksum_bytes_per_s": 1e9, "sync_ns": 0}
savings = st.builds(
    Saving,
    write_bytes_per_s=rates,
    checksum_bytes_per_s=rates,
    sync_ns=st.integers(0, 10**9),
)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@st.composite
def drives_at(draw: st.DrawFn, path: str) -> tuple[Drive, ...]:
    others = draw(st.lists(texts.filter(lambda text: text != path), max_size=2, unique=True))
    return tuple(
        Drive(
            path=folder,
            budget_bytes=draw(st.integers(0, 2**60)),
            read_bytes_per_s=draw(rates),
            write_bytes_per_s=draw(rates),
            measured_bytes=draw(st.integers(0, 2**40)),
            direct=draw(st.booleans()),
            block_bytes=4096 * draw(st.integers(1, 8192)),
            num_threads=draw(st.integers(1, 16)),
            huge_pages=draw(st.booleans()),
        )
        for folder in draw(st.sampled_from([(), (path, *others)]))
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    names = draw(st.sampled_from([("device",), ("device", "disk"), ("device", "host", "disk")]))
    tiers = []
    for name in names:
        total = draw(st.integers(0, 2**60))
        path = draw(texts) if name == "disk" else None
        tiers.append(
            Tier(
                name=name,
                total_bytes=total,
                budget_bytes=draw(st.integers(0, total)),
                path=path,
                drives=draw(drives_at(path)) if path else (),
            )
        )
    links = [
        Link(
            source=source,
            target=target,
            bytes_per_s=draw(rates),
            latency_ns=draw(st.integers(0, 10**9)),
            mixed_bytes_per_s=draw(st.none() | rates),
            burst_bytes_per_s=draw(st.none() | rates),
            core_ns_per_byte=draw(st.none() | st.floats(0, 100)),
        )
        for source in names
        for target in names
        if source != target
    ]
    return Machine(
        name=draw(texts),
        source=draw(st.sampled_from(["probe", "catalogue", "hand"])),
        fingerprint=draw(texts),
        measured_at=draw(texts),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        num_cores=draw(st.integers(1, 512)),
        num_threads=draw(st.integers(1, 512)),
        bf16_native=draw(st.booleans()),
        tiers=tuple(tiers),
        links=tuple(links),
        matmul=tuple(
            MatmulPoint(dtype="float32", size=size, flops_per_s=draw(rates))
            for size in draw(st.lists(st.integers(1, 10**5), min_size=1, max_size=3))
        ),
        memory_bytes_per_s=draw(rates),
        updates=(UpdateRate(tier="device", parameters_per_s=draw(rates)),),
        heap=Heap(map_cost=draw(st.floats(0, 10)), keep_slack=draw(st.floats(0, 10))),
        saving=draw(st.none() | savings),
        busy_share=draw(st.floats(0, 1)),
    )


@given(machines())
def test_round_trip_through_json_and_yaml(machine: Machine) -> None:
    text = format_machine(machine)
    assert parse_machine(text) == machine
    assert parse_machine(yaml.safe_dump(json.loads(text))) == machine
    assert format_machine(parse_machine(text)) == text


def body() -> dict[str, Any]:
    return json.loads(format_machine(load_known_machine("rtx-4090")))


def refuse(content: dict[str, Any]) -> FileFormatError:
    with pytest.raises(FileFormatError) as caught:
        parse_machine(json.dumps(content), where="m.json")
    assert "m.json" in str(caught.value.where)
    return caught.value


def test_file_starts_with_kind_and_version() -> None:
    assert list(body())[:2] == ["kind", "version"]


def test_newer_version_and_other_kind_are_refused_by_name() -> None:
    assert "version 3; this program reads versions up to 2" in refuse(body() | {"version": 3}).what
    assert (
        "'packhorse/plan', not 'packhorse/machine'"
        in refuse(body() | {"kind": "packhorse/plan"}).what
    )
    assert "version None" in refuse({"kind": "packhorse/machine"}).what


def test_unknown_keys_name_the_nearest() -> None:
    error = refuse(body() | {"num_core": 3})
    assert (error.what, error.fix) == ("unknown key 'num_core'", "did you mean 'num_cores'?")
    content = body()
    content["tiers"][1]["budget_byte"] = 1
    error = refuse(content)
    assert error.where == "m.json: tiers[1]"
    assert error.fix == "did you mean 'budget_bytes'?"
    content = body()
    content["heap"]["zzz"] = 1
    assert refuse(content).fix == "the keys are: map_cost, keep_slack"


def test_missing_and_ill_typed_keys_are_named() -> None:
    content = body()
    del content["links"][2]["latency_ns"]
    assert refuse(content).what == "key 'links[2].latency_ns' is missing"
    content = body()
    content["num_cores"] = "many"
    assert "key 'num_cores'" in refuse(content).what
    assert "'many'" in refuse(content).what
    assert "key 'links'" in refuse(body() | {"links": 4}).what


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes_per_s": -1.0}, "a rate must be a positive number, not -1.0"),
        ({"num_threads": 0}, "must be at least 1"),
        ({"matmul": []}, "at least one point"),
        ({"tiers": []}, "a tier named device"),
        ({"heap": {"map_cost": -0.1, "keep_slack": 0}}, "a share must be 0 or more"),
        ({"busy_share": 1.5}, "a share must be 0 to 1, not 1.5"),
        ({"saving": SAVING | {"write_bytes_per_s": 0}}, "a rate must be a positive number"),
        ({"saving": SAVING | {"sync_ns": -1}}, "a time cannot be negative"),
        ({"saving": SAVING | {"rate": 1}}, "unknown key 'rate'"),
    ],
)
def test_values_that_make_no_sense(change: dict[str, Any], words: str) -> None:
    assert words in refuse(body() | change).what


def test_parts_that_do_not_fit_together() -> None:
    content = body()
    content["tiers"][0]["budget_bytes"] = content["tiers"][0]["total_bytes"] + 1
    assert "the budget of tier device" in refuse(content).what
    content = body()
    content["tiers"].pop(1)
    assert "there is no tier named host" in refuse(content).what
    content = body()
    content["tiers"][1]["name"] = "device"
    assert "is there twice" in refuse(content).what
    content = body()
    content["tiers"][2]["path"] = None
    assert "path of a scratch folder" in refuse(content).what


def test_yaml_numbers_without_a_dot_and_damage() -> None:
    text = yaml.safe_dump(body()).replace(
        "memory_bytes_per_s: 806400000000.0", "memory_bytes_per_s: 8e11"
    )
    assert "8e11" in text
    assert parse_machine(text).memory_bytes_per_s == 8e11
    for broken in ("{", "a: [", "- 1\n", ""):
        with pytest.raises(FileFormatError):
            parse_machine(broken)


def test_files(tmp_path: Path) -> None:
    machine = load_known_machine("laptop-16gb")
    for name in ("m.json", "m.yaml"):
        write_machine(machine, tmp_path / name)
        assert read_machine(tmp_path / name) == machine
    assert (tmp_path / "m.yaml").read_text().startswith("kind: packhorse/machine\n")
    with pytest.raises(FileFormatError, match="No such file") as caught:
        read_machine(tmp_path / "none.json")
    assert "packhorse probe" in str(caught.value)
    with pytest.raises(FileFormatError, match="cannot write"):
        write_machine(machine, tmp_path / "no" / "m.json")


def test_the_endurance_of_a_drive_may_be_given() -> None:
    content = yaml.safe_load(format_machine(load_known_machine("laptop-16gb")))
    disk = next(tier for tier in content["tiers"] if tier["name"] == "disk")
    disk["endurance_bytes"] = 600 * 10**12
    tier = parse_machine(yaml.safe_dump(content)).tier("disk")
    assert tier is not None
    assert tier.endurance_bytes == 600 * 10**12
    disk["endurance_bytes"] = 0
    with pytest.raises(FileFormatError, match="endurance must be above 0"):
        parse_machine(yaml.safe_dump(content))


def test_catalogue_loads_and_makes_sense() -> None:
    names = list_known_machines()
    assert {"laptop-16gb", "rtx-4090", "rtx-3060-12gb", "a100-80gb", "h100-80gb", "h200"} <= {
        *names
    }
    for name in names:
        machine = load_known_machine(name)
        assert (machine.name, machine.source) == (name, "catalogue")
        assert {point.dtype for point in machine.matmul} == {"float32", "bfloat16"}
        near = "device" if machine.device == "cpu" else "host"
        for ends in ((near, "disk"), ("disk", near)):
            assert machine.link(*ends) is not None
        for tier in machine.tiers:
            if tier.name != "disk":
                assert any(update.tier == tier.name for update in machine.updates)


def test_catalogue_names_the_nearest() -> None:
    with pytest.raises(InputError, match="no machine named 'rtx4090'") as caught:
        load_known_machine("rtx4090")
    assert "did you mean 'rtx-4090'?" in str(caught.value)


def drive(**other: Any) -> dict[str, Any]:
    return {
        "path": "scratch",
        "budget_bytes": 10,
        "read_bytes_per_s": 2e9,
        "write_bytes_per_s": 1e9,
        "measured_bytes": 10,
        "direct": True,
        "block_bytes": 8388608,
        "num_threads": 1,
        "huge_pages": True,
        **other,
    }


@pytest.mark.parametrize(
    ("drives", "where", "words"),
    [
        ([drive(path="other")], "tiers[2].drives[0].path", "at the tier's path, 'scratch'"),
        ([drive(), drive()], "tiers[2].drives[1].path", "a folder of its own"),
        ([drive(read_bytes_per_s=0)], "tiers[2].drives[0].read_bytes_per_s", "positive number"),
        ([drive(budget_bytes=-1)], "tiers[2].drives[0]", "cannot be negative"),
        ([drive(block_bytes=1000)], "tiers[2].drives[0].block_bytes", "a multiple of 4096"),
        ([drive(num_threads=0)], "tiers[2].drives[0].num_threads", "1 to 16"),
        ([drive(num_thread=1)], "tiers[2].drives[0]", "unknown key 'num_thread'"),
    ],
)
def test_drives_are_checked(drives: list[dict[str, Any]], where: str, words: str) -> None:
    content = body()
    content["tiers"][2]["drives"] = drives
    error = refuse(content)
    assert words in error.what
    assert error.where == f"m.json: {where}"


def test_only_the_disk_has_drives() -> None:
    content = body()
    content["tiers"][1] |= {"path": "scratch", "drives": [drive()]}
    assert "only the disk tier has drives, not host" in refuse(content).what


def test_files_of_version_1_are_read() -> None:
    content = body() | {"version": 1}
    for tier in content["tiers"]:
        del tier["drives"]
    for link in content["links"]:
        del link["mixed_bytes_per_s"], link["burst_bytes_per_s"]
    machine = parse_machine(json.dumps(content))
    assert machine == load_known_machine("rtx-4090")
    assert machine.links[0].mixed_bytes_per_s is None


def test_impossible_times_of_a_core_are_refused() -> None:
    content = body()
    content["links"][3]["core_ns_per_byte"] = 0.0
    parse_machine(json.dumps(content))
    content["links"][3]["core_ns_per_byte"] = -0.1
    error = refuse(content)
    assert error.what == "a core's time must be 0 or more, not -0.1"
    assert error.where is not None
    assert error.where.endswith("links[3].core_ns_per_byte")


def test_impossible_mixed_rates_are_refused() -> None:
    content = body()
    content["links"][3]["mixed_bytes_per_s"] = 0.0
    assert "a rate must be a positive number" in refuse(content).what
