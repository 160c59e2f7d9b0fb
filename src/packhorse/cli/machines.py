"""The machine of a command: a file, a known machine, or this one, probed; with its budgets.

In: what was typed, and what the recipe grants. Out: a `Machine` whose tiers carry the budgets. What
the command line names wins over the recipe; a tier that neither names may use what is free less a
margin.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.errors import DoesNotFitError, InputError
from packhorse.units import format_exact_bytes

if TYPE_CHECKING:
    from packhorse.cli.screen import Screen
    from packhorse.machine.budget import Budget
    from packhorse.machine.cluster import Cluster
    from packhorse.machine.probe_sustained import WriteLimits
    from packhorse.machine.spec import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChoice:
    """What was typed about the machine and its budgets."""

    name: str | None = None
    budget: str | None = None
    memory: str | None = None


def choose_machine(
    choice: MachineChoice,
    screen: Screen,
    *,
    granted: Budget | None = None,
    threads: int | None = None,
    here: bool = False,
) -> Machine:
    """Give the machine that a command plans for.

    Args:
        granted: the recipe's budget.
        threads: pinned compute threads; this machine is measured with them.
        here: a named machine stands for this one, so that its device must be here, and its
            scratch folder is checked.

    Raises:
        InputError: there is no such machine, or a budget is wrong or more than there is.
        FileFormatError: the machine file is damaged.
    """
    from packhorse.machine.budget import Budget, parse_budget, parse_memory, with_budget
    from packhorse.machine.catalogue import load_machine

    budget = merge_budgets(parse_budget(choice.budget), granted or Budget())
    if choice.name is not None:
        machine = load_machine(choice.name)
        if here:
            check_device(machine)
        if choice.memory is not None:
            budget = merge_budgets(parse_memory(choice.memory, machine), budget)
        if threads is not None:
            machine = replace(machine, num_threads=threads)
        warn_of_busy_rates(screen, machine)
        return with_budget(machine, budget, here=here)
    if choice.memory is None:
        return probe_here(screen, budget, threads=threads)
    # Whether --memory is allowed depends on the machine, so it is probed first.
    machine = probe_here(screen, replace(budget, device_bytes=None), threads=threads)
    return with_budget(machine, parse_memory(choice.memory, machine))


def find_cluster(
    choice: MachineChoice, *, granted: Budget | None = None, threads: int | None = None
) -> Cluster | None:
    """Give the machines of several ranks, where a file of them is named; else None.

    Budgets that were typed or that the recipe grants are each rank's.

    Raises:
        InputError: a budget is wrong or more than there is.
        FileFormatError: the file is damaged.
    """
    from packhorse.cli.kinds import detect_kind
    from packhorse.machine.cluster_files import read_cluster

    if choice.name is None or not Path(choice.name).is_file():
        return None
    if detect_kind(Path(choice.name)) != "cluster":
        return None
    cluster = read_cluster(choice.name)

    ranks = tuple(grant_typed(machine, choice, granted) for machine in cluster.ranks)
    if threads is not None:
        ranks = tuple(replace(machine, num_threads=threads) for machine in ranks)
    return replace(cluster, ranks=ranks)


def grant_typed(machine: Machine, choice: MachineChoice, granted: Budget | None) -> Machine:
    """Give one rank's machine the budgets that were typed, or that the recipe grants.

    Raises:
        InputError: a budget is wrong or more than there is.
    """
    from packhorse.machine.budget import Budget, parse_budget, parse_memory, with_budget

    budget = merge_budgets(parse_budget(choice.budget), granted or Budget())
    if choice.memory is not None:
        budget = merge_budgets(parse_memory(choice.memory, machine), budget)
    return machine if budget == Budget() else with_budget(machine, budget)


def is_this_computer(choice: MachineChoice) -> bool:
    """Whether a command plans for the computer that it runs on, and for its real device.

    Raises:
        InputError, FileFormatError: as `load_machine`.
    """
    if choice.name is None:
        return True
    from packhorse.machine.catalogue import load_machine
    from packhorse.machine.probe import is_here

    # As it was measured: pinned threads and budgets make no other computer of it.
    return is_here(load_machine(choice.name))


def check_device(machine: Machine) -> None:
    """Refuse to run for a device that this process does not have."""
    import torch

    if machine.device == "cpu" or torch.cuda.is_available():
        return
    raise InputError(
        f"{machine.name} computes on {machine.device}, and torch finds no GPU here",
        where="--machine",
        fix="leave --machine out to train on this machine; `packhorse plan` plans for any machine,"
        " and `packhorse doctor` says why a GPU is not found",
    )


def probe_here(
    screen: Screen,
    budget: Budget,
    *,
    threads: int | None = None,
    fresh: bool = False,
    sustained: WriteLimits | None = None,
    file_bytes: int | None = None,
) -> Machine:
    """Measure this machine, or take its rates from the cache; shows what is being measured.

    A signal ends it as an error does, so that its files are removed.
    """
    from packhorse.machine.probe import probe_machine
    from packhorse.trainer.stop_signals import stop_at_once

    with stop_at_once(), screen.progress("measuring this machine") as progress:
        machine = probe_machine(
            budget=budget,
            threads=threads,
            fresh=fresh,
            sustained=sustained,
            file_bytes=file_bytes,
            progress=progress,
        )
    warn_of_busy_rates(screen, machine)
    return machine


@contextmanager
def advise_as_typed(choice: MachineChoice) -> Generator[None]:
    """Inside, a refusal names the budget by the option that was typed, or where recipes have it.

    Raises:
        DoesNotFitError: the one that came, reworded.
    """
    try:
        yield
    except DoesNotFitError as error:
        if set(error.least_bytes) != {"device"} or error.fix is None or choice.budget is not None:
            raise
        size = format_exact_bytes(error.least_bytes["device"])
        option = f"--budget device={size}"
        if choice.memory is not None:
            words = f"--memory {size}"
        else:
            words = f"{option} (in a recipe: budget: {{device: {size}}})"
        raise DoesNotFitError(
            error.what,
            where=error.where,
            fix=error.fix.replace(option, words),
            least_bytes=error.least_bytes,
        ) from error


def warn_of_busy_rates(screen: Screen, machine: Machine) -> None:
    """Say that a machine's rates were measured while others computed there."""
    warn_of_busy(
        screen,
        machine.busy_share,
        what="its rates",
        fix="measure again with `packhorse probe --fresh`",
    )


