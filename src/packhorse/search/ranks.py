"""The ranks of a pipeline, as the search of stages sees them.

In: what each rank's hardware was found to do. Out: frozen values. Ranks may be unlike; the links
between them are those of `machine.cluster`.
"""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.profile.spec import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank: how fast it computes, and what it may hold.

    A body takes `time_factor` times as long as `profile` says. `budget_bytes` is for all that the
    rank holds in its device tier. `away_bytes_per_s` is the rate at which states that do not fit
    come and go, in each direction; None where they may lie nowhere else.
    """

    profile: Profile
    budget_bytes: int
    time_factor: float = 1.0
    away_bytes_per_s: float | None = None
