"""Keep transformers' fast causal attention while tracing.

Under export transformers builds a boolean mask for every causal layer, which loses the fused
causal kernel that its eager path takes. Inside `trace_like_eager` its mask functions decide as
they do in eager mode: an exactly causal layer has no mask; sliding windows, chunks and packed rows
keep theirs. Nothing of the model or its (shared) config object is changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator

from torch import Tensor


@contextlib.contextmanager
def trace_like_eager(packed: bool) -> Generator[None]:
    """Make transformers choose masks as in eager mode while the block runs.

    Args:
        packed: the batch gives position ids that restart, so rows hold several documents.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    names = vars(masking)
    exporting: Callable[[], bool] = names["is_torchdynamo_exporting"]
    find_packed: Callable[[Tensor], Tensor | None] = names["find_packed_sequence_indices"]

    def find_in_traced(position_ids: Tensor) -> Tensor | None:
        # Eager mode looks at the values; a trace cannot. Without position ids in the batch they
        # are 0..T-1 and eager finds nothing.
        return find_packed(position_ids) if packed else None

    names["is_torchdynamo_exporting"] = lambda: False
    names["find_packed_sequence_indices"] = find_in_traced
    try:
        yield
    finally:
        names["is_torchdynamo_exporting"] = exporting
        names["find_packed_sequence_indices"] = find_packed
