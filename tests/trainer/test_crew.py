"""What ranks leave to the first one, and hear from it."""

from __future__ import annotations

import pytest

from packhorse.trainer.crew import ALONE


def test_one_rank_leads_and_agrees_with_itself():
    assert ALONE.lead(lambda: "found") == "found"
    assert ALONE.lead_flag(lambda: True)
    assert ALONE.agree(3) == 3
    assert ALONE.open_transport([]) is None
    with pytest.raises(ValueError, match="there is no rank 1"):
        ALONE.receive_text(1)