def warn_of_busy(
    screen: Screen, busy_share: float, *, what: str, fix: str, slowdown: float = 1.0
) -> None:
    """Say that something was measured while others computed here; see `say_busy`."""
    from packhorse.machine.contention import say_busy

    said = say_busy(busy_share, what=what, fix=fix, slowdown=slowdown)
    if said is not None:
        screen.warn(said)


def merge_budgets(typed: Budget, granted: Budget) -> Budget:
    """Take each tier's budget from what was typed, else from what the recipe grants."""
    from packhorse.machine.budget import DEFAULT_SCRATCH

    disks = typed.disks or granted.disks
    match typed.disks, granted.disks:
        case (alone,), (folder,) if alone.path == DEFAULT_SCRATCH:
            # A size alone was typed: the recipe's folder stays.
            disks = (replace(alone, path=folder.path),)
        case (alone,), (_, _, *_) if alone.path == DEFAULT_SCRATCH:
            raise InputError(
                f"a size alone was typed; the recipe names {len(granted.disks)} scratch folders",
                where="--budget: disk",
                fix="say it for each: " + ",".join(f"disk={d.path}:SIZE" for d in granted.disks),
            )
        case _:
            pass
    return replace(
        typed,
        device_bytes=_first(typed.device_bytes, granted.device_bytes),
        host_bytes=_first(typed.host_bytes, granted.host_bytes),
        disks=disks,
    )


def _first(typed: int | None, granted: int | None) -> int | None:
    return granted if typed is None else typed
