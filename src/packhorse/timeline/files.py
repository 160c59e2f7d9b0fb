"""timeline.json in and out.

In: a `Timeline`, or the text of a file (JSON or YAML alike). Out: text with one span on a line, so
that two files can be compared line by line, or the `Timeline`.
`parse_timeline(format_timeline(timeline)) == timeline` always holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from packhorse.errors import FileFormatError
from packhorse.notation import NotationError, parse_notation
from packhorse.program.buffers import PoolId
from packhorse.program.tasks import Lane
from packhorse.timeline.names import LANES, is_lane
from packhorse.timeline.spec import MemoryPoint, Span, Timeline

KIND: Final = "packhorse/timeline"
VERSION: Final = 2
# In a run folder, of its first rank.
PREDICTED_NAME: Final = "timeline-predicted.json"
MEASURED_NAME: Final = "timeline-measured.json"
_SPAN_COLUMNS: Final = ("index", "name", "kind", "lane", "start_ns", "end_ns")
_POINT_COLUMNS: Final = ("at_ns", "used_bytes")
_KEYS: Final = (
    "kind", "version", "source", "rank", "since_ns", "span_columns", "spans", "memory_columns",
)  # fmt: skip
_ADVICE: Final = "write it again with `packhorse simulate` or `packhorse train`"


def name_for_rank(name: str, rank: int) -> str:
    """Name a rank's own file: `timeline.json` is the first rank's, `timeline-rank-1.json` the next.

    Args:
        name: of the first rank's file, with its ending.
    """
    if not rank:
        return name
    stem, dot, ending = name.rpartition(".")
    return f"{stem}-rank-{rank}.{ending}" if dot and stem else f"{name}-rank-{rank}"


def format_timeline(timeline: Timeline) -> str:
    """Render a timeline as the text of a timeline.json, ending in a newline."""
    head = {
        "kind": KIND,
        "version": VERSION,
        "source": timeline.source,
        "rank": timeline.rank,
        "since_ns": timeline.since_ns,
        "span_columns": _SPAN_COLUMNS,
    }
    spans = [
        json.dumps([s.index, s.name, s.kind, s.lane, s.start_ns, s.end_ns]) for s in timeline.spans
    ]
    pools = [
        f"    {json.dumps(pool)}: "
        + _lines([json.dumps([p.at_ns, p.used_bytes]) for p in points], 4)
        for pool, points in timeline.memory.items()
    ]
    parts = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    parts.append('  "spans": ' + _lines(spans, 2))
    parts.append(f'  "memory_columns": {json.dumps(_POINT_COLUMNS)}')
    parts.append('  "memory": ' + ("{\n" + ",\n".join(pools) + "\n  }" if pools else "{}"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_timeline(path: str | Path) -> Timeline:
    """Read a timeline.json (or the same in YAML).

    Raises:
        FileFormatError: no such file, no timeline, a newer version, or a damaged part, by place.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileFormatError(
            "there is no such timeline file", where=str(path), fix=_ADVICE
        ) from error
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"the timeline is no text: {error.reason} at byte {error.start}",
            where=str(path),
            fix=_ADVICE,
        ) from error
    return parse_timeline(text, where=str(path))


