"""One rank's share of a run of several: its part of the model, its plan, its proved programs.

In: the whole traced model and the plans of all ranks, the same on every rank. Out: this rank's part
of the model and its `Joint`. Every rank lowers and proves all programs, so each knows the whole;
only its own is run.
"""

from __future__ import annotations

from hashlib import sha256

from packhorse.compiler.passes.exchange import find_channels
from packhorse.compiler.ranks import cut_stages, lower_ranks
from packhorse.graph.parts import cut_traced
from packhorse.graph.trace import Traced
from packhorse.plan.ranks import RankPlans, check_num_ranks
from packhorse.program.program import ProgramKind, Proof
from packhorse.trainer.crew import Crew
from packhorse.trainer.session import Joint
from packhorse.verifier.joint import verify_ranks


def join_ranks(traced: Traced, plans: RankPlans, crew: Crew) -> tuple[Traced, Joint]:
    """Cut, lower and prove for all ranks; open the channels; give this rank its own.

    Args:
        traced: the whole model, as the plans say.

    Raises:
        MismatchError: the plans are of another model, or for another number of ranks; ranks have
            made different programs.
        RuleError: a program breaks a rule, alone or with the others.
    """
    check_num_ranks(plans, crew.num_ranks, where="torchrun --nnodes and --nproc-per-node")
    parts = cut_stages(plans.pipeline, traced.model)
    programs = lower_ranks(plans.ranks, parts)
    proofs: dict[ProgramKind, tuple[Proof, ...]] = {
        kind: verify_ranks(found, parts) for kind, found in programs.items()
    }
    digests = [proof.digest for _, each in sorted(proofs.items()) for proof in each]
    crew.compare(
        {"the digest of the programs": sha256(" ".join(digests).encode()).hexdigest()[:16]},
        "give every rank the same version of Packhorse, then start all of them",
    )
    joint = Joint(
        programs={kind: found[crew.rank] for kind, found in programs.items()},
        proofs={kind: found[crew.rank] for kind, found in proofs.items()},
        transport=crew.open_transport(find_channels(parts[crew.rank])),
    )
    return cut_traced(traced, plans.pipeline.owners)[crew.rank], joint
