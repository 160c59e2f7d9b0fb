"""The summary of a run as a document."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from packhorse.cli.training_screen import Summary
from packhorse.cli.training_summary import summary_as_dict


def test_an_eval_loss_that_is_not_finite_is_null():
    planned = SimpleNamespace(
        plan=SimpleNamespace(prediction=None, budget_bytes={}),
        prepared=SimpleNamespace(recipe=SimpleNamespace(run_folder=Path("run"))),
    )
    summary = Summary(
        first_loss=(1, 2.0),
        last_loss=(2, 1.0),
        eval_losses=((1, float("nan")), (2, 1.5)),
        step_s=(1.0, 1.0),
        tokens_per_second=8.0,
        peak_bytes={},
        result=None,
    )
    document = json.loads(json.dumps(summary_as_dict(planned, summary), allow_nan=False))
    assert [each["eval_loss"] for each in document["eval_losses"]] == [None, 1.5]