def parse_timeline(text: str, *, where: str = "timeline") -> Timeline:
    """Read the text of a timeline.

    Args:
        text: JSON or YAML.
        where: what errors call the text, its path for example.

    Raises:
        FileFormatError: no timeline, a newer version, or a damaged part, by place.
    """
    fields = _load(text, where)
    kind, version = fields.get("kind"), fields.get("version")
    if kind != KIND:
        raise FileFormatError(
            f"this is no timeline: its kind is {kind!r}, not {KIND!r}", where=where, fix=_ADVICE
        )
    if type(version) is not int or version < 1:
        raise FileFormatError(f"version {version!r} is no version number", where=where, fix=_ADVICE)
    if version > VERSION:
        raise FileFormatError(
            f"the timeline has version {version}; this packhorse reads up to {VERSION}",
            where=where,
            fix="update packhorse, or write the timeline again with this one",
        )
    unknown = sorted(set(fields) - {*_KEYS, "memory"})
    if unknown:
        raise FileFormatError(f"unknown key {unknown[0]!r}", where=where, fix=_ADVICE)
    source, rank = fields.get("source"), fields.get("rank")
    if source not in ("simulated", "measured"):
        raise FileFormatError(
            f"source is {source!r}; it is 'simulated' or 'measured'", where=where, fix=_ADVICE
        )
    if type(rank) is not int or rank < 0:
        raise FileFormatError(f"rank is {rank!r}, not a count", where=where, fix=_ADVICE)
    # Version 1 knew no steps that run into each other.
    since_ns = fields.get("since_ns", 0 if version == 1 else None)
    if type(since_ns) is not int or since_ns < 0:
        raise FileFormatError(
            f"since_ns is {since_ns!r}, not a time in ns", where=where, fix=_ADVICE
        )
    memory = fields.get("memory")
    if not isinstance(memory, Mapping):
        raise FileFormatError("memory is no mapping of pools", where=where, fix=_ADVICE)
    pools = cast("Mapping[object, object]", memory)  # parsed text: only its outer type is known
    return Timeline(
        source="simulated" if source == "simulated" else "measured",
        rank=rank,
        since_ns=since_ns,
        spans=tuple(
            _read_span(row, f"{where}: spans[{at}]")
            for at, row in enumerate(_rows(fields.get("spans"), f"{where}: spans"))
        ),
        memory={
            PoolId(str(pool)): tuple(
                _read_point(row, f"{where}: memory.{pool}[{at}]")
                for at, row in enumerate(_rows(points, f"{where}: memory.{pool}"))
            )
            for pool, points in pools.items()
        },
    )


def _lines(items: Sequence[str], indent: int) -> str:
    if not items:
        return "[]"
    pad = " " * indent
    return f"[\n{pad}  " + f",\n{pad}  ".join(items) + f"\n{pad}]"


def _load(text: str, where: str) -> Mapping[str, object]:
    try:
        loaded = parse_notation(text)
    except NotationError as error:
        place = where if error.line is None else f"{where}, line {error.line}"
        place += "" if error.column is None else f", column {error.column}"
        raise FileFormatError(
            f"the timeline is damaged: {error.problem}", where=place, fix=_ADVICE
        ) from error
    if not isinstance(loaded, Mapping):
        raise FileFormatError("this is no timeline: it has no keys", where=where, fix=_ADVICE)
    return cast("Mapping[str, object]", loaded)  # parsed text: values are checked one by one


def _rows(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise FileFormatError("a list is missing", where=where, fix=_ADVICE)
    return cast("list[object]", value)  # parsed text: items are checked one by one


def _read_span(row: object, where: str) -> Span:
    match row:
        case [int(index), str(name), str(kind), str(lane), int(start_ns), int(end_ns)]:
            return Span(
                index=index,
                name=name,
                kind=kind,
                lane=_read_lane(lane, where),
                start_ns=start_ns,
                end_ns=end_ns,
            )
        case _:
            raise FileFormatError(
                f"a span is [{', '.join(_SPAN_COLUMNS)}], not {row!r}", where=where, fix=_ADVICE
            )


def _read_lane(lane: str, where: str) -> Lane:
    if is_lane(lane):
        return lane
    raise FileFormatError(
        f"unknown lane {lane!r}; lanes are {', '.join(LANES)}, and send and receive with a rank",
        where=where,
        fix=_ADVICE,
    )


def _read_point(row: object, where: str) -> MemoryPoint:
    match row:
        case [int(at_ns), int(used_bytes)]:
            return MemoryPoint(at_ns=at_ns, used_bytes=used_bytes)
        case _:
            raise FileFormatError(
                f"a point of memory is [{', '.join(_POINT_COLUMNS)}], not {row!r}",
                where=where,
                fix=_ADVICE,
            )
