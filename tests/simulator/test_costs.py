from dataclasses import replace

import pytest

from packhorse.errors import InputError, MismatchError
from packhorse.machine.spec import Emulation, Heap, Link, Machine, MatmulPoint, Tier, UpdateRate
from packhorse.profile.spec import BodyTime, Profile
from packhorse.program.buffers import Buffer, Chunk, ChunkId, Layout, Pool, PoolId
from packhorse.program.program import Program
from packhorse.program.tasks import (
    Backward,
    Copy,
    Emit,
    Export,
    Feed,
    Forward,
    Free,
    GradNorm,
    Import,
    InputGrad,
    Recompute,
    SegmentNorm,
    Update,
    WeightGrad,
)
from packhorse.simulator.costs import BESIDE_DISK, FREE_NS, TASK_NS, TaskCosts
from packhorse.simulator.crowding import READ_NS_PER_BYTE
from tests.support.models import make_model

MODEL = make_model(num_layers=2, hidden=32)
LAYER_ELEMENTS = 32 * 32 + 2 * 32
MACHINE = Machine(
    name="toy",
    source="hand",
    fingerprint="",
    measured_at="",
    device="cpu",
    num_cores=2,
    num_threads=2,
    bf16_native=False,
    tiers=(Tier(name="device", total_bytes=1 << 30, budget_bytes=1 << 30),),
    links=(
        Link(source="disk", target="device", bytes_per_s=2e9, latency_ns=100),
        Link(source="device", target="disk", bytes_per_s=1e9, latency_ns=200),
    ),
    matmul=(MatmulPoint(dtype="float32", size=512, flops_per_s=1e11),),
    memory_bytes_per_s=1e10,
    updates=(UpdateRate(tier="device", parameters_per_s=1e8),),
    heap=Heap(map_cost=0.25, keep_slack=0.1),
)
PROFILE = Profile(
    model=MODEL.fingerprint,
    rows=1,
    length=8,
    source="measured",
    bodies={
        name: BodyTime(forward_ns=1000, discard_ns=800, backward_ns=2000) for name in MODEL.bodies
    },
    base_bytes=0,
)
SIZES = {
    "param/0": 4000,
    "grad/0": 4000,
    "exp_avg/0": 4000,
    "exp_avg_sq/0": 4000,
    "norm/0": 80,
    "norm": 8,
    "value/input_ids@0": 640,
}
PROGRAM = Program(
    kind="train_step",
    model=MODEL.fingerprint,
    rank=0,
    num_microbatches=1,
    pools=(Pool(id=PoolId("device"), tier="device", capacity_bytes=1 << 30),),
    workspace_pool=PoolId("device"),
    buffers={
        name: Buffer(id=name, size_bytes=size, pools={}, home=None) for name, size in SIZES.items()
    },
    layout=Layout(
        chunks=(Chunk(id=ChunkId(0), start=0, num_elements=1000, group="decay", trainable=True),),
        slots={},
        dtypes=dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), "float32"),
    ),
    tasks=(),
)


def costs(**changes):
    kwargs = {"machine": MACHINE, "profile": PROFILE, "model": MODEL, "program": PROGRAM}
    return TaskCosts(**{**kwargs, "heap": "keep", **changes})


def run_block(kind, *, block=1, reads=(), writes=()):
    return kind(block=block, microbatch=0, reads=reads, writes=writes, workspace_bytes=0)


ADAMW = Update(
    chunk=ChunkId(0),
    where="device",
    reads=("param/0", "grad/0", "exp_avg/0", "exp_avg_sq/0"),
    writes=("param/0", "exp_avg/0", "exp_avg_sq/0"),
    workspace_bytes=0,
)
SGD = Update(
    chunk=ChunkId(0),
    where="device",
    reads=("param/0", "grad/0"),
    writes=("param/0",),
    workspace_bytes=0,
)


@pytest.mark.parametrize(
    ("task", "kept_ns", "mapped_ns"),
    [
        (run_block(Forward, writes=("saved/1@0",)), 1000, 1250),
        (run_block(Forward, writes=("value/h1@0",)), 800, 1000),
        (run_block(Recompute, writes=("saved/1@0",)), 1000, 1250),
        (run_block(Backward), 2000, 2500),
    ],
)
def test_bodies_cost_their_time_and_more_with_a_mapped_heap(task, kept_ns, mapped_ns):
    assert costs().duration_ns(task) == TASK_NS + kept_ns
    assert costs(heap="map").duration_ns(task) == TASK_NS + mapped_ns


def test_blocks_take_longer_in_a_run_that_showed_it():
    slow = replace(MACHINE, compute_scale=1.5)
    task = run_block(Backward, writes=("grad/0",))
    assert costs(machine=slow).duration_ns(task) == TASK_NS + 3000
    assert costs(machine=slow, heap="map").duration_ns(task) == TASK_NS + 3750
    copy = Copy(buffer="param/0", source="disk", target="device")
    assert costs(machine=slow).duration_ns(copy) == costs().duration_ns(copy)


