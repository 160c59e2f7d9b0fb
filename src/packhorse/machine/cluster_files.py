"""Cluster files: JSON and YAML in, JSON and YAML out.

In: text, or a path that ends in .json, .yaml or .yml. Out: a `Cluster`; or a `FileFormatError` that
names the key, what was expected there, and the nearest key that exists.
`parse_cluster(format_cluster(cluster)) == cluster` always holds. People may write it shorter:

    kind: packhorse/cluster
    version: 1
    name: two-hosts
    ranks:                            # ranks 0 to 3, then 4 and 5
      - {machine: a100-80gb, count: 4, host: big}                        # one that is known
      - {machine: mine.json, count: 2, host: small, budget: device=8GiB} # a file, or its keys
    links:                            # each way between two ranks that have no link of their own
      within_host: {bytes_per_s: 2.0e10, latency_ns: 10000}
      between_hosts: {bytes_per_s: 1.2e9, latency_ns: 50000}

`all` stands for both sorts of links. Paths are relative to the cluster file. The ranks of an entry
without a host share one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Final, cast

from pydantic import TypeAdapter, ValidationError

from packhorse.errors import FileFormatError, InputError
from packhorse.machine.budget import parse_budget, with_budget
from packhorse.machine.catalogue import load_machine
from packhorse.machine.cluster import Cluster, give_links
from packhorse.machine.files import find_link_faults, take_machine
from packhorse.machine.reading import (
    FIX,
    FileSort,
    check_names,
    explain_invalid,
    parse_body,
    read_file,
    strip_kind,
    write_notation,
)
from packhorse.machine.spec import Machine, PeerLink

KIND: Final = "packhorse/cluster"
VERSION: Final = 1
MOST_RANKS: Final = 4096
"""More than that are a slip of the pen, and their links alone would fill the memory."""

_SORT: Final = FileSort(noun="cluster", kind=KIND, version=VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One rank, or several equal ones in a row; `machine` and `budget` are looked at later."""

    machine: object
    count: int = 1
    host: str | None = None
    budget: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkNumbers:
    bytes_per_s: float
    latency_ns: int
    core_ns_per_byte: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkRules:
    all: _LinkNumbers | None = None
    within_host: _LinkNumbers | None = None
    between_hosts: _LinkNumbers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    name: str
    ranks: list[_Entry]
    links: _LinkRules | None = None


def format_cluster(cluster: Cluster) -> str:
    """Render a cluster as JSON text that ends in a newline: an entry for each rank."""
    ranks = [
        {"host": host, "machine": asdict(machine)}
        for host, machine in zip(cluster.hosts, cluster.ranks, strict=True)
    ]
    content = {"kind": KIND, "version": VERSION, "name": cluster.name, "ranks": ranks}
    return json.dumps(content, indent=2) + "\n"


def write_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write a cluster file; YAML when the name ends in .yaml or .yml, else JSON.

    Raises:
        FileFormatError: the file cannot be written.
    """
    write_notation(format_cluster(cluster), path, _SORT)


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file.

    Raises:
        FileFormatError: the file is missing, of another kind, of a newer version, or damaged; or a
            machine file that it names is.
    """
    text = read_file(path, _SORT)
    return parse_cluster(text, where=os.fspath(path), folder=Path(path).parent)


def parse_cluster(text: str, *, where: str = "cluster text", folder: Path | None = None) -> Cluster:
    """Read a cluster from JSON or YAML text.

    Args:
        where: what errors name as the place, such as the path.
        folder: what paths of machine files are relative to; None for the working folder.

    Raises:
        FileFormatError: as for `read_cluster`.
    """
    body = parse_body(text, _SORT, where)
    _check_keys(body, where)
    try:
        content = TypeAdapter(_Content).validate_python(body)
    except ValidationError as error:
        raise explain_invalid(error, where) from error
    _check_counts(content.ranks, where)
    machines: list[Machine] = []
    hosts: list[str] = []
    for index, entry in enumerate(content.ranks):
        machine = _take_machine(entry, folder or Path(), f"{where}: ranks[{index}]")
        host = f"host-{index}" if entry.host is None else entry.host
        machines += [machine] * entry.count
        hosts += [host] * entry.count
    cluster = Cluster(name=content.name, ranks=tuple(machines), hosts=tuple(hosts))
    check_cluster(cluster, where)
    if content.links is None:
        return cluster
    _check_rules(content.links, where)
    return _add_links(cluster, content.links)


