"""Lanes over streams: complete when the device is. The device is a thread that runs what is queued.

On a GPU the same lanes have CUDA streams.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from subjects import find_subject

from bench.planned import RESIDENT, Ways, make_plan, open_engine, train_by_plan
from bench.reference import find_differences, train_plainly
from bench.zoo import ZOO, build_model, make_steps
from packhorse.compiler.lower import lower_plan
from packhorse.errors import RunFailedError
from packhorse.program.tasks import Lane
from packhorse.runtime import engine as engine_module
from packhorse.runtime import hardware
from packhorse.runtime.lanes import DeviceFailedError, LanesStuckError, ThreadLanes
from packhorse.runtime.streams import StreamLanes

IN_HOST = Ways(
    parameters=("host",),
    gradients=("host",),
    optimizer=("host",),
    update=("host",),
    chunk_bytes=4096,
)


class QueueStream:
    """A stream whose kernels run later, on a thread of their own, in order."""

    current = threading.local()

    def __init__(self) -> None:
        self._kernels: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def use(self) -> Generator[None]:
        QueueStream.current.stream = self
        yield
        QueueStream.current.stream = None

    def launch(self, kernel: Callable[[], None]) -> None:
        self._kernels.put(kernel)

    def finish(self) -> None:
        done = threading.Event()
        self._kernels.put(done.set)
        done.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        self._kernels.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (kernel := self._kernels.get()) is not None:
            try:
                kernel()
            except RuntimeError as error:
                self._error = error


def launch(kernel: Callable[[], None]) -> None:
    """Queue a kernel on the calling thread's stream, as torch does."""
    QueueStream.current.stream.launch(kernel)


def nothing() -> None:
    """Prepare no thread."""


def unheard(begin_ns: int, end_ns: int) -> None:
    """Nobody asks when it was done."""
    del begin_ns, end_ns


@pytest.fixture
def streams() -> Generator[list[QueueStream]]:
    made: list[QueueStream] = []
    yield made
    for stream in made:
        stream.end()


@pytest.fixture
def lanes(streams: list[QueueStream]) -> Generator[StreamLanes]:
    made = StreamLanes(ThreadLanes(prepare=nothing, stuck_after_s=5.0), partial(_make, streams))
    yield made
    made.close()


def _wait(event: threading.Event) -> None:
    event.wait()


def _make(streams: list[QueueStream]) -> QueueStream:
    streams.append(QueueStream())
    return streams[-1]


def test_a_task_is_complete_when_its_kernels_are(lanes: StreamLanes) -> None:
    may_end = threading.Event()
    happened: list[str] = []

    def kernel() -> None:
        may_end.wait()
        happened.append("kernel")

    lanes.submit(0, "copy_in", lambda: launch(kernel), lambda *_: happened.append("booked"), [])
    lanes.submit(1, "compute", lambda: happened.append("after it"), unheard, [0])
    lanes.submit(2, "copy_out", lambda: launch(lambda: happened.append("beside")), unheard, [])
    lanes.wait_any()
    assert happened == ["beside"]
    may_end.set()
    lanes.wait_all()
    assert happened[:2] == ["beside", "kernel"]
    assert sorted(happened[2:]) == ["after it", "booked"]


def test_each_lane_has_one_stream(lanes: StreamLanes, streams: list[QueueStream]) -> None:
    used: list[tuple[Lane, QueueStream]] = []
    for index in range(12):
        lane: Lane = ("compute", "copy_in", "copy_out")[index % 3]
        lanes.submit(
            index,
            lane,
            lambda lane=lane: used.append((lane, QueueStream.current.stream)),
            unheard,
            [],
        )
    lanes.wait_all()
    assert len(streams) == len(set(used)) == 3


def test_a_kernel_that_fails_names_its_task(lanes: StreamLanes) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("an illegal memory access\nmore lines of advice")

    lanes.submit(0, "compute", nothing, unheard, [])
    lanes.submit(7, "copy_in", lambda: launch(fail), unheard, [])
    with pytest.raises(DeviceFailedError, match=r"^an illegal memory access$") as caught:
        lanes.wait_all()
    assert (caught.value.index, caught.value.lane) == (7, "copy_in")


def test_kernels_end_before_an_error_is_told(lanes: StreamLanes) -> None:
    ended: list[str] = []

    def work() -> None:
        launch(lambda: ended.append("kernel"))
        raise ValueError("spoilt")

    lanes.submit(0, "compute", work, unheard, [])
    with pytest.raises(ValueError, match="spoilt"):
        lanes.wait_all()
    assert ended == ["kernel"]


