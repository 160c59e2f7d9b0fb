"""How long chunks should be: the lengths at which a cache would move a step's states soonest.

In: a candidate and the problem. Out: a few chunk lengths, which the search then tries in earnest.
For every length that comes into question the step is ordered once and its accesses are run through
the cache simulation:

    cost(L) = for each direction: transfers * (latency + work around a task) + bytes / link rate
    where the cache has what the device budget leaves beside the process, its activations and the
    two chunks of length L that are on their way, one in and one out

Long chunks pay less latency and are fewer to place; short ones leave more of the budget to chunks
that can stay, because an update needs all states of a chunk at once and what is on its way takes
the room of whole chunks. So the longest is taken that costs at most `NEAR` more than the cheapest:
once with all activations kept and once with all recomputed, as the choice of the search lies
between. The longest of those that need least for their widest task is always among the lengths:
the smallest budget that works must be one under which it is found again.

Source: the search of the chunk length in Elixir (Huang et al., 2022). There chunks have one
length; here they keep the lengths that their blocks give them, so what is counted are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

from packhorse.compiler.chunks import ProposedChunk
from packhorse.compiler.lower import Lowerer
from packhorse.compiler.peak import peak_of
from packhorse.machine.spec import Link, Machine, TierName
from packhorse.search.cache import Accesses, simulate_cache, trace_accesses, widest_bytes
from packhorse.search.evaluation import count_modelled, short_plan
from packhorse.search.space import Candidate, Problem, find_away_tiers, make_setting
from packhorse.simulator.costs import TASK_NS
from packhorse.units import GIB, MIB

LEAST_CHUNK_BYTES: Final = 2 * MIB
MOST_CHUNK_BYTES: Final = GIB
# Lengths between these shares of the parameters: a plan of longer chunks can place little, one of
# shorter ones takes long to search.
LONGEST_SHARE: Final = 8
SHORTEST_SHARE: Final = 128
STATE_ITEM_BYTES: Final = 4
IN_FLIGHT: Final = 2
# Between lengths nearer than this the search finds no difference; fewer chunks are quicker to plan.
NEAR: Final = 0.05
LEAN: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    # The parameters cut at one length, and how a step touches their states.
    chunk_bytes: int
    chunks: tuple[ProposedChunk, ...]
    accesses: Accesses


class Lengths:
    """Chooses chunk lengths for the candidates of one problem; lowers each length once."""

    def __init__(self, problem: Problem) -> None:
        # Where states are pinned decides nothing here, and must not clash with a length.
        pins = replace(problem.pins, parameters=(), gradients=(), optimizer=())
        self._problem = replace(problem, pins=pins)
        self._cuts: dict[object, tuple[_Cut, ...]] = {}

    def choose(self, candidate: Candidate) -> tuple[int, ...]:
        """The chunk lengths to try, in bytes of one float32 state, longest first."""
        if self._problem.pins.chunk_bytes is not None:
            return (self._problem.pins.chunk_bytes,)
        lengths = list_lengths(candidate.model.num_parameters * STATE_ITEM_BYTES)
        away = find_away_tiers(self._problem.machine)
        if len(lengths) == 1 or not away:
            # Without another tier nothing moves, whatever the length.
            return lengths[:1]
        lowerer = Lowerer(candidate.model)
        cuts = self._cut(candidate, lengths, lowerer)
        widths = {cut.chunk_bytes: float(widest_bytes(cut.accesses)) for cut in cuts}
        chosen = {_longest_near(widths, LEAN)}
        for recomputes in (False, True):
            room_bytes = self._room_bytes(candidate, lengths[0], lowerer, recomputes=recomputes)
            if room_bytes >= _total_bytes(cuts[0].accesses):
                # Nothing has to leave.
                return lengths[:1]
            costs = {
                cut.chunk_bytes: cost_ns(
                    cut.accesses, self._problem.machine, away[0], room_bytes=room_bytes
                )
                for cut in cuts
            }
            if min(costs.values()) < inf:
                chosen.add(_longest_near(costs, NEAR))
        return tuple(sorted(chosen, reverse=True))

    def _cut(
        self, candidate: Candidate, lengths: Sequence[int], lowerer: Lowerer
    ) -> tuple[_Cut, ...]:
        model = candidate.model
        num_microbatches = self._problem.global_batch_rows // model.rows
        count = count_modelled(self._problem.usual_order, num_microbatches)
        # Candidates differ in rows and loss, rarely in what their blocks use.
        key = (count, tuple(block.parameters for block in model.blocks))
        if key not in self._cuts:
            cuts: list[_Cut] = []
            for length in lengths:
                setting = make_setting(self._problem, candidate, heap="map", chunk_bytes=length)
                if cuts and setting.chunks == cuts[-1].chunks:
                    continue
                plan = short_plan(self._problem, setting, [False] * len(setting.moves))
                tasks, layout = lowerer.order_step(plan)
                cuts.append(
                    _Cut(
                        chunk_bytes=length,
                        chunks=setting.chunks,
                        accesses=trace_accesses(tasks, layout),
                    )
                )
            self._cuts[key] = tuple(cuts)
        return self._cuts[key]

    def _room_bytes(
        self, candidate: Candidate, chunk_bytes: int, lowerer: Lowerer, *, recomputes: bool
    ) -> int:
        # What the budget leaves to states of chunks. A kept heap holds everything else, apart.
        setting = make_setting(self._problem, candidate, heap="keep", chunk_bytes=chunk_bytes)
        taken = [recomputes and move.kind == "recompute" for move in setting.moves]
        plan = short_plan(self._problem, setting, taken)
        program = lowerer.lower(plan, "train_step")
        heap_bytes = peak_of(program)[program.workspace_pool] * (1 + setting.heap_slack)
        device = self._problem.machine.tier("device")
        budget_bytes = 0 if device is None else device.budget_bytes
        return budget_bytes - candidate.profile.base_bytes - ceil(heap_bytes)


def list_lengths(parameter_bytes: int) -> tuple[int, ...]:
    """All lengths that come into question, powers of two, longest first."""
    longest = min(parameter_bytes // LONGEST_SHARE, MOST_CHUNK_BYTES)
    shortest = max(min(parameter_bytes // SHORTEST_SHARE, longest), LEAST_CHUNK_BYTES)
    found = [LEAST_CHUNK_BYTES]
    while found[-1] < longest:
        found.append(found[-1] * 2)
    fitting = [length for length in found if shortest <= length <= longest]
    return tuple(reversed(fitting)) or (LEAST_CHUNK_BYTES,)


def cost_ns(accesses: Accesses, machine: Machine, tier: TierName, *, room_bytes: int) -> float:
    """How long the transfers of a step take one after another; infinite if a task has no room."""
    longest = max((a.state.size_bytes for touched in accesses for a in touched), default=0)
    capacity_bytes = room_bytes - IN_FLIGHT * longest
    if capacity_bytes < widest_bytes(accesses):
        return inf
    traffic = simulate_cache(accesses, capacity_bytes=capacity_bytes, policy="belady")
    return _transfers_ns(
        machine.link(tier, "device"), traffic.num_loads, traffic.loaded_bytes
    ) + _transfers_ns(machine.link("device", tier), traffic.num_stores, traffic.stored_bytes)


def _transfers_ns(link: Link | None, count: int, size_bytes: int) -> float:
    if link is None:
        return inf if count else 0.0
    return count * (link.latency_ns + TASK_NS) + size_bytes * 1e9 / link.bytes_per_s


def _total_bytes(accesses: Accesses) -> int:
    states = {access.state for touched in accesses for access in touched}
    return sum(state.size_bytes for state in states)


def _longest_near(costs: Mapping[int, float], share: float) -> int:
    limit = min(costs.values()) * (1 + share)
    return max(length for length, cost in costs.items() if cost <= limit)
