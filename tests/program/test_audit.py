"""The audit against a proof: another task, another ledger and a task too many end the run."""

from __future__ import annotations

import pytest

from packhorse.errors import AuditError
from packhorse.program.audit import check_against_proof
from packhorse.program.program import Proof, ProofEntry
from packhorse.program.tasks import Emit, Free

EMIT = Emit(buffer="value/loss@0")
FREE = Free(buffer="value/loss@0", tier="device")
PROOF = Proof(
    digest="0",
    entries=(
        ProofEntry(task=EMIT, used_bytes={"device": 4, "disk": 0}, peak_bytes={"device": 4}),
        ProofEntry(task=FREE, used_bytes={"device": 0, "disk": 0}, peak_bytes={"device": 4}),
    ),
)


def test_the_proved_run_passes() -> None:
    check_against_proof(PROOF, 0, EMIT, {"device": 4})
    check_against_proof(PROOF, 1, Free(buffer="value/loss@0", tier="device"), {})


def test_another_task_is_named_with_the_proved_one() -> None:
    with pytest.raises(AuditError) as caught:
        check_against_proof(PROOF, 1, EMIT, {"device": 4})
    assert str(caught.value).startswith("task 1 is not the task that was proved")
    assert "expected: FREE  value/loss@0        device" in str(caught.value)
    assert "actual:   EMIT  value/loss@0" in str(caught.value)


def test_another_ledger_is_named_to_the_byte() -> None:
    with pytest.raises(AuditError) as caught:
        check_against_proof(PROOF, 1, FREE, {"device": 1, "heap": 0})
    assert "task 1: FREE  value/loss@0        device" in str(caught.value)
    assert "pool device: expected 0 bytes, actual 1 bytes" in str(caught.value)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_task_outside_the_proof_is_refused(index: int) -> None:
    with pytest.raises(AuditError, match=f"task {index} ran, but the proved program has 2 tasks"):
        check_against_proof(PROOF, index, EMIT, {"device": 4})