def test_a_device_that_does_not_answer_is_told(streams: list[QueueStream]) -> None:
    lanes = StreamLanes(ThreadLanes(prepare=nothing, stuck_after_s=0.05), partial(_make, streams))
    hangs = threading.Event()
    lanes.submit(3, "copy_out", lambda: launch(partial(_wait, hangs)), unheard, [])
    with pytest.raises(LanesStuckError) as caught:
        lanes.wait_all()
    assert caught.value.running == {"copy_out": 3}
    hangs.set()
    lanes.close()


@pytest.fixture
def on_streams(monkeypatch: pytest.MonkeyPatch, streams: list[QueueStream]) -> list[QueueStream]:
    """Engines whose lanes have streams, as on a GPU."""

    def make_lanes(programs: object, device: object, num_threads: object) -> StreamLanes:
        del programs, device, num_threads
        threads = ThreadLanes(prepare=partial(torch.set_num_threads, 1))
        return StreamLanes(threads, partial(_make, streams))

    monkeypatch.setattr(engine_module, "make_lanes", make_lanes)
    return streams


@pytest.mark.parametrize("stride", [0, 2])
def test_steps_on_streams_have_the_bits_of_the_plain_loop(
    on_streams: list[QueueStream], stride: int, tmp_path: Path
) -> None:
    entry, subject = ZOO["llama"], find_subject("llama")
    steps = make_steps(entry, num_steps=3, num_microbatches=2)
    plain = train_plainly(build_model(entry), subject.optimizer, steps, max_grad_norm=0.1)
    ways = replace(IN_HOST, stride=stride)
    curve = train_by_plan(subject, ways, steps, max_grad_norm=0.1, scratch=tmp_path)
    assert find_differences(plain, curve) == ()
    assert len(on_streams) == 4  # compute, both copies, updates


def test_a_failing_device_ends_the_run_with_its_task(
    on_streams: list[QueueStream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = QueueStream.finish

    def fail_second(stream: QueueStream) -> None:
        finish(stream)
        if on_streams.index(stream) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    steps = make_steps(ZOO["llama"], num_steps=1, num_microbatches=1)
    with open_engine(
        find_subject("llama"), IN_HOST, num_microbatches=1, max_grad_norm=0.1, scratch=tmp_path
    ) as engine:
        monkeypatch.setattr(QueueStream, "finish", fail_second)
        with pytest.raises(RunFailedError, match="the device failed: CUDA out of memory") as caught:
            engine.train_step(steps[0], step=1, learning_rate=1e-3)
        assert caught.value.where is not None
        assert caught.value.where.startswith("lane copy_")
        assert "of step 1: CP " in caught.value.where


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What of torch.cuda is called, and with what."""
    calls: list[tuple[object, ...]] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *args: calls.append((name, *args))

    for name in ("empty_cache", "set_per_process_memory_fraction", "set_device"):
        monkeypatch.setattr(torch.cuda, name, record(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (500, 1000))
    return calls


def test_the_allocator_is_held_to_its_share(fake_cuda: list[tuple[object, ...]]) -> None:
    with hardware.limited_allocator(torch.device("cuda"), 250):
        assert fake_cuda == [("empty_cache",), ("set_per_process_memory_fraction", 0.25, 0)]
    assert fake_cuda[2:] == [("set_per_process_memory_fraction", 1.0, 0)]
    with hardware.limited_allocator(torch.device("cuda", 3), 5000):
        assert fake_cuda[-1] == ("set_per_process_memory_fraction", 1.0, 3)
    num_calls = len(fake_cuda)
    with hardware.limited_allocator(torch.device("cpu"), 250):
        assert len(fake_cuda) == num_calls


def test_a_gpu_gets_lanes_with_streams(
    fake_cuda: list[tuple[object, ...]],
    streams: list[QueueStream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def make_stream(device: int) -> QueueStream:
        asked.append(device)
        return _make(streams)

    monkeypatch.setattr(hardware, "CudaStream", make_stream)
    subject = find_subject("llama")
    for ways, sets in ((IN_HOST, [("set_device", 1)]), (RESIDENT, [])):
        plan = make_plan(
            subject.traced.model, subject.optimizer, ways, num_microbatches=1, clips=False
        )
        program = lower_plan(plan, subject.traced.model, "train_step")
        lanes = hardware.make_lanes([program], torch.device("cuda", 1), torch.get_num_threads())
        asked.clear()
        fake_cuda.clear()
        lanes.submit(0, "compute", nothing, unheard, [])
        lanes.wait_all()
        lanes.close()
        assert asked == [1]
        assert fake_cuda == sets
