"""Every rule has broken programs that it must reject by its name, saying where and what."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from edits import (
    add_buffer,
    change,
    change_buffer,
    drop,
    find,
    insert,
    move,
    reject,
    repeat,
    with_tasks,
)
from models import make_model, make_plan

from packhorse.compiler.lower import lower_plan
from packhorse.errors import MismatchError
from packhorse.program.buffers import Buffer, Pool
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Emit,
    Export,
    Forward,
    Free,
    Import,
    Recompute,
    Update,
)
from packhorse.verifier import rules
from packhorse.verifier.rules import verify_program

MODEL = make_model(num_layers=3, tied_head=True, shared_layers=(1, 2, 3), skips=((0, 2),))
PLAN = make_plan(
    MODEL,
    parameters="disk",
    gradients="disk",
    activations=("keep", "recompute"),
    num_microbatches=2,
)
STEP = lower_plan(PLAN, MODEL, "train_step")
HOSTED = lower_plan(
    make_plan(MODEL, optimizer="host", update="host", stride=3), MODEL, "train_step"
)
HOSTED_AT_HOME = lower_plan(
    make_plan(MODEL, parameters="host", optimizer="host", update="host", stride=3),
    MODEL,
    "train_step",
)
EVALUATION = lower_plan(PLAN, MODEL, "evaluate")
LOAD = lower_plan(PLAN, MODEL, "load")
SAVE = lower_plan(PLAN, MODEL, "save")
FROZEN_MODEL = make_model(frozen=("embed", "layers.1"))
FROZEN = lower_plan(make_plan(FROZEN_MODEL), FROZEN_MODEL, "train_step")


@pytest.mark.parametrize("program", [STEP, HOSTED, HOSTED_AT_HOME, EVALUATION, LOAD, SAVE])
def test_the_unbroken_program_passes(program: Program) -> None:
    verify_program(program, MODEL)
    verify_program(program)


def test_the_docstring_lists_the_rules() -> None:
    assert rules.__doc__ is not None
    listed = re.findall(r"^    ([a-z]+)  ", rules.__doc__, flags=re.MULTILINE)
    assert set(listed) == {rule.name for rule in rules.RULES}


def test_another_model_is_refused() -> None:
    with pytest.raises(MismatchError, match="toy-2-32-64"):
        verify_program(STEP, make_model())


# declared


def test_a_misspelt_buffer_is_named_with_the_nearest() -> None:
    program = change(STEP, "EMIT norm", buffer="nrom")
    index = find(STEP, "EMIT norm")
    error = reject(program, MODEL, "declared", f"task {index}", "nrom", "nearest")
    assert "norm" in str(error)


def test_a_tier_without_a_pool_is_named() -> None:
    program = change(STEP, "FREE value/h0@0 device", tier="disk")
    reject(program, None, "declared", "value/h0@0 in the disk tier", "only in: device")


def test_a_buffer_twice_in_a_list_is_rejected() -> None:
    task = STEP.tasks[find(STEP, "F block=0 mb=0")]
    assert isinstance(task, Forward)
    program = change(STEP, "F block=0 mb=0", reads=(*task.reads, task.reads[0]))
    reject(program, MODEL, "declared", "param/0 twice")


def test_pools_must_fit_their_tiers() -> None:
    on_disk = {"device": "disk"}
    reject(change_buffer(STEP, "norm", pools=on_disk), None, "declared", "norm", "disk tier")
    reject(change_buffer(STEP, "norm", pools={"device": "heap"}), None, "declared", "heap")
    reject(change_buffer(STEP, "norm", home="disk"), None, "declared", "norm", "disk")
    reject(change_buffer(STEP, "norm", size_bytes=-8), None, "declared", "-8 bytes")
    reject(replace(STEP, workspace_pool="disk"), None, "declared", "workspace", "device")
    twice = (*STEP.pools, Pool(id="disk", tier="disk", capacity_bytes=1))
    reject(replace(STEP, pools=twice), None, "declared", "disk", "twice")


def test_an_update_happens_in_memory() -> None:
    reject(change(HOSTED, "UPD chunk=1", where="disk"), MODEL, "declared", "where nothing computes")


# present


def test_an_update_in_the_host_needs_the_norm_and_the_gradient_there() -> None:
    program = drop(HOSTED, "CP norm device>host")
    reject(program, MODEL, "present", "reads norm in the host tier", "lies in device (newest)")
    program = drop(HOSTED, "CP grad/1 device>host")
    reject(program, MODEL, "fresh", "frees the only newest copy of grad/1", "still reads it")
    program = drop(HOSTED, "FREE norm host")
    reject(program, MODEL, "steady", "norm", "left in the host tier")


def test_what_the_host_made_comes_home_to_the_device() -> None:
    program = drop(HOSTED, "CP param/1 host>device")
    reject(program, MODEL, "fresh", "frees the only newest copy of param/1")


def test_a_step_that_ends_before_the_last_states_came_back_is_rejected() -> None:
    """The chunk that visits the device last must be written back within the step."""
    last = max(
        index
        for index, task in enumerate(HOSTED.tasks)
        if isinstance(task, Update) and task.where == "device"
    )
    task = HOSTED.tasks[last]
    assert isinstance(task, Update)
    for state in ("param", "exp_avg", "exp_avg_sq"):
        program = HOSTED_AT_HOME
        words = f"{state}/{task.chunk}"
        broken = drop(drop(program, f"CP {words} device>host"), f"FREE {words} device", -1)
        reject(broken, MODEL, "steady", words, "stale at the end")


def test_a_read_of_an_absent_buffer_is_rejected() -> None:
    program = drop(STEP, "CP param/2 disk>device", 0)
    index = find(program, "F block=1 mb=0")
    reject(program, MODEL, "present", f"task {index} reads param/2", "lies in disk (newest)")


def test_a_copy_that_comes_too_late_is_named() -> None:
    program = move(STEP, "CP param/0 disk>device", before="F block=1 mb=0", number=0)
    reader, copy = find(program, "F block=0 mb=0"), find(program, "F block=1 mb=0") - 1
    reject(
        program,
        MODEL,
        "present",
        f"task {reader} reads param/0",
        f"task {copy} (CP param/0 disk>device) brings it there only later",
    )


def test_an_early_free_is_named_by_the_reader() -> None:
    program = move(STEP, "FREE param/4 device", before="F block=2 mb=0", number=0)
    index = find(program, "F block=2 mb=0")
    reject(
        program,
        MODEL,
        "present",
        f"task {index} reads param/4",
        f"task {index - 1} (FREE param/4 device) freed it there",
    )


def test_a_second_free_is_rejected() -> None:
    reject(repeat(STEP, "FREE value/h1@0"), MODEL, "present", "frees value/h1@0", "no tier")


def test_a_redundant_copy_is_rejected() -> None:
    reject(repeat(STEP, "CP param/0 disk>device", 0), None, "present", "param/0", "redundant")
    to_itself = Copy(buffer="param/0", source="disk", target="disk")
    reject(insert(STEP, to_itself, before="NORM"), None, "present", "redundant")


def test_what_exists_is_not_created_again() -> None:
    task = STEP.tasks[find(STEP, "NORM")]
    kept = tuple(t for t in STEP.tasks if t != Free(buffer="norm/3", tier="device"))
    program = change(with_tasks(STEP, kept), "NORM", writes=(*task.writes, "norm/3"), reads=())
    first = find(program, "SEG chunk=3")
    error = reject(program, None, "present", "creates norm/3", "created twice")
    assert f"task {first} (SEG chunk=3) made it" in str(error)


def test_a_state_is_imported_into_an_empty_place() -> None:
    program = drop(LOAD, "FREE param/2")
    other = Import(buffer="param/2")
    reject(insert(program, other, before="IMP param/3"), None, "coverage", "IMP param/2")


def test_a_transient_buffer_in_another_tier_is_not_created_again() -> None:
    task = STEP.tasks[find(STEP, "B block=3 mb=1")]
    assert isinstance(task, Backward)
    reads = tuple(buffer for buffer in task.reads if buffer != "grad/5")
    program = change(drop(STEP, "CP grad/5 disk>device", 0), "B block=3 mb=1", reads=reads)
    reject(program, None, "present", "creates grad/5", "lies in disk (newest)", "created twice")


# fresh


def test_a_stale_copy_is_not_read() -> None:
    home = lower_plan(make_plan(MODEL), MODEL, "train_step")
    wide = {"device": "device", "disk": "disk"}
    aside = change_buffer(home, "param/5", pools=wide)
    out = Copy(buffer="param/5", source="device", target="disk")
    back = Copy(buffer="param/5", source="disk", target="device")
    program = insert(aside, out, before="NORM")
    last = with_tasks(program, (*program.tasks, back))
    index = len(last.tasks) - 1
    error = reject(last, MODEL, "fresh", f"task {index} reads a stale copy of param/5 in the disk")
    assert "(UPD chunk=5 at=device) wrote the newest" in str(error)


def test_a_changed_state_is_not_lost() -> None:
    program = drop(STEP, "CP param/2 device>disk")
    index = find(program, "UPD chunk=2") + 1
    reject(program, MODEL, "fresh", f"task {index} frees", "param/2", "home, disk", "lost")


def test_a_gradient_that_is_still_needed_is_not_lost() -> None:
    program = drop(STEP, "CP grad/4 device>disk", 0)
    reject(program, MODEL, "fresh", "grad/4 (device)", "CP grad/4 disk>device) still reads it")


def test_a_value_that_is_still_read_is_not_lost() -> None:
    program = move(STEP, "FREE value/h0@1", before="R block=1 mb=1")
    reject(program, MODEL, "fresh", "value/h0@1", "R block=1 mb=1", "lost")


def test_the_newest_at_home_may_not_be_freed_there() -> None:
    free = Free(buffer="exp_avg/0", tier="device")
    reject(insert(STEP, free, before="NORM"), MODEL, "fresh", "exp_avg/0", "UPD chunk=0")


# capacity


def _with_capacity(program: Program, pool: str, capacity_bytes: int) -> Program:
    pools = tuple(
        replace(each, capacity_bytes=capacity_bytes) if each.id == pool else each
        for each in program.pools
    )
    return replace(program, pools=pools)


@pytest.mark.parametrize("pool", ["device", "disk"])
@pytest.mark.parametrize("program", [STEP, EVALUATION, LOAD, SAVE])
def test_the_peak_fits_exactly_and_not_with_a_byte_less(program: Program, pool: str) -> None:
    peak_bytes = verify_program(program, MODEL).peak_bytes[pool]
    verify_program(_with_capacity(program, pool, peak_bytes), MODEL)
    reject(
        _with_capacity(program, pool, peak_bytes - 1),
        MODEL,
        "capacity",
        f"pool {pool}",
        f"{peak_bytes} bytes",
        f"{peak_bytes - 1} bytes",
    )


def test_the_largest_causes_are_named() -> None:
    small = _with_capacity(STEP, "device", verify_program(STEP, MODEL).peak_bytes["device"] - 1)
    reject(small, MODEL, "capacity", "workspace 512 KiB, ", "18 others", "1 bytes too little")


def test_what_a_task_creates_counts_while_it_runs() -> None:
    states_and_feed = 12 * 8192 + 128
    small = _with_capacity(STEP, "device", states_and_feed + 8191)
    index = find(STEP, "CP param/0 disk>device", 0)
    reject(small, MODEL, "capacity", f"task {index} needs", "param/0 (new) 8.00 KiB")


def test_what_lies_there_before_the_first_task_counts() -> None:
    reject(_with_capacity(STEP, "device", 90_000), MODEL, "capacity", "before the first task")


def test_workspace_counts() -> None:
    program = change(STEP, "F block=3 mb=1", workspace_bytes=1 << 41)
    reject(program, MODEL, "capacity", f"task {find(STEP, 'F block=3 mb=1')}", "2.00 TiB")


def test_capacity_is_checked_without_a_model_too() -> None:
    reject(_with_capacity(STEP, "disk", 98_303), None, "capacity", "98303 bytes")


# coverage


@pytest.mark.parametrize(
    "words",
    [
        "FEED mb=1",
        "F block=2 mb=1",
        "B block=2 mb=0",
        "SEG chunk=3",
        "UPD chunk=1",
        "NORM",
        "EMIT norm",
        "EMIT value/loss@1",
    ],
)
def test_what_is_missing_is_named(words: str) -> None:
    reject(drop(STEP, words), MODEL, "coverage", f"{words} is missing")


@pytest.mark.parametrize(
    "words",
    [
        "FEED mb=0",
        "F block=2 mb=1",
        "R block=1 mb=0",
        "B block=0 mb=1",
        "SEG chunk=3",
        "UPD chunk=1",
        "NORM",
        "EMIT norm",
        "EMIT value/loss@1",
    ],
)
@pytest.mark.parametrize("model", [MODEL, None])
def test_what_happens_twice_is_named(words: str, model: object) -> None:
    index = find(STEP, words)
    name = f"task {index + 1} does again what task {index} ({words}"
    reject(repeat(STEP, words), MODEL if model else None, "coverage", name)


def test_a_missing_recompute_is_named() -> None:
    reject(drop(STEP, "R block=1 mb=1"), MODEL, "coverage", "R block=1 mb=1 is missing")


def test_what_was_saved_is_not_recomputed() -> None:
    task = STEP.tasks[find(STEP, "F block=2 mb=0")]
    again = Recompute(
        block=2, microbatch=0, reads=task.reads, writes=("saved/2@0",), workspace_bytes=0
    )
    program = insert(STEP, again, before="B block=2 mb=0")
    reject(program, MODEL, "coverage", "recomputes saved/2@0", "F block=2 mb=0")


def test_a_recompute_comes_between_forward_and_backward() -> None:
    program = move(STEP, "R block=1 mb=0", before="FEED mb=1")
    reject(program, MODEL, "coverage", "does not lie between", "B block=1 mb=0")


def test_a_recompute_of_a_block_that_saves_nothing_is_rejected() -> None:
    task = STEP.tasks[find(STEP, "F block=0 mb=0")]
    again = Recompute(block=0, microbatch=0, reads=task.reads, writes=(), workspace_bytes=0)
    reject(insert(STEP, again, before="B block=0 mb=0"), MODEL, "coverage", "nothing to save")


def test_a_backward_before_its_forward_is_rejected() -> None:
    program = move(STEP, "F block=2 mb=1", before="UPD chunk=0")
    reject(program, MODEL, "coverage", "comes before the Forward of block 2")


def test_an_update_before_the_last_gradient_is_rejected() -> None:
    program = move(STEP, "UPD chunk=4", before="B block=2 mb=1")
    reject(program, MODEL, "coverage", "updates chunk 4 before its last gradient", "B block=2 mb=1")


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("words", ["UPD chunk=0", "SEG chunk=0"])
def test_a_tied_chunk_waits_for_its_first_user(num_microbatches: int, words: str) -> None:
    plan = make_plan(MODEL, clips=False, num_microbatches=num_microbatches)
    program = lower_plan(plan, MODEL, "train_step")
    verify_program(program, MODEL)
    assert [chunk.id for chunk in program.layout.chunks_of("embed.weight")] == [0]
    last = f"B block=0 mb={num_microbatches - 1}"
    rule = "coverage" if words.startswith("UPD") else "order"
    reject(move(program, words, before=last), MODEL, rule, "chunk 0 before", last)


def test_a_frozen_chunk_is_never_updated() -> None:
    frozen = next(chunk.id for chunk in FROZEN.layout.chunks if not chunk.trainable)
    update = Update(
        chunk=frozen,
        where="device",
        reads=(f"param/{frozen}",),
        writes=(f"param/{frozen}",),
        workspace_bytes=0,
    )
    program = with_tasks(FROZEN, (*FROZEN.tasks, update))
    reject(program, FROZEN_MODEL, "coverage", f"chunk {frozen}, which is frozen")
    reject(program, None, "coverage", f"chunk {frozen}, which is frozen")


def test_no_backward_below_the_lowest_trained_block() -> None:
    task = FROZEN.tasks[find(FROZEN, "B block=2 mb=0")]
    program = insert(FROZEN, replace(task, block=0), before="NORM")
    reject(program, FROZEN_MODEL, "coverage", "block 0, which has no Backward")


@pytest.mark.parametrize(
    ("program", "task"),
    [
        (STEP, Import(buffer="param/0")),
        (EVALUATION, Export(buffer="param/0")),
        (LOAD, Emit(buffer="param/0")),
        (SAVE, Import(buffer="param/0")),
    ],
)
def test_a_kind_of_program_has_its_kinds_of_tasks(program: Program, task: object) -> None:
    broken = with_tasks(program, (*program.tasks, task))
    reject(broken, MODEL, "coverage", type(task).__name__, program.kind)


def test_a_microbatch_outside_the_step_is_rejected() -> None:
    reject(change(STEP, "F block=2 mb=1", microbatch=2), MODEL, "coverage", "0 to 1")
    reject(replace(STEP, num_microbatches=3), MODEL, "coverage", "FEED mb=2 is missing")


def test_only_losses_and_the_norm_are_emitted() -> None:
    program = insert(STEP, Emit(buffer="value/h1@0"), before="FREE value/h1@0")
    reject(program, MODEL, "coverage", "value/h1@0", "neither a loss nor the norm")


def test_every_state_is_loaded_and_saved() -> None:
    index = find(SAVE, "EXP exp_avg/1")
    assert index > 0
    reject(drop(SAVE, "EXP exp_avg/1"), None, "coverage", "EXP exp_avg/1 is missing")
    reject(drop(LOAD, "IMP exp_avg/1"), MODEL, "coverage", "IMP exp_avg/1 is missing")


# order


def test_a_block_runs_backward_over_microbatches_in_order() -> None:
    first, second = find(STEP, "B block=2 mb=0"), find(STEP, "B block=2 mb=1")
    tasks = list(STEP.tasks)
    tasks[first], tasks[second] = tasks[second], tasks[first]
    early = [find(STEP, f"{words} mb=1") for words in ("FEED", "F block=2")]
    for position, index in enumerate(early):
        tasks.insert(position, tasks.pop(index))
    program = with_tasks(STEP, tuple(tasks))
    reject(program, None, "order", "block 2 backward for micro-batch 0", "0, 1, 2")


def test_later_users_run_backward_first() -> None:
    program = move(STEP, "B block=1 mb=0", before="B block=2 mb=0")
    program = move(program, "R block=1 mb=0", before="B block=1 mb=0")
    index = find(program, "B block=1 mb=0")
    reject(program, MODEL, "order", f"task {index} runs before", "B block=2 mb=0", "last user")


def test_norms_come_after_gradients() -> None:
    program = move(STEP, "SEG chunk=2", before="B block=1 mb=1")
    reject(program, MODEL, "order", "gradient of chunk 2 before", "B block=1 mb=1")
    reject(move(STEP, "NORM", before="SEG chunk=0"), MODEL, "order", "(NORM)")


def test_updates_that_clip_come_after_the_norm() -> None:
    program = move(STEP, "UPD chunk=5", before="NORM")
    reject(program, MODEL, "order", "reads norm before", "(NORM)")


def test_a_step_computes_with_the_parameters_it_began_with() -> None:
    model = make_model()
    program = lower_plan(make_plan(model, clips=False), model, "train_step")
    update = find(program, "UPD chunk=4")
    task = program.tasks[find(program, "B block=2 mb=0")]
    assert update < find(program, "B block=2 mb=0")
    broken = change(program, "B block=2 mb=0", reads=(*task.reads, "param/4"))
    reject(broken, model, "order", "reads param/4 after", "UPD chunk=4", "began with")


# reads


def test_a_missing_read_is_named() -> None:
    task = STEP.tasks[find(STEP, "B block=3 mb=1")]
    reads = tuple(buffer for buffer in task.reads if buffer != "value/h2@1")
    program = change(STEP, "B block=3 mb=1", reads=reads)
    reject(program, MODEL, "reads", "does not read value/h2@1, which it needs")


def test_a_needless_read_is_named() -> None:
    task = STEP.tasks[find(STEP, "B block=2 mb=0")]
    program = change(STEP, "B block=2 mb=0", reads=(*task.reads, "param/1"))
    reject(program, MODEL, "reads", "reads param/1, which it does not need")


def test_the_wrong_chunk_is_named() -> None:
    program = change(STEP, "SEG chunk=4", reads=("grad/1",))
    reject(program, MODEL, "reads", "does not read grad/4", "reads grad/1")


@pytest.mark.parametrize(
    ("words", "buffer"),
    [
        ("F block=4 mb=0", "saved/3@0"),
        ("B block=1 mb=1", "wgrad/shared.weight@1"),
        ("B block=4 mb=1", "grad/0"),
        ("B block=0 mb=0", "dvalue/h0@0"),
        ("R block=1 mb=0", "value/h1@0"),
        ("NORM", "norm/0"),
        ("FEED mb=0", "value/h0@0"),
    ],
)
def test_a_needless_write_is_named(words: str, buffer: str) -> None:
    task = STEP.tasks[find(STEP, words)]
    program = change(STEP, words, writes=(*task.writes, buffer))
    reject(program, MODEL, "reads", f"writes {buffer}, which it does not need")


def _swap(program: Program, words: str, **names: dict[str, str]) -> Program:
    """Rename buffers in the reads or writes of a task."""
    task = program.tasks[find(program, words)]
    fields = {
        field: tuple(renamed.get(name, name) for name in getattr(task, field))
        for field, renamed in names.items()
    }
    return change(program, words, **fields)


def test_the_last_user_of_a_tied_parameter_begins_its_running_gradient() -> None:
    task = STEP.tasks[find(STEP, "B block=4 mb=1")]
    reads = (*task.reads, "wgrad/embed.weight@1")
    reject(
        change(STEP, "B block=4 mb=1", reads=reads), MODEL, "reads", "reads wgrad/embed.weight@1"
    )


def test_the_last_user_of_a_tied_parameter_begins_its_chunk_in_micro_batch_0() -> None:
    task = STEP.tasks[find(STEP, "B block=4 mb=0")]
    program = change(STEP, "B block=4 mb=0", reads=(*task.reads, "grad/0"))
    reject(program, MODEL, "reads", "reads grad/0, which it does not need", "B block=4 mb=0")


@pytest.mark.parametrize("words", ["B block=2 mb=0", "B block=1 mb=0"])
@pytest.mark.parametrize("field", ["reads", "writes"])
def test_earlier_users_add_to_the_chunk_in_micro_batch_0(words: str, field: str) -> None:
    assert [chunk.id for chunk in STEP.layout.chunks_of("shared.weight")] == [3]
    task = STEP.tasks[find(STEP, words)]
    names = tuple(name for name in getattr(task, field) if name != "grad/3")
    program = change(STEP, words, **{field: names})
    verb = field.removesuffix("s")
    reject(program, MODEL, "reads", f"does not {verb} grad/3, which it needs", words)


def test_micro_batch_0_has_no_running_gradient() -> None:
    # It is declared here, so that only its use is wrong.
    buffer = replace(STEP.buffers["wgrad/embed.weight@1"], id="wgrad/embed.weight@0")
    program = add_buffer(STEP, buffer)
    task = program.tasks[find(program, "B block=4 mb=0")]
    more = change(program, "B block=4 mb=0", writes=(*task.writes, "wgrad/embed.weight@0"))
    needless = "writes wgrad/embed.weight@0, which it does not need"
    reject(more, MODEL, "reads", needless, "B block=4 mb=0")

    # Even where it takes the chunk's place from the last user to the first.
    aside = {"grad/0": "wgrad/embed.weight@0"}
    program = _swap(program, "B block=4 mb=0", writes=aside)
    program = _swap(program, "B block=0 mb=0", reads=aside)
    free = Free(buffer="wgrad/embed.weight@0", tier="device")
    program = insert(program, free, before="FEED mb=1")
    reject(program, MODEL, "reads", "does not write grad/0, which it needs", needless)


def test_later_micro_batches_keep_the_running_gradient_apart() -> None:
    # A chunk that holds micro-batch 0 must not get the gradients of each user one by one.
    program = _swap(STEP, "B block=4 mb=1", writes={"wgrad/embed.weight@1": "grad/0"})
    words = ("does not write wgrad/embed.weight@1, which it needs", "writes grad/0")
    reject(program, MODEL, "reads", *words, "B block=4 mb=1")


def test_a_running_gradient_has_the_dtype_of_its_parameter() -> None:
    model = make_model(dtype="bfloat16", tied_head=True)
    plan = make_plan(model, compute_dtype="bfloat16", num_microbatches=2)
    program = lower_plan(plan, model, "train_step")
    verify_program(program, model)
    name = "wgrad/embed.weight@1"
    assert program.buffers[name].size_bytes == 2 * 64 * 32
    wide = change_buffer(program, name, size_bytes=4 * 64 * 32)
    reject(wide, model, "reads", f"{name} has 8192 bytes; the model gives it 4096")


def test_an_update_touches_every_state() -> None:
    task = STEP.tasks[find(STEP, "UPD chunk=1")]
    writes = tuple(buffer for buffer in task.writes if buffer != "exp_avg_sq/1")
    program = change(STEP, "UPD chunk=1", writes=writes)
    reject(program, None, "reads", "does not write exp_avg_sq/1")


def test_all_updates_clip_or_none() -> None:
    task = STEP.tasks[find(STEP, "UPD chunk=1")]
    reads = tuple(buffer for buffer in task.reads if buffer != "norm")
    reject(change(STEP, "UPD chunk=1", reads=reads), MODEL, "reads", "does not read norm")


@pytest.mark.parametrize(
    "words", ["F block=2 mb=0", "F block=1 mb=0", "R block=1 mb=0", "B block=3 mb=0"]
)
def test_too_little_workspace_is_named(words: str) -> None:
    program = change(STEP, words, workspace_bytes=1)
    reject(program, MODEL, "reads", "1 bytes of workspace", words)


@pytest.mark.parametrize("name", ["param/0", "saved/2@1", "norm/1", "wgrad/embed.weight@1", "norm"])
def test_a_buffer_of_the_wrong_size_is_named(name: str) -> None:
    size_bytes = STEP.buffers[name].size_bytes
    program = change_buffer(STEP, name, size_bytes=size_bytes + 64)
    reject(program, MODEL, "reads", name, str(size_bytes), str(size_bytes + 64))


def test_a_buffer_of_no_model_is_named() -> None:
    odd = Buffer(id="value/h9@0", size_bytes=8, pools={"device": "device"}, home=None)
    reject(add_buffer(STEP, odd), MODEL, "reads", "value/h9@0", "nothing of this model")


# steady


def test_a_transient_buffer_does_not_leak() -> None:
    program = drop(STEP, "FREE saved/2@1")
    reject(program, MODEL, "steady", "saved/2@1", "device tier at the end", "leaks")


def test_a_state_does_not_stay_in_the_device() -> None:
    program = drop(STEP, "FREE param/5 device", 4)
    reject(program, MODEL, "steady", "param/5", "its home is disk", "leaks")


def test_a_copy_at_home_is_not_stale() -> None:
    program = drop(drop(STEP, "CP param/2 device>disk"), "FREE param/2 device", 4)
    reject(program, MODEL, "steady", "param/2", "home, disk, is stale")


def test_a_state_is_in_its_home() -> None:
    program = insert(STEP, Free(buffer="param/5", tier="disk"), before="UPD chunk=5")
    program = drop(program, "CP param/5 device>disk")
    program = drop(program, "FREE param/5 device", 4)
    reject(program, MODEL, "steady", "param/5", "not in its home, disk")


def test_a_load_fills_every_home() -> None:
    reject(drop(LOAD, "CP param/0 device>disk"), MODEL, "fresh", "param/0")
    reject(drop(LOAD, "FREE param/0"), MODEL, "steady", "param/0", "leaks")
