"""What the compiler makes, the verifier accepts, and its text says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_cases import cases

from packhorse.compiler.lower import lower_plan
from packhorse.compiler.peak import peak_of
from packhorse.plan.spec import Choice
from packhorse.program.text import format_program, parse_program
from packhorse.verifier.rules import verify_program


@pytest.mark.parametrize("kind", ["train_step", "evaluate", "load", "save", "persist", "restore"])
@settings(max_examples=40)
@given(case=cases(), durable=st.sampled_from(["off", 1, 7]))
def test_every_lowered_program_is_verified(kind, case, durable):
    model, plan = case
    plan = replace(plan, durable=Choice(value=durable, because="drawn"))
    program = lower_plan(plan, model, kind)
    proof = verify_program(program, model)
    assert all(peak == peak_of(program)[pool] for pool, peak in proof.peak_bytes.items())
    assert parse_program(format_program(program)) == program
