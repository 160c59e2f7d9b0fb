"""How long a rank takes for each block: forward, both halves of the backward, and once more.

In: a model, and a rank with its profile. Out: a `BlockTime` for each block. A profile has whole
backwards. The half of the weights is told by counting: the gradient of a weight matrix takes as
many operations as its product in the forward, 2 for each token and element, and that share of the
backward's operations is its share of the time. What has no such product is all of one half: a
block below which nothing is trained hands no gradient on, and one without trained parameters has
none of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from packhorse.errors import InputError
from packhorse.model.spec import Block, Model
from packhorse.search.ranks import RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """What one microbatch takes in a block on one rank.

    `discard_ns` is that of a forward that keeps nothing. A block that saves nothing, or runs no
    backward, never `recomputes`.
    """

    forward_ns: int
    discard_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    recomputes: bool

    @property
    def kept_ns(self) -> int:
        """Forward and backward, values kept."""
        return self.forward_ns + self.input_grad_ns + self.weight_grad_ns

    @property
    def remade_ns(self) -> int:
        """Forward, where anything was saved a second forward, and backward."""
        return self.kept_ns + (self.discard_ns if self.recomputes else 0)


def time_blocks(model: Model, rank: RankSpec) -> tuple[BlockTime, ...]:
    """Give the times of all blocks on a rank.

    Raises:
        InputError: the rank's profile is of another model or shape, or lacks a body.
    """
    profile = rank.profile
    wanted, given = (model.rows, model.length), (profile.rows, profile.length)
    if (profile.model, *given) != (model.fingerprint, *wanted):
        what = f"{given[0]} x {given[1]} tokens" if given != wanted else "another model"
        raise InputError(
            f"the profile is of {what}, not of {model.name} at {model.rows} x {model.length}",
            where="the profile of a rank",
            fix="profile the model anew at this shape",
        )
    return tuple(_time_block(model, rank, block) for block in model.blocks)


def share_weights(model: Model, block: Block) -> Fraction:
    """Give the weight gradient's share of a block's backward, from 0 to 1."""
    if not any(model.parameters[name].trainable for name in block.parameters):
        return Fraction(0)
    if not any(model.values[name].needs_grad for name in block.inputs):
        return Fraction(1)
    body = model.body_of(block.id)
    products = sum(
        2 * model.rows * model.length * parameter.num_elements
        for parameter in (model.parameters[name] for name in block.parameters)
        if parameter.trainable and len(parameter.shape) > 1
    )
    # A routed block runs a share of its experts alone: no product takes more than the forward.
    whole = body.backward_flops
    return Fraction(min(products, body.forward_flops, whole), whole) if whole else Fraction(1, 2)


def _time_block(model: Model, rank: RankSpec, block: Block) -> BlockTime:
    times = rank.profile.bodies.get(block.body)
    if times is None:
        raise InputError(
            f"the profile has no times for block {block.name}",
            where=f"body {block.body} of {model.name}",
            fix="profile the model anew at this shape",
        )
    factor = Fraction(rank.time_factor)
    backward_ns = round(times.backward_ns * factor) if block.has_backward else 0
    weight_grad_ns = round(backward_ns * share_weights(model, block))
    discard_ns = round(times.discard_ns * factor)
    return BlockTime(
        forward_ns=round(times.forward_ns * factor) if block.has_backward else discard_ns,
        discard_ns=discard_ns,
        input_grad_ns=backward_ns - weight_grad_ns,
        weight_grad_ns=weight_grad_ns,
        recomputes=block.has_backward and model.body_of(block.id).saved_bytes > 0,
    )
