"""What a save is predicted to take: bytes, rate, checksum, syncs, and what has to be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.spec import Saving
from packhorse.profile.analytic import estimate_profile
from packhorse.program.tasks import Export
from packhorse.search.save_time import (
    NUM_SYNCS,
    USUAL_CHECKSUM_BYTES_PER_S,
    USUAL_SYNC_NS,
    predict_save_ns,
    save_ns_per_byte,
)
from packhorse.simulator.costs import TASK_NS
from packhorse.units import MIB

MODEL = make_model(num_layers=3, hidden=256, vocabulary=512)
SAVING = Saving(write_bytes_per_s=4e8, checksum_bytes_per_s=2e9, sync_ns=3_000_000)
MACHINE = replace(load_known_machine("laptop-16gb"), memory_bytes_per_s=1e10, saving=SAVING)
FILE_BYTES = 200 * MIB


def make(tier="device"):
    plan = make_plan(
        MODEL,
        chunk_bytes=1 << 20,
        parameters=[tier],
        optimizer=[tier],
        activations=["keep"],
        num_microbatches=1,
    )
    return replace(plan, budget_bytes={"device": 256 * MIB, "disk": 256 * MIB})


def predict(plan, machine=MACHINE, file_bytes=FILE_BYTES):
    return predict_save_ns(
        plan, MODEL, estimate_profile(MODEL, machine), machine, file_bytes=file_bytes
    )


def with_write_rate(machine, bytes_per_s):
    links = tuple(
        replace(link, bytes_per_s=bytes_per_s) if link.target == "disk" else link
        for link in machine.links
    )
    return replace(machine, links=links)


def test_a_byte_is_converted_summed_and_written_by_one_thread():
    fast_drive = with_write_rate(MACHINE, 3e9)
    # Through the page cache it is slower than by a plan's own transfers.
    assert save_ns_per_byte(fast_drive) == pytest.approx(1 / 0.4 + 1 / 2 + 2 / 10)
    # A drive that is known to be slower in the long run counts with that.
    assert save_ns_per_byte(with_write_rate(MACHINE, 1e8)) == pytest.approx(1 / 0.1 + 1 / 2 + 0.2)


def test_bytes_syncs_and_tasks_add_up_where_nothing_has_to_be_read():
    plan = make()
    machine = with_write_rate(MACHINE, 3e9)
    tasks = lower_plan(plan, MODEL, "save").tasks
    assert {type(task) for task in tasks} == {Export}
    expected_ns = FILE_BYTES * 3.2 + NUM_SYNCS * 3_000_000 + len(tasks) * TASK_NS
    assert predict(plan, machine) == pytest.approx(expected_ns, rel=1e-3)
    twice_ns = predict(plan, machine, 2 * FILE_BYTES) - predict(plan, machine)
    assert twice_ns == pytest.approx(FILE_BYTES * 3.2, rel=1e-3)


def test_states_on_the_disk_are_read_first():
    slow = tuple(
        replace(link, bytes_per_s=1e6) if link.source == "disk" else link for link in MACHINE.links
    )
    machine = replace(MACHINE, links=slow)
    states_bytes = sum(
        buffer.size_bytes
        for name, buffer in lower_plan(make("disk"), MODEL, "save").buffers.items()
        if buffer.home == "disk"
    )
    assert states_bytes > MIB
    assert predict(make("disk"), machine) > states_bytes * 1e9 / 1e6
    assert predict(make(), machine) < states_bytes * 1e9 / 1e6


def test_what_nobody_measured_has_usual_costs():
    unmeasured = replace(with_write_rate(MACHINE, 1e9), saving=None)
    per_byte = save_ns_per_byte(unmeasured)
    assert per_byte == pytest.approx(1 + 1e9 / USUAL_CHECKSUM_BYTES_PER_S + 0.2)
    plan = make()
    least_ns = FILE_BYTES * per_byte + NUM_SYNCS * USUAL_SYNC_NS
    assert predict(plan, unmeasured) == pytest.approx(least_ns, rel=0.01)
    nothing_known = replace(unmeasured, links=())
    assert predict(plan, nothing_known) is None
