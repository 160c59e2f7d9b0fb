"""How many bytes a graph holds while it runs, from the storages of its traced values.

In: a graph whose nodes carry fake tensors (two nodes that share a storage are views of the same
bytes). Out: the peak of what it allocates beyond its arguments. Holds for code that drops each
value right after its last use, as fx's generated code does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor, fx

from packhorse.graph.nodes import is_operation, writes_in_place
from packhorse.units import MIB

# The C heap maps blocks from here on, whatever its mode: see `runtime.memory.heap`.
LARGE_BLOCK_BYTES: Final = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapUse:
    """What runs hold at most beyond their arguments, each at a moment of its own.

    `large_bytes` are in blocks of `LARGE_BLOCK_BYTES` and more, which the C heap gives back when
    they are freed; `small_bytes` in smaller ones, whose pages it may keep.
    """

    large_bytes: int
    small_bytes: int


def storages_of(value: object) -> Iterator[tuple[int, int]]:
    """The storages behind a traced value: (identity, bytes)."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        identity = storage._cdata  # pyright: ignore[reportPrivateUsage]  # it has no public name
        yield identity, storage.nbytes()
    elif isinstance(value, tuple | list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]  # items of any traced value
            yield from storages_of(item)  # pyright: ignore[reportUnknownArgumentType]  # as above


def bytes_of(nodes: Iterable[fx.Node], *, but: frozenset[int] | set[int] = frozenset()) -> int:
    """Bytes of the distinct storages behind nodes, without the storages in `but`."""
    found = {key: size for node in nodes for key, size in storages_of(node.meta.get("val"))}
    return sum(size for key, size in found.items() if key not in but)


def peak_bytes(
    graph: fx.Graph,
    *,
    owned: frozenset[int] | set[int] = frozenset(),
    at_least_bytes: int = 0,
    below_bytes: int | None = None,
) -> int:
    """Largest number of bytes that a run of the graph holds beyond its arguments.

    Args:
        graph: placeholders are the arguments; the output node keeps what it returns.
        owned: storages of placeholders that count as the graph's own, live from the start.
        at_least_bytes: smaller storages do not count.
        below_bytes: nor do storages of this size and more.
    """
    nodes = list(graph.nodes)
    last: dict[int, int] = {}
    arguments: set[int] = set()
    for index, node in enumerate(nodes):
        for source in (node, *node.all_input_nodes):
            for key, _ in storages_of(source.meta.get("val")):
                last[key] = index
        if node.op == "placeholder":
            keys = {key for key, _ in storages_of(node.meta.get("val"))}
            arguments |= keys - set(owned)
    live: dict[int, int] = {}
    total = peak = 0
    for index, node in enumerate(nodes):
        for key, size in storages_of(node.meta.get("val")):
            if size < at_least_bytes or (below_bytes is not None and size >= below_bytes):
                continue
            if key not in arguments and key not in live and node.op != "output":
                live[key] = size
                total += size
        peak = max(peak, total)
        touched = (node, *node.all_input_nodes)
        for key in {k for source in touched for k, _ in storages_of(source.meta.get("val"))}:
            if last[key] == index and key in live and node.op != "output":
                total -= live.pop(key)
    return peak


def find_heap_use(*graphs: fx.Graph, owned: frozenset[int] | set[int] = frozenset()) -> HeapUse:
    """Find what a run of any of the graphs holds at most; `owned` as for `peak_bytes`."""
    large = (peak_bytes(g, owned=owned, at_least_bytes=LARGE_BLOCK_BYTES) for g in graphs)
    small = (peak_bytes(g, owned=owned, below_bytes=LARGE_BLOCK_BYTES) for g in graphs)
    return HeapUse(large_bytes=max(large, default=0), small_bytes=max(small, default=0))


def moved_bytes(graph: fx.Graph) -> int:
    """Bytes that the graph's operations read and write, views not counted."""
    moved = 0
    for node in graph.nodes:
        if node.op != "call_function" or not is_operation(node.target):
            continue
        outs = dict(storages_of(node.meta.get("val")))
        ins = {
            key: size
            for source in node.all_input_nodes
            for key, size in storages_of(source.meta.get("val"))
        }
        if not outs or (set(outs) <= set(ins) and not writes_in_place(node)):
            continue
        moved += sum(_tensor_bytes(node.meta.get("val")))
        moved += sum(sum(_tensor_bytes(source.meta.get("val"))) for source in node.all_input_nodes)
    return moved


def _tensor_bytes(value: object) -> Iterator[int]:
    if isinstance(value, Tensor):
        yield value.numel() * value.element_size()
    elif isinstance(value, tuple | list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]  # items of any traced value
            yield from _tensor_bytes(item)  # pyright: ignore[reportUnknownArgumentType]  # as above