def check_cluster(cluster: Cluster, where: str) -> None:
    """Refuse a cluster whose links lead nowhere; each machine by itself was checked when made.

    Raises:
        FileFormatError: names the first link that is wrong.
    """
    last = cluster.num_ranks - 1
    for rank, machine in enumerate(cluster.ranks):
        for index, link in enumerate(machine.peers):
            place = f"{where}: rank {rank}, peers[{index}]"
            if link.peer > last:
                raise FileFormatError(
                    f"there is no rank {link.peer}: the last one is {last}", where=place, fix=FIX
                )
            if link.peer == rank:
                raise FileFormatError(
                    f"rank {rank} has a link to itself",
                    where=place,
                    fix="leave it out; equal machines with links of their own need an entry each",
                )


def _check_keys(body: Mapping[str, object], where: str) -> None:
    """Refuse unknown keys, naming the nearest, before the types are looked at."""
    check_names(body, _Content, where)
    ranks = body.get("ranks")
    if isinstance(ranks, list):
        for index, entry in enumerate(cast("list[object]", ranks)):  # parsed text, checked here
            if isinstance(entry, dict):
                keys = cast("dict[str, object]", entry)  # parsed text: only its keys are read
                check_names(keys, _Entry, f"{where}: ranks[{index}]")
    links = body.get("links")
    if isinstance(links, dict):
        rules = cast("dict[str, object]", links)  # parsed text: only its keys are read
        check_names(rules, _LinkRules, f"{where}: links")
        for name, numbers in rules.items():
            if isinstance(numbers, dict):
                keys = cast("dict[str, object]", numbers)  # parsed text: only its keys are read
                check_names(keys, _LinkNumbers, f"{where}: links.{name}")


def _check_counts(entries: Sequence[_Entry], where: str) -> None:
    if not entries:
        raise FileFormatError("a cluster needs at least one rank", where=f"{where}: ranks", fix=FIX)
    for index, entry in enumerate(entries):
        if entry.count < 1:
            raise FileFormatError(
                f"must be at least 1, not {entry.count}",
                where=f"{where}: ranks[{index}].count",
                fix="write how many equal ranks these are, or leave the entry out",
            )
        if entry.host == "":
            raise FileFormatError(
                "a host needs a name",
                where=f"{where}: ranks[{index}].host",
                fix="give the same name to all ranks of one computer",
            )
    total = sum(entry.count for entry in entries)
    if total > MOST_RANKS:
        raise FileFormatError(
            f"{total} ranks are more than {MOST_RANKS}",
            where=f"{where}: ranks",
            fix="correct the counts",
        )


def _take_machine(entry: _Entry, folder: Path, where: str) -> Machine:
    place = f"{where}.machine"
    if isinstance(entry.machine, str):
        try:
            machine = load_machine(entry.machine, folder=folder)
        except FileFormatError as error:
            # It names the machine file and the key there.
            raise FileFormatError(
                error.what, where=f"{error.where}\nnamed in {place}", fix=error.fix
            ) from error
        except InputError as error:
            raise FileFormatError(error.what, where=place, fix=error.fix) from error
    elif isinstance(entry.machine, dict):
        body = cast("dict[object, object]", entry.machine)  # parsed text: checked as any machine
        machine = take_machine(strip_kind(body), place)
    else:
        raise FileFormatError(
            f"a machine cannot be {entry.machine!r}",
            where=place,
            fix="name a known machine or a machine file, or give the keys of one",
        )
    try:
        return with_budget(machine, parse_budget(entry.budget))
    except InputError as error:
        raise FileFormatError(
            error.what, where=f"{where}.{error.where or 'budget'}", fix=error.fix
        ) from error


def _check_rules(rules: _LinkRules, where: str) -> None:
    given = {
        "all": rules.all,
        "within_host": rules.within_host,
        "between_hosts": rules.between_hosts,
    }
    for name, numbers in given.items():
        if numbers is None:
            continue
        for key, what in find_link_faults(_link_of(numbers, 0)):
            raise FileFormatError(what, where=f"{where}: links.{name}.{key}", fix=FIX)
    if rules.all is not None and (rules.within_host or rules.between_hosts):
        raise FileFormatError(
            "all is there beside within_host or between_hosts, which it stands for",
            where=f"{where}: links",
            fix="write either all, or one or both of the others",
        )


def _add_links(cluster: Cluster, rules: _LinkRules) -> Cluster:
    """Give every pair of ranks that has no link the one for its sort, where there is one."""
    links = dict(cluster.links)
    for source, target in permutations(range(cluster.num_ranks), 2):
        near = cluster.hosts[source] == cluster.hosts[target]
        numbers = rules.all or (rules.within_host if near else rules.between_hosts)
        if numbers is not None:
            links.setdefault((source, target), _link_of(numbers, target))
    return replace(cluster, ranks=give_links(cluster.ranks, links))


def _link_of(numbers: _LinkNumbers, peer: int) -> PeerLink:
    return PeerLink(
        peer=peer,
        bytes_per_s=numbers.bytes_per_s,
        latency_ns=numbers.latency_ns,
        core_ns_per_byte=numbers.core_ns_per_byte,
    )
