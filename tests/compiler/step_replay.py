"""A replay of programs that shares no code with the compiler, with symbolic contents.

It follows in which tiers each buffer lies, whether the copies are the newest, how full each pool
is, and for gradients how they were summed, as a formula: "(4@0 + 0@0)" is the gradient by block 4
in micro-batch 0 plus that by block 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from packhorse.model.spec import Model
from packhorse.program.buffers import Chunk
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
    Recompute,
    SegmentNorm,
    Update,
)


@dataclass
class StepReplay:
    """Replays one program; `held` maps (buffer, tier) to the version that lies there."""

    program: Program
    model: Model
    held: dict = field(default_factory=dict)
    newest: dict = field(default_factory=dict)
    sums: dict = field(default_factory=dict)
    used: Counter = field(default_factory=Counter)
    peaks: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)

    def fill(self):
        for buffer in self.program.buffers.values():
            if buffer.home is not None:
                self._place(buffer.id, buffer.home)
        self.peaks.update(self.used)

    def run(self):
        for task in self.program.tasks:
            self.step(task)

    def check_at_home(self):
        homes = {(b.id, b.home) for b in self.program.buffers.values() if b.home is not None}
        assert set(self.held) == homes
        assert all(self.held[name, tier] == self.newest[name] for name, tier in homes)

    def step(self, task):
        match task:
            case Copy():
                self._read(task.buffer, task.source)
                assert self.held.get((task.buffer, task.target)) != self.newest[task.buffer]
                self.copies[task.buffer.split("/")[0], task.source, task.target] += 1
                self._place(task.buffer, task.target)
                self._note_peak(0)
            case Free():
                version = self.held.pop((task.buffer, task.tier))
                buffer = self.program.buffers[task.buffer]
                self.used[buffer.pools[task.tier]] -= buffer.size_bytes
                kept = any(
                    name == task.buffer and other == version
                    for (name, _), other in self.held.items()
                )
                assert kept or buffer.home is None or version != self.newest[task.buffer]
                if not any(name == task.buffer for name, _ in self.held):
                    self.sums.pop(task.buffer, None)
            case Emit() | Export():
                self._read(task.buffer, "device")
            case Import():
                assert not self._exists(task.buffer)
                self._place(task.buffer, "device")
                self._note_peak(0)
            case Feed():
                self._touch((), task.writes, 0)
            case GradNorm():
                self._touch(task.reads, task.writes, 0)
            case Forward() | Recompute() | SegmentNorm():
                self._touch(task.reads, task.writes, task.workspace_bytes)
            case Update():
                self._touch(task.reads, task.writes, task.workspace_bytes, task.where)
            case Backward():
                self._touch(task.reads, task.writes, task.workspace_bytes)
                self._sum(task)

    def _sum(self, task):
        block = self.model.blocks[task.block]
        at = f"@{task.microbatch}"
        for value in block.inputs:
            name = f"dvalue/{value}{at}"
            if name in task.writes:
                self.sums.setdefault(name, []).append(task.block)
        for value in block.outputs:
            name = f"dvalue/{value}{at}"
            if name in task.reads:
                users = self.model.values[value].consumers
                users = [user for user in users if self.model.blocks[user].has_backward]
                assert self.sums[name] == sorted(users, reverse=True)
        for parameter in block.parameters:
            if self.model.parameters[parameter].trainable:
                self._sum_parameter(task, parameter)

    def _sum_parameter(self, task, parameter):
        # What a body does: it adds its own gradient to a running sum that it reads; the result
        # becomes the running sum, or goes to the chunk, onto what is there of this parameter.
        running = f"wgrad/{parameter}@{task.microbatch}"
        part = f"{task.block}@{task.microbatch}"
        own = f"wsum/{parameter}/{task.block}"
        if own in task.writes:
            part = f"({self.sums[own]} + {part})" if own in task.reads else part
            self.sums[own] = part
            if not any(f"grad/{c.id}" in task.writes for c in self._chunks_of(parameter)):
                return
        if running in task.reads:
            part = f"({self.sums[running]} + {part})"
        if running in task.writes:
            self.sums[running] = part
            return
        for chunk in self._chunks_of(parameter):
            assert f"grad/{chunk.id}" in task.writes
            grads = self.sums.setdefault(f"grad/{chunk.id}", {})
            grads[parameter] = f"({grads[parameter]} + {part})" if parameter in grads else part

    def _chunks_of(self, parameter):
        return self.program.layout.chunks_of(parameter)

    def grads_of(self, chunk: Chunk):
        return self.sums[f"grad/{chunk.id}"]

    def _touch(self, reads, writes, workspace_bytes, tier="device"):
        assert len(set(reads)) == len(reads)
        assert len(set(writes)) == len(writes)
        for name in reads:
            self._read(name, tier)
        for name in writes:
            # A state with a home may be made anew while an older copy waits there.
            made_anew = self.program.buffers[name].home not in (None, tier)
            assert name in reads or made_anew or not self._exists(name)
            self.newest[name] = self.newest.get(name, 0) + 1
            self._place(name, tier)
        self._note_peak(workspace_bytes)

    def _exists(self, name):
        return any(other == name for other, _ in self.held)

    def _read(self, name, tier):
        assert self.held[name, tier] == self.newest[name], (name, tier)

    def _place(self, name, tier):
        buffer = self.program.buffers[name]
        if (name, tier) not in self.held:
            self.used[buffer.pools[tier]] += buffer.size_bytes
        self.held[name, tier] = self.newest.setdefault(name, 0)

    def _note_peak(self, workspace_bytes):
        for pool, used in self.used.items():
            extra = workspace_bytes if pool == self.program.workspace_pool else 0
            self.peaks[pool] = max(self.peaks[pool], used + extra)
