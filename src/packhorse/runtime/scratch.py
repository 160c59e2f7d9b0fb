"""From the machine's disk tier to scratch files: the folders, their shares, and how bytes move.

In: a tier as it was probed, or as a person wrote it. Out: a `Scratch`; None where there is no
folder. A tier without measured drives is moved in the usual way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packhorse.machine.drives import share_units
from packhorse.machine.spec import Drive, Tier
from packhorse.storage.scratch_space import Scratch, ScratchPart, make_scratch


def find_scratch(tier: Tier | None) -> Scratch | None:
    """Give the scratch of a disk tier."""
    if tier is None or tier.path is None:
        return None
    return choose_scratch(None, tier.drives, tier.path)


def choose_scratch(
    folder: str | Path | None, drives: Sequence[Drive], otherwise: str | Path
) -> Scratch:
    """Give the scratch of a folder that was named, else of measured drives, else of a folder."""
    if folder is not None or not drives:
        return make_scratch(Path(folder or otherwise))
    return Scratch(
        parts=tuple(
            ScratchPart(
                folder=Path(drive.path),
                units=units,
                direct=drive.direct,
                block_bytes=drive.block_bytes,
                num_threads=drive.num_threads,
            )
            for drive, units in zip(drives, share_units(drives), strict=True)
        ),
        huge_pages=all(drive.huge_pages for drive in drives),
    )
