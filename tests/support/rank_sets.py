"""Plans of a small made-up model on several ranks, for tests of the torch-free half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packhorse.machine.catalogue import load_known_machine
from packhorse.machine.cluster import Cluster, give_links, link_all
from packhorse.machine.cluster_files import format_cluster
from packhorse.machine.spec import PeerLink
from packhorse.model.files import format_model
from packhorse.model.spec import Model
from packhorse.plan.pins import read_pins
from packhorse.plan.rank_files import format_rank_plans
from packhorse.plan.ranks import RankPlans
from packhorse.plan.spec import OptimizerPlan
from packhorse.profile.analytic import estimate_profile
from packhorse.profile.files import format_profile
from packhorse.search.rank_plans import RankCandidate, find_rank_plans
from packhorse.search.space import Arithmetic
from packhorse.units import MIB
from tests.support.models import make_model

ARITHMETIC = Arithmetic(
    compute_dtype="float32",
    tied_sum="per_step",
    attention="causal",
    num_threads=1,
    device="cpu",
    num_workers=1,
)
ADAMW = OptimizerPlan(name="adamw", states=("exp_avg", "exp_avg_sq"), master=False, clips=True)
FEW = {"schedule": "1f1b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCase:
    """Plans of all ranks, with what they were made from."""

    model: Model
    cluster: Cluster
    plans: RankPlans

    def write(self, folder: Path) -> None:
        """Write them as `packhorse plan` does."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(format_rank_plans(self.plans))
        (folder / "model.json").write_text(format_model(self.model))
        (folder / "machine.json").write_text(format_cluster(self.cluster))
        profile = estimate_profile(self.model, self.cluster.ranks[0])
        (folder / "profile.json").write_text(format_profile(profile))


def make_layers(num_layers: int = 6) -> Model:
    """A model whose backwards can run in halves."""
    return make_model(num_layers=num_layers, hidden=64, vocabulary=64, length=32, halved=True)


def make_pair(
    device_bytes: Sequence[int] = (64 * MIB, 64 * MIB), *, disk_bytes: int = 256 * MIB
) -> Cluster:
    """A rank for each budget, all in one computer."""
    machine = load_known_machine("laptop-16gb")
    budgets = [{"device": size, "disk": disk_bytes} for size in device_bytes]
    ranks = [
        replace(
            machine,
            num_threads=1,
            tiers=tuple(
                replace(tier, budget_bytes=budget[tier.name], total_bytes=1 << 40)
                for tier in machine.tiers
                if tier.name in budget
            ),
        )
        for budget in budgets
    ]
    link = PeerLink(peer=0, bytes_per_s=2e9, latency_ns=20_000)
    return Cluster(
        name="pair",
        ranks=give_links(ranks, link_all(len(ranks), link)),
        hosts=("one",) * len(ranks),
    )


def find_plans(
    model: Model,
    cluster: Cluster,
    *,
    pins: Mapping[str, object] | None = None,
    base_bytes: int = 0,
    rows: int = 4,
) -> RankPlans:
    """Plan for all ranks; `rows` of the global batch are as many micro-batches."""
    profile = replace(estimate_profile(model, cluster.ranks[0]), base_bytes=base_bytes)
    candidate = RankCandidate(
        model=model, profiles=(profile,) * len(cluster.ranks), loss_chunk_tokens=None
    )
    return find_rank_plans(
        [candidate],
        cluster,
        optimizer=ADAMW,
        arithmetic=ARITHMETIC,
        global_batch_rows=rows,
        pins=read_pins(dict(FEW if pins is None else pins)),
    ).plans


def make_case(num_ranks: int = 2, **options: object) -> RankCase:
    """Plan the small model for alike ranks."""
    model, cluster = make_layers(), make_pair((64 * MIB,) * num_ranks)
    return RankCase(model=model, cluster=cluster, plans=find_plans(model, cluster, **options))
