"""Models on ranks, and what a place of the cuts costs there: worked out one block at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations

from packhorse.machine.cluster import Links, link_all
from packhorse.machine.spec import PeerLink
from packhorse.model.spec import ITEM_BYTES, BodyId
from packhorse.profile.spec import BodyTime, Profile
from packhorse.schedule.costs import even_costs
from packhorse.schedule.families import make_named
from packhorse.schedule.holding import stages_of
from packhorse.schedule.spec import Backward, Forward, InputGrad, Schedule, WeightGrad
from packhorse.search.block_times import time_blocks
from packhorse.search.ranks import RankSpec
from packhorse.search.stages import make_cutter
from tests.search.toy_search import ADAMW
from tests.support.models import make_model

HUGE = 1 << 50
FAST = PeerLink(peer=0, bytes_per_s=1e15, latency_ns=0)


def own_bodies(model):
    """The same model with a body for each block, so that each block has times of its own."""
    blocks = tuple(replace(each, body=BodyId(f"body.{each.id}")) for each in model.blocks)
    bodies = {
        new.body: replace(model.bodies[old.body], id=new.body)
        for new, old in zip(blocks, model.blocks, strict=True)
    }
    return replace(model, blocks=blocks, bodies=bodies)


def make_profile(model, forward_ns, *, base_bytes=0):
    """Times of every block, in order; a backward takes twice the forward."""
    return Profile(
        model=model.fingerprint,
        rows=model.rows,
        length=model.length,
        source="measured",
        bodies={
            block.body: BodyTime(forward_ns=each, discard_ns=each, backward_ns=2 * each)
            for block, each in zip(model.blocks, forward_ns, strict=True)
        },
        base_bytes=base_bytes,
    )


def make_ranks(profile, *factors, budget_bytes=HUGE, **more):
    return tuple(
        RankSpec(profile=profile, budget_bytes=budget_bytes, time_factor=factor, **more)
        for factor in factors
    )


def make_schedule(name, num_ranks, num_microbatches=4, num_stages=None) -> Schedule:
    even = even_costs(num_ranks)
    return make_named(name, num_ranks, num_microbatches, even, num_stages=num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: object
    ranks: tuple[RankSpec, ...]
    links: Links
    schedule: Schedule

    @property
    def cutter(self):
        return make_cutter(self.model, self.ranks, self.links, optimizer=ADAMW)


def draw_case(seed, name, num_ranks, num_blocks, num_stages=None) -> Case:
    """Blocks, ranks, links and budgets that are unlike, with skips and ties."""
    dice = random.Random(seed)
    last = num_blocks - 1
    model = own_bodies(
        make_model(
            num_layers=num_blocks - 2,
            hidden=16,
            vocabulary=dice.choice([16, 48]),
            tied_head=dice.random() < 0.5,
            shared_layers=[1, last - 1] if dice.random() < 0.3 else (),
            skips=[(1, last - 1)] if dice.random() < 0.5 else (),
            frozen=dice.choice([(), (), ("embed", "layers.1.")]),
        )
    )
    profile = make_profile(
        model, [dice.randint(50, 200) for _ in model.blocks], base_bytes=dice.choice([0, 500])
    )
    whole_bytes = 16 * model.num_parameters
    ranks = tuple(
        RankSpec(
            profile=profile,
            budget_bytes=round(whole_bytes * dice.choice([0.6, 0.9, 1.5, 5]) + 12_000),
            time_factor=dice.choice([1, 1, 1.5, 2]),
            away_bytes_per_s=dice.choice([None, None, 1e12]),
        )
        for _ in range(num_ranks)
    )
    link = PeerLink(
        peer=0,
        bytes_per_s=dice.choice([1e15, 2e9]),
        latency_ns=dice.choice([0, 40]),
        core_ns_per_byte=dice.choice([0, 0, 0.02]),
    )
    schedule = make_schedule(name, num_ranks, num_stages=num_stages)
    return Case(model=model, ranks=ranks, links=link_all(num_ranks, link), schedule=schedule)


def rate_cuts(case: Case, bounds, known):
    """The bottleneck in ns, None where a rank lacks memory, and the bytes over the cuts.

    `known` is kept from call to call: what was worked out for the same case.
    """
    schedule = case.schedule
    rank_of = [schedule.placement[stage][0] for stage in range(schedule.num_stages)]
    loads = []
    for rank in range(len(case.ranks)):
        stages = stages_of(schedule, rank)
        key = (rank, *(bounds[at] for stage in stages for at in (stage, stage + 1)))
        if key not in known:
            known[key] = _rate_rank(case, rank, bounds, rank_of)
        loads.append(known[key])
    busy, crossing = {}, 0
    for cut in range(1, schedule.num_stages):
        source, target = rank_of[cut - 1], rank_of[cut]
        if source != target:
            there, back = _message(case, bounds[cut], known)
            for way, size in (((source, target), there), ((target, source), back)):
                crossing += size
                busy[way] = busy.get(way, 0) + case.links[way].transfer_ns(size)
    worst = None if None in loads else max([*loads, *busy.values()])
    return worst, crossing


def list_cuts(case: Case):
    last = len(case.model.blocks)
    for inner in combinations(range(1, last), case.schedule.num_stages - 1):
        yield (0, *inner, last)


def _message(case: Case, cut, known):
    """The bytes over a cut, there and back."""
    if cut not in known:
        over = [
            value
            for value in case.model.values.values()
            if value.producer is not None
            and value.producer < cut
            and any(cut <= block for block in value.consumers)
        ]
        known[cut] = (
            sum(value.size_bytes for value in over),
            sum(value.size_bytes for value in over if value.needs_grad),
        )
    return known[cut]


def _rate_rank(case: Case, rank, bounds, rank_of):
    """The time of a rank for a microbatch; None where it lacks memory either way."""
    model, spec = case.model, case.ranks[rank]
    stages = stages_of(case.schedule, rank)
    blocks = [b for stage in stages for b in range(bounds[stage], bounds[stage + 1])]
    names = {name for b in blocks for name in model.blocks[b].parameters}
    states = sum(_states_bytes(model.parameters[name]) for name in names)
    least = max(
        sum(_least_bytes(model.parameters[name]) for name in model.blocks[b].parameters)
        for b in blocks
    )
    messages_ns = 0
    for cut in range(1, case.schedule.num_stages):
        source, target = rank_of[cut - 1], rank_of[cut]
        forward_bytes, gradient_bytes = _message(case, bounds[cut], {})
        if source != target:
            own_ns = case.links[source, target].core_ns(forward_bytes)
            own_ns += case.links[target, source].core_ns(gradient_bytes)
            messages_ns += own_ns * ((source == rank) + (target == rank))
    found = []
    for recomputes in (False, True):
        took_ns = messages_ns + _time_rank(case, rank, blocks, recomputes=recomputes)
        rest = spec.profile.base_bytes + _held_bytes(case, rank, bounds, recomputes=recomputes)
        rest += max(_workspace_bytes(model, b, recomputes=recomputes) for b in blocks)
        if rest + states <= spec.budget_bytes:
            found.append(took_ns)
        elif spec.away_bytes_per_s and rest + min(least, states) <= spec.budget_bytes:
            moved = rest + states - spec.budget_bytes
            moving_ns = moved * 2e9 / spec.away_bytes_per_s / case.schedule.num_microbatches
            found.append(max(took_ns, moving_ns))
    return min(found, default=None)


def _time_rank(case: Case, rank, blocks, *, recomputes):
    times = time_blocks(case.model, case.ranks[rank])
    last = len(times) - 1
    total = 0
    for block in blocks:
        once = block == last and _holds_last_once(case)
        total += times[block].remade_ns if recomputes and not once else times[block].kept_ns
    return total


def _holds_last_once(case: Case):
    last = case.schedule.num_stages - 1
    held, most = 0, 0
    for task in case.schedule.orders[case.schedule.placement[last][0]]:
        if task.stage == last:
            held += isinstance(task, Forward) - isinstance(task, Backward | WeightGrad)
            most = max(most, held)
    return most == 1


def _held_bytes(case: Case, rank, bounds, *, recomputes):
    saved, opened = {}, {}
    for stage in stages_of(case.schedule, rank):
        blocks = range(bounds[stage], bounds[stage + 1])
        saved[stage] = _saved_bytes(case.model, blocks, recomputes=recomputes)
        opened[stage] = sum(_own_bytes(case.model, b) for b in blocks) if recomputes else 0
    held = most = 0
    for task in case.schedule.orders[rank]:
        match task:
            case Forward():
                held += saved[task.stage]
            case InputGrad():
                held += opened[task.stage]
            case Backward():
                held -= saved[task.stage]
            case WeightGrad():
                held -= saved[task.stage] + opened[task.stage]
        most = max(most, held)
    return most


def _saved_bytes(model, blocks, *, recomputes):
    names, total = set(), 0
    for b in blocks:
        block = model.blocks[b]
        body = model.bodies[block.body]
        if not block.has_backward:
            continue
        if recomputes:
            names |= set(block.inputs)
        else:
            total += body.saved_bytes
            names |= {block.inputs[at] for at in body.backward_inputs}
            names |= {block.outputs[at] for at in body.backward_outputs}
    made = [model.values[name] for name in names if model.values[name].producer is not None]
    return total + sum(value.size_bytes for value in made)


def _own_bytes(model, b):
    block = model.blocks[b]
    return model.bodies[block.body].saved_bytes if block.has_backward else 0


def _workspace_bytes(model, b, *, recomputes):
    body = model.body_of(b)
    own = _own_bytes(model, b) if recomputes else 0
    found = [own + body.forward_workspace_bytes, own + body.backward_workspace_bytes]
    return max([*found, body.discard_workspace_bytes] if recomputes else found)


def _states_bytes(parameter):
    return parameter.num_elements * (16 if parameter.trainable else ITEM_BYTES[parameter.dtype])


def _least_bytes(parameter):
    return parameter.num_elements * (8 if parameter.trainable else 4)
