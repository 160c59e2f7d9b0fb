"""What `import packhorse` offers; loads torch only when something is called.

    machine = packhorse.probe(budget={"device": "1GiB", "disk": "scratch"})
    plan = packhorse.find_plan(model, batch, machine)
    with packhorse.Run(model, optimizer=packhorse.AdamW(lr=3e-4), plan=plan) as run:
        loss = run.step(batch)

In: modules, batches, budgets. Out: the same frozen nouns that the command line writes to files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from packhorse.errors import InputError, MismatchError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from packhorse.machine.spec import Machine
    from packhorse.model.spec import Model
    from packhorse.optim.optimizers import SGD, AdamW, Optimizer
    from packhorse.plan.spec import Plan
    from packhorse.profile.spec import Profile
    from packhorse.program.program import Program
    from packhorse.report.drawn import DrawnTimeline
    from packhorse.trainer.module_run import Run
    from packhorse.trainer.run_program import RunProgram

__all__ = ["SGD", "AdamW", "Run", "find_plan", "probe", "simulate"]

_LAZY: Final = ("SGD", "AdamW", "Run")
Progress = Callable[[str, int, int], None]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'packhorse.api' has no attribute {name!r}")
    if name == "Run":
        from packhorse.trainer.module_run import Run

        return Run
    from packhorse.optim.optimizers import SGD, AdamW

    return SGD if name == "SGD" else AdamW


def probe(
    budget: object = None,
    *,
    threads: int | None = None,
    device: str | None = None,
    fresh: bool = False,
    sustained: bool = False,
    progress: Progress | None = None,
) -> Machine:
    """Measure this machine; its rates are kept and measured once.

    Args:
        budget: as in a recipe, such as `{"device": "1GiB", "disk": "scratch"}`; what is absent may
            use what is free less a margin.
        threads: compute threads; None takes what torch would use.
        device: `cpu` or `cuda`; None takes a GPU where there is one.
        fresh: measure although this hardware was measured before.
        sustained: write until the drive's rate is steady: up to 64 GiB or five minutes.
        progress: called before each part with its name, its index and the number of parts.

    Raises:
        InputError: the budget exceeds what is there, or a path is unwritable.
        StorageError: the scratch disk fails.
    """
    from packhorse.machine.budget import parse_budget
    from packhorse.machine.probe import probe_machine
    from packhorse.machine.probe_sustained import WriteLimits

    return probe_machine(
        budget=parse_budget(budget),
        threads=threads,
        device=device,
        fresh=fresh,
        sustained=WriteLimits() if sustained else None,
        progress=progress,
    )


def find_plan(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    machine: Machine,
    *,
    optimizer: Optimizer | None = None,
    max_grad_norm: float | None = None,
    bf16: bool = False,
    pins: Mapping[str, object] | None = None,
    measure: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest plan for a module that fits a machine's budgets.

    Args:
        model: its forward takes the batch as keyword arguments and returns a loss: a transformers
            causal LM, or a module that returns a mean or a (sum, count) pair. Its parameters may
            be on the meta device; those without `requires_grad` are frozen.
        batch: a whole global batch, rows first; only its shapes and dtypes matter.
        machine: from `probe`, or read from a file; its tiers' budgets are the limits.
        optimizer: as for `Run`; by default `AdamW()`.
        max_grad_norm: as for `Run`; whether gradients are clipped decides what is kept.
        bf16: compute in bfloat16 beside float32 master weights.
        pins: choices that are fixed, as under `plan` in a recipe.
        measure: time the model's blocks here; False estimates them from the machine's rates.
        progress: called before each part with its name, its index and the number of parts.

    Raises:
        ModelError: the module cannot be traced.
        RecipeError: a pin cannot be met.
        DoesNotFitError: no plan fits; names the smallest budget that works.
    """
    import torch

    from packhorse.graph.export import describe_parameters
    from packhorse.optim.groups import assign_groups, find_module_kinds
    from packhorse.optim.optimizers import AdamW
    from packhorse.plan.pins import read_pins
    from packhorse.search.search import find_plan as search_plan
    from packhorse.search.space import Arithmetic, Candidate
    from packhorse.trainer.candidates import (
        MEASURE_LIMIT_S,
        TracingRequest,
        find_attention,
        measure_baseline,
        trace_candidates,
    )
    from packhorse.trainer.module_run import check_batch
    from packhorse.trainer.numerics import find_instructions
    from packhorse.trainer.preparation import plan_optimizer

    check_batch(model, batch)
    chosen = AdamW() if optimizer is None else optimizer
    fixed = read_pins(pins or {})
    compute_dtype = fixed.compute_dtype or ("bfloat16" if bf16 else "float32")
    if compute_dtype == "float16":
        raise InputError(
            "float16 would need loss scaling", where="pins: compute_dtype", fix="use bfloat16"
        )
    attention = find_attention(model)
    if fixed.attention is not None and fixed.attention != attention:
        raise InputError(
            f"attention is pinned to {fixed.attention}, but the module computes it as {attention}",
            where="pins: attention",
            fix="leave the pin out, or build the module with that attention: attn_implementation",
        )
    baseline_bytes = measure_baseline() if measure else None
    global_rows = next(iter(batch.values())).shape[0]
    candidates = trace_candidates(
        model,
        batch,
        TracingRequest(
            name=type(model).__name__,
            groups=assign_groups(
                describe_parameters(model), chosen, module_kinds=find_module_kinds(model)
            ),
            compute_dtype=torch.bfloat16 if compute_dtype == "bfloat16" else torch.float32,
            device=machine.device,
        ),
        machine,
        global_rows=global_rows,
        microbatch_rows=fixed.microbatch_rows,
        loss_chunk_tokens=fixed.loss_chunk_tokens,
        limit_s=MEASURE_LIMIT_S if measure else 0.0,
        baseline_bytes=baseline_bytes,
        progress=progress,
    )
    return search_plan(
        [
            Candidate(
                model=entry.traced.model,
                profile=entry.profile,
                loss_chunk_tokens=entry.loss_chunk_tokens,
            )
            for entry in candidates.entries
        ],
        machine,
        optimizer=plan_optimizer(
            chosen, compute_dtype=compute_dtype, clips=max_grad_norm is not None
        ),
        arithmetic=Arithmetic(
            compute_dtype=compute_dtype,
            tied_sum=fixed.tied_sum or "per_microbatch",
            attention=attention,
            num_threads=fixed.num_threads or machine.num_threads,
            device=machine.device,
            num_workers=1,
            instructions=find_instructions(machine),
        ),
        global_batch_rows=global_rows,
        pins=fixed,
        resumable=False,
    )


