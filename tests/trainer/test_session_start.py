"""An engine that cannot be made leaves nothing behind: no scratch file, no held folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_training import run
from tiny_runs import ALL_ON_DISK

from packhorse.runtime import engine
from packhorse.storage.scratch_folder import claim_scratch, find_leftovers


def test_what_was_taken_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    seen: list[int] = []

    def fail(*_: object) -> None:
        seen.append(len(find_leftovers(scratch)))
        raise RuntimeError("no lanes")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "make_lanes", fail)
        with pytest.raises(RuntimeError, match="no lanes") as raised:
            run(tmp_path, plan=ALL_ON_DISK)
    assert seen == [2]  # the file was there, and its record
    assert find_leftovers(scratch) == ()
    claim_scratch(scratch).close()
    assert raised.value.__traceback__ is not None  # whose frames hold the half-made engine
