"""The machine: tiers, rates and compute curves. Torch-free.

In: what the probe measured, or a file from `machines/`, or a person's own file.
Out: a frozen `Machine` that planning, simulation and the runtime read.
All rates were measured with the I/O path the runtime uses, or are marked `source="catalogue"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

TierName = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One scratch folder: its share of the budget, its rates alone, and how they are reached.

    `measured_bytes` is the size of the file that it was measured with. A run moves bytes as the
    rates were measured: past the page cache or not (`direct`), in transfers of at most
    `block_bytes`, `num_threads` at once in each direction, to memory of huge pages or not.
    """

    path: str
    budget_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    measured_bytes: int
    direct: bool
    block_bytes: int
    num_threads: int
    huge_pages: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One place where bytes live.

    `budget_bytes` is what a plan may use of it; `total_bytes` is what is there: the memory that
    this process may use at most, or what was free on the disk. For the disk tier `path` is the
    scratch folder, and `endurance_bytes` what its drive may be written in its life, where known.
    `drives` are its scratch folders as measured, the first at `path`; several share every transfer
    in proportion to their rates.
    """

    name: TierName
    total_bytes: int
    budget_bytes: int
    path: str | None = None
    endurance_bytes: int | None = None
    drives: tuple[Drive, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A one-way path between two tiers of one rank.

    `bytes_per_s` is the rate that plans count on while the way back is idle; `mixed_bytes_per_s`
    the one while both ways are busy, None where nobody measured it. Where `bytes_per_s` is known to
    be what a drive sustains, `burst_bytes_per_s` is what it did before its cache was full.
    `core_ns_per_byte` is how long moving a byte keeps a core of this computer from computing, as a
    read does whose pages the kernel has to make and clear; None where nobody measured it.
    """

    source: TierName
    target: TierName
    bytes_per_s: float
    latency_ns: int
    mixed_bytes_per_s: float | None = None
    burst_bytes_per_s: float | None = None
    core_ns_per_byte: float | None = None


MESSAGE_CORE_NS: Final = 200_000
"""What a message takes of a core at either end, whatever its size: threads that wake each other.

Where two processes of one thread computed on two cores, 128 messages more a step kept each of them
from computing for 26 to 40 ms.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """The one-way path from this rank to another one.

    `core_ns_per_byte` is how long moving a byte keeps either end from computing, 0 where it does
    not.
    """

    peer: int
    bytes_per_s: float
    latency_ns: int
    core_ns_per_byte: float = 0.0

    def transfer_ns(self, size_bytes: int) -> int:
        """How long a message is on its way; none at all takes nothing."""
        return self.latency_ns + round(size_bytes * 1e9 / self.bytes_per_s) if size_bytes else 0

    def core_ns(self, size_bytes: int) -> int:
        """How long a message keeps either end from computing: nothing where its bytes do not."""
        if not size_bytes or not self.core_ns_per_byte:
            return 0
        return MESSAGE_CORE_NS + round(size_bytes * self.core_ns_per_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulPoint:
    """One measured point of the matmul curve: an n x n x n product in `dtype`."""

    dtype: str
    size: int
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRate:
    """Fused AdamW speed on fp32 state that lies in `tier`."""

    tier: TierName
    parameters_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heap:
    """How the C heap behaves here.

    `map_cost` is the extra compute time (a share of it) when large blocks are mapped and given
    back at once instead of kept; `keep_slack` is the share by which a kept heap outgrows its live
    bytes.
    """

    map_cost: float
    keep_slack: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How fast files are saved: checkpoints and the finished model.

    `write_bytes_per_s` is the rate through the page cache with all of it brought to the disk on
    the way; `checksum_bytes_per_s` the one of CRC-32 on one core; `sync_ns` is what it takes to
    bring a small change to the disk.
    """

    write_bytes_per_s: float
    checksum_bytes_per_s: float
    sync_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What a machine stands for: its rates are those of machine `of`, divided by `slowdown`.

    It runs on a CPU: the device tier is a share of memory of its own, and every task takes as long
    as the rates say.
    """

    of: str
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One rank's hardware, as a plan sees it; with `emulation`, hardware that is only acted.

    `compute_scale` is how much longer blocks take in a run than when they are profiled alone, as a
    run showed. `busy_share` is the share of the compute threads' time that other processes took
    while the rates of compute and memory were measured. `saving` is None where nobody measured it.
    `peers` are the links to other ranks.
    """

    name: str
    source: Literal["probe", "catalogue", "hand"]
    fingerprint: str
    measured_at: str
    device: str
    num_cores: int
    num_threads: int
    bf16_native: bool
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    matmul: tuple[MatmulPoint, ...]
    memory_bytes_per_s: float
    updates: tuple[UpdateRate, ...]
    heap: Heap
    saving: Saving | None = None
    compute_scale: float = 1.0
    busy_share: float = 0.0
    emulation: Emulation | None = None
    peers: tuple[PeerLink, ...] = ()

    def tier(self, name: TierName) -> Tier | None:
        """Find a tier by name."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    def peer_link(self, peer: int) -> PeerLink | None:
        """Find the link to another rank."""
        return next((link for link in self.peers if link.peer == peer), None)

    def link(self, source: TierName, target: TierName) -> Link | None:
        """Find the one-way link between two tiers."""
        return next(
            (link for link in self.links if (link.source, link.target) == (source, target)), None
        )
