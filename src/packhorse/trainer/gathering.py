"""Brings the states of all ranks to the first one, piece by piece, for what it saves.

In: each rank's session, and the (parameter, state) pairs that are wanted. Out: pieces on the first
rank, as if it had held them all. A parameter that several ranks hold comes from the first of them:
the copies are the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import torch

from packhorse.checkpoint.save import Piece
from packhorse.checkpoint.tensor_writer import TORCH_DTYPES
from packhorse.model.parts import find_holders
from packhorse.model.spec import Model, ParameterName
from packhorse.trainer.crew import Crew
from packhorse.trainer.session import Session

States = frozenset[tuple[str, str]]
_TURN: Final = "your turn"
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def gather_states(
    session: Session, crew: Crew, states: States, take: Callable[[Piece], None]
) -> None:
    """Give every piece of the wanted states of all ranks to `take`, on the first rank.

    On the others it hands this rank's own over, and `take` is not called. All ranks call it.

    Raises:
        PeerLostError: another rank is gone.
    """
    own = frozenset(pair for pair in states if _giver_of(session.model, pair[0]) == crew.rank)
    if crew.rank:
        # Not on a lane, which may not stand still for as long as the first rank saves its own.
        crew.receive_text(0)
        session.hand_out(own, lambda piece: _send(piece, crew))
        crew.send_text("", 0)
        return
    session.hand_out(own, take)
    for peer in range(1, crew.num_ranks):
        crew.send_text(_TURN, peer)
        while (head := crew.receive_text(peer)) != "":
            take(_receive(head, crew, peer))


def _giver_of(model: Model, parameter: str) -> int:
    if model.part is None:
        return 0
    holders = find_holders(model.part.whole, model.part.owners, ParameterName(parameter))
    # One that no block uses lies on the first rank.
    return holders[0] if holders else 0


def _send(piece: Piece, crew: Crew) -> None:
    values = piece.values.detach().to("cpu").contiguous()
    head = [piece.parameter, piece.state, piece.start, values.numel(), _DTYPE_NAMES[values.dtype]]
    crew.send_text(json.dumps(head), 0)
    crew.send(values, 0)


def _receive(head: str, crew: Crew, peer: int) -> Piece:
    parameter, state, start, num_elements, dtype = json.loads(head)
    values = torch.empty(num_elements, dtype=TORCH_DTYPES[dtype])
    crew.receive(values, peer)
    return Piece(parameter=parameter, state=state, start=start, values=values)