def test_gradients_get_new_pages_where_chunks_take_turns_in_memory():
    copy = Copy(buffer="param/0", source="disk", target="device")
    moving = replace(PROGRAM, tasks=(copy,))
    pages = replace(
        MACHINE,
        num_threads=1,
        links=(replace(MACHINE.links[0], core_ns_per_byte=0.25), MACHINE.links[1]),
    )
    first = run_block(Backward, writes=("grad/0", "value/h1@0"))
    later = run_block(Backward, reads=("grad/0",), writes=("grad/0",))

    def extra_ns(task, machine, program):
        found = costs(machine=machine, program=program)
        return found.duration_ns(task) - costs(machine=machine).duration_ns(task)

    assert extra_ns(first, pages, moving) == 4000 // 4
    assert extra_ns(run_block(WeightGrad, writes=("grad/0",)), pages, moving) == 4000 // 4
    assert extra_ns(later, pages, moving) == 0
    assert extra_ns(first, pages, PROGRAM) == 0
    untold = replace(pages, links=MACHINE.links)
    assert extra_ns(first, untold, moving) == 0
    acted = replace(pages, emulation=Emulation(of="another", slowdown=2.0))
    assert extra_ns(first, acted, moving) == 0
    assert extra_ns(first, replace(pages, device="cuda"), moving) == 0


def test_only_later_microbatches_pay_for_adding_their_gradients():
    first = run_block(Backward, writes=("grad/0",))
    later = run_block(Backward, reads=("grad/0",), writes=("grad/0",))
    assert costs().duration_ns(first) == TASK_NS + 2000
    assert costs().duration_ns(later) == TASK_NS + 2000 + -(-3 * LAYER_ELEMENTS * 4 // 10)


def test_halves_share_the_time_of_the_whole_backward():
    model = make_model(num_layers=2, hidden=32, halved=True)
    bodies = dict.fromkeys(model.bodies, PROFILE.bodies["head.2"])
    found = costs(model=model, profile=replace(PROFILE, bodies=bodies))
    for block in (1, 2, 3):
        first, second = (
            found.duration_ns(run_block(kind, block=block)) - TASK_NS
            for kind in (InputGrad, WeightGrad)
        )
        assert first + second == 2100  # 5 % more than the whole one
        assert 500 < first < 1500
    # Nothing flows below the first block: its second half is its backward.
    assert found.duration_ns(run_block(WeightGrad, block=0)) == TASK_NS + 2000
    later = run_block(WeightGrad, reads=("grad/0",), writes=("grad/0",))
    adding_ns = -(-3 * LAYER_ELEMENTS * 4 // 10)
    first = found.duration_ns(run_block(InputGrad))
    assert first + found.duration_ns(later) == 2 * TASK_NS + 2100 + adding_ns


@pytest.mark.parametrize(
    ("task", "extra_ns"),
    [
        (Copy(buffer="param/0", source="disk", target="device"), 100 + 2000),
        (Copy(buffer="param/0", source="device", target="disk"), 200 + 4000),
        (Import(buffer="param/0"), 100 + 2000),
        (Export(buffer="param/0"), 200 + 4000),
        (ADAMW, 10_000),
        (replace(ADAMW, reads=(*ADAMW.reads, "norm")), 12_858),
        (SGD, 4286),
        (SegmentNorm(chunk=ChunkId(0), reads=("grad/0",), writes=(), workspace_bytes=0), 2400),
        (GradNorm(reads=("norm/0",), writes=("norm",)), 8),
        (Feed(microbatch=0, writes=("value/input_ids@0",)), 64),
        (Emit(buffer="norm"), 0),
        (Free(buffer="param/0", tier="device"), FREE_NS - TASK_NS),
    ],
)
def test_the_rest_costs_what_it_moves(task, extra_ns):
    # Three threads take turns on two cores: half as long again for what a core does of a read.
    is_read = isinstance(task, Copy) and task.source == "disk"
    waits_ns = 4000 * READ_NS_PER_BYTE // 2 if is_read else 0
    for found in (costs(), costs(heap="map")):
        assert found.alone_ns(task) == TASK_NS + extra_ns
        assert found.duration_ns(task) == TASK_NS + extra_ns + waits_ns


def test_passes_over_memory_take_longer_beside_a_disk():
    norm = SegmentNorm(chunk=ChunkId(0), reads=("grad/0",), writes=(), workspace_bytes=0)
    read = Copy(buffer="param/0", source="disk", target="device")
    beside = costs(program=replace(PROGRAM, tasks=(read, norm, ADAMW)))
    for task, alone_ns in ((norm, 2400), (ADAMW, 10_000)):
        assert costs().alone_ns(task) == TASK_NS + alone_ns
        assert beside.alone_ns(task) == TASK_NS + round(BESIDE_DISK * alone_ns)
    for machine in (
        replace(MACHINE, device="cuda"),
        replace(MACHINE, emulation=Emulation(of="another", slowdown=1.0)),
    ):
        other = costs(machine=machine, program=beside.program)
        assert other.alone_ns(norm) == TASK_NS + 2400


def test_without_a_disk_outside_states_move_at_memory_speed():
    assert costs(machine=replace(MACHINE, links=())).duration_ns(Import(buffer="param/0")) == (
        TASK_NS + 400
    )


def test_says_what_the_machine_or_profile_lacks():
    with pytest.raises(InputError, match="the machine has no link from host to device"):
        costs().duration_ns(Copy(buffer="param/0", source="host", target="device"))
    with pytest.raises(InputError, match="no update rate for the tier host"):
        costs().duration_ns(replace(ADAMW, where="host"))
    with pytest.raises(MismatchError, match="the program runs block 9, but toy has 4 blocks"):
        costs().duration_ns(run_block(Backward, block=9))
    with pytest.raises(MismatchError, match="the profile has no times for body layer"):
        costs(profile=replace(PROFILE, bodies={})).duration_ns(run_block(Backward))