def simulate(
    program: RunProgram | Program,
    machine: Machine,
    *,
    model: Model | None = None,
    profile: Profile | None = None,
) -> DrawnTimeline:
    """Predict when each task of a program runs on a machine, and what memory it uses.

    Args:
        program: from `Run.programs`, such as `run.programs["train_step"]`, or parsed from a file.
        machine: any machine, also one that is somewhere else.
        model: the model of a program that was parsed from a file.
        profile: block times; by default they are estimated from the machine's rates.

    Returns:
        A timeline with `step_ns`, `makespan_ns`, `bubble`, `idle_in_span` and `peak_bytes`;
        notebooks draw it.

    Raises:
        MismatchError: program or profile belong to another model or shape.
        InputError: the machine lacks a rate that the program needs, or there is no model.
    """
    from packhorse.compiler.buffers import HEAP
    from packhorse.profile.analytic import estimate_profile
    from packhorse.profile.identity import check_profile
    from packhorse.report.drawn import DrawnTimeline
    from packhorse.simulator.costs import TaskCosts
    from packhorse.simulator.engine import simulate_run
    from packhorse.trainer.run_program import RunProgram

    if isinstance(program, RunProgram):
        program, model = program.program, model or program.model
    if model is None:
        raise InputError(
            "a program alone does not say how much its blocks compute",
            where=f"program of model {program.model}",
            fix='give one of run.programs, or model= beside a parsed one, such as "model.json" read'
            " by packhorse.model.files.read_model",
        )
    if program.model != model.fingerprint:
        raise MismatchError(
            f"the program was compiled for model {program.model}, this is {model.fingerprint}",
            where=f"model {model.name}",
            fix="give the model that the program was compiled for",
        )
    if profile is not None:
        check_profile(profile, model)
    costs = TaskCosts(
        machine=machine,
        profile=estimate_profile(model, machine) if profile is None else profile,
        model=model,
        program=program,
        heap="keep" if program.workspace_pool == HEAP else "map",
    )
    return DrawnTimeline(
        timeline=simulate_run(program, costs=costs),
        capacity_bytes={pool.id: pool.capacity_bytes for pool in program.pools},
        title=f"{model.name}: {program.kind}",
    )
