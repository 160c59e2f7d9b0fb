"""What the compiler makes, the verifier accepts, and its text says the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from lowered_cases import cases

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.peak import peak_of
from packhorse.program.text import format_program, parse_program
from packhorse.verifier.rules import verify_program


@pytest.mark.parametrize("kind", ["train_step", "evaluate", "load", "save"])
@settings(max_examples=40)
@given(case=cases())
def test_every_lowered_program_is_verified(kind, case):
    model, plan = case
    program = lower_plan(plan, model, kind)
    proof = verify_program(program, model)
    assert all(peak == peak_of(program)[pool] for pool, peak in proof.peak_bytes.items())
    assert parse_program(format_program(program)) == program
