"""Programs that run backwards in halves: what the rules reject, by their names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edits import change, change_buffer, drop, find, insert, move, reject, repeat
from halved_orders import ORDERS, in_turn, two_later
from models import make_model, make_plan

from packhorse.compiler.lower import Lowerer
from packhorse.errors import RefusedError, RuleError
from packhorse.program.buffers import split_state, stash_id
from packhorse.program.program import Program
from packhorse.program.tasks import Backward, InputGrad, Recompute, WeightGrad
from packhorse.verifier.order import check_order
from packhorse.verifier.outline import outline_program
from packhorse.verifier.rules import verify_program

TIED = {"num_layers": 3, "tied_head": True, "shared_layers": (1, 2, 3), "skips": ((0, 2),)}
MODEL = make_model(**TIED, halved=True)
PLAN = make_plan(
    MODEL,
    parameters="disk",
    gradients="disk",
    activations=("keep", "recompute"),
    num_microbatches=3,
)


def lower(order=two_later, plan=PLAN, model=MODEL) -> Program:
    runs = order(model, plan.numerics.num_microbatches)
    return Lowerer(model, runs).lower(plan, "train_step")


STEP = lower()
KEPT = make_plan(MODEL, num_microbatches=3)
FROZEN_MODEL = make_model(num_layers=3, frozen=("embed", "layers.1", "layers.3"), halved=True)
FROZEN = lower(plan=make_plan(FROZEN_MODEL, num_microbatches=3), model=FROZEN_MODEL)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tied_sum", ["per_microbatch", "per_step"])
def test_every_order_of_halves_passes(order: str, tied_sum: str) -> None:
    if order == "in layers" and tied_sum == "per_microbatch":
        return
    plan = replace(PLAN, numerics=replace(PLAN.numerics, tied_sum=tied_sum))
    program = lower(ORDERS[order], plan)
    verify_program(program, MODEL)
    verify_program(program)


def test_blocks_have_the_halves_that_have_something_to_do() -> None:
    found = {
        kind: sorted({task.block for task in FROZEN.tasks if isinstance(task, kind)})
        for kind in (InputGrad, WeightGrad, Backward)
    }
    # Blocks 0 and 1 are frozen and below what is trained; block 3 only hands gradients on.
    assert found == {InputGrad: [3, 4], WeightGrad: [2, 4], Backward: []}
    verify_program(FROZEN, FROZEN_MODEL)
    reject(drop(FROZEN, "W block=2 mb=1"), FROZEN_MODEL, "coverage", "W block=2 mb=1, is missing")


def test_a_block_is_recomputed_once_and_just_before_its_first_half() -> None:
    again = [task for task in STEP.tasks if isinstance(task, Recompute)]
    assert sorted((t.block, t.microbatch) for t in again) == [
        (block, microbatch) for block in (1, 3) for microbatch in range(3)
    ]
    late = move(STEP, "R block=3 mb=1", before="W block=3 mb=1")
    index = find(late, "R block=3 mb=1")
    reject(late, MODEL, "coverage", f"task {index}", "does not lie between", "I block=3 mb=1")


# coverage


def test_a_missing_half_is_named() -> None:
    reject(drop(STEP, "I block=2 mb=0"), MODEL, "coverage", "I block=2 mb=0 is missing")
    reject(drop(STEP, "W block=2 mb=1"), MODEL, "coverage", "W block=2 mb=1 is missing")
    reject(drop(STEP, "W block=2 mb=1"), None, "coverage", "W block=2 mb=1 is missing")
    both = drop(drop(STEP, "I block=2 mb=0"), "W block=2 mb=0")
    reject(both, MODEL, "coverage", "B block=2 mb=0, whole or as", "is missing")


def test_a_half_happens_once() -> None:
    index = find(STEP, "I block=2 mb=0")
    error = reject(repeat(STEP, "I block=2 mb=0"), MODEL, "coverage", "does again")
    assert f"task {index + 1} " in str(error)
    reject(repeat(STEP, "W block=4 mb=1"), MODEL, "coverage", "does again")


def test_a_backward_is_whole_or_in_halves() -> None:
    whole = Backward(block=2, microbatch=1, reads=(), writes=(), workspace_bytes=0)
    program = insert(STEP, whole, before="I block=2 mb=1")
    reject(program, MODEL, "coverage", "is half of what", "(B block=2 mb=1) does as a whole")


def test_a_half_with_nothing_to_do_is_rejected() -> None:
    half = InputGrad(block=0, microbatch=0, reads=(), writes=(), workspace_bytes=0)
    program = insert(STEP, half, before="W block=0 mb=0")
    reject(program, MODEL, "coverage", "has nothing to do", "block 0", "I block=0 mb=0")
    half = WeightGrad(block=3, microbatch=0, reads=(), writes=(), workspace_bytes=0)
    frozen = insert(FROZEN, half, before="W block=2 mb=0")
    reject(frozen, FROZEN_MODEL, "coverage", "has nothing to do", "block 3")


def test_a_model_that_was_not_cut_has_no_halves() -> None:
    whole = make_model(**TIED)
    assert whole.fingerprint == MODEL.fingerprint
    reject(STEP, whole, "coverage", "gives block", "no halves")
    with pytest.raises(RefusedError, match="no halves"):
        lower(model=whole, plan=make_plan(whole, num_microbatches=3))


# order


def test_a_weight_half_comes_after_its_input_half() -> None:
    program = move(STEP, "W block=3 mb=0", before="I block=3 mb=0")
    index = find(program, "W block=3 mb=0")
    reject(program, MODEL, "order", f"task {index} comes before", "(I block=3 mb=0)")


def test_weight_halves_go_over_the_micro_batches_in_order() -> None:
    program = move(STEP, "W block=2 mb=1", before="W block=2 mb=0")
    reject(program, MODEL, "order", "block 2 backward for micro-batch 0 after", "(W block=2 mb=1)")
    first = lower(ORDERS["every other micro-batch"])
    program = move(first, "B block=2 mb=2", before="W block=2 mb=1")
    reject(program, MODEL, "order", "micro-batch 1 after", "(B block=2 mb=2)")


def test_gradients_of_values_are_summed_from_the_last_user() -> None:
    program = move(lower(plan=KEPT), "I block=1 mb=0", before="I block=2 mb=0")
    reject(program, MODEL, "order", "runs before", "(I block=2 mb=0), a later user")
    program = move(STEP, "W block=0 mb=0", before="I block=2 mb=0")
    reject(program, MODEL, "order", "runs before", "(I block=1 mb=0), a later user")


def test_gradients_of_tied_parameters_are_summed_from_the_last_user() -> None:
    program = move(STEP, "W block=2 mb=1", before="W block=3 mb=1")
    reject(program, MODEL, "order", "runs before", "(W block=3 mb=1), a later user")


def test_halves_compute_with_the_parameters_of_their_step() -> None:
    step = lower(plan=make_plan(MODEL, num_microbatches=3, clips=False))
    for reader in ("I block=4 mb=2", "W block=1 mb=2"):
        task = step.tasks[find(step, reader)]
        chunk = next(name for name in task.reads if name.startswith("param/"))
        words = f"UPD chunk={split_state(chunk)[1]}"
        outline = outline_program(move(step, words, before=reader), MODEL)
        with pytest.raises(RuleError, match=f"reads {chunk} after .*{words}"):
            check_order(replace(outline, segment_norms={}))


def test_norms_and_updates_wait_for_weight_halves() -> None:
    last = "W block=0 mb=2"
    program = move(STEP, "SEG chunk=0", before=last)
    reject(program, MODEL, "order", "sums the gradient of chunk 0 before", f"({last})")
    step = lower(plan=make_plan(MODEL, num_microbatches=3, clips=False))
    program = move(step, "UPD chunk=0", before=last)
    reject(program, MODEL, "coverage", "updates chunk 0 before its last gradient", f"({last})")


# reads


def test_halves_declare_what_the_model_says() -> None:
    first, second = (STEP.tasks[find(STEP, f"{kind} block=2 mb=1")] for kind in "IW")
    stash = stash_id(2, 1)
    assert stash in first.writes
    assert stash in second.reads
    writes = tuple(name for name in first.writes if name != stash)
    program = change(STEP, "I block=2 mb=1", writes=writes)
    reject(program, MODEL, "reads", "does not write stash/2@1")
    reads = tuple(name for name in second.reads if name != stash)
    program = change(STEP, "W block=2 mb=1", reads=reads)
    reject(program, MODEL, "reads", "does not read stash/2@1")
    program = change(STEP, "W block=2 mb=1", reads=(*second.reads, "saved/2@1"))
    reject(program, MODEL, "reads", "reads saved/2@1, which it does not need")
    whole = STEP.tasks[find(STEP, "W block=0 mb=1")]
    assert "saved/0@1" not in whole.reads, "block 0 saves nothing"
    program = change(STEP, "I block=3 mb=1", workspace_bytes=first.workspace_bytes - 1)
    reject(program, MODEL, "reads", "bytes of workspace")
    program = change(STEP, "W block=4 mb=1", workspace_bytes=0)
    reject(program, MODEL, "reads", "has 0 bytes of workspace")


def test_a_stash_has_the_bytes_of_the_model() -> None:
    program = change_buffer(STEP, "stash/2@1", size_bytes=8)
    reject(program, MODEL, "reads", "stash/2@1 has 8 bytes")


# the replay


def test_a_stash_stays_until_its_weight_half() -> None:
    program = move(STEP, "FREE stash/2@0 device", before="W block=2 mb=0")
    reject(program, MODEL, "fresh", "stash/2@0", "(W block=2 mb=0) still reads it")
    reject(drop(STEP, "FREE stash/2@0 device"), MODEL, "steady", "stash/2@0")


def test_what_was_saved_is_gone_once_the_input_half_is_done() -> None:
    program = lower(plan=KEPT)
    freed = find(program, "FREE saved/2@0 device")
    assert find(program, "I block=2 mb=0") < freed < find(program, "W block=2 mb=0")
    turns = lower(in_turn)
    assert find(turns, "W block=2 mb=0") - find(turns, "I block=2 mb=0") < 8
