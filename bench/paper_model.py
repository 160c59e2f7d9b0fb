"""A decoder in the shape of Llama, on paper: a model.json without a module, weights or torch.

In: a `DecoderShape`. Out: a `Model` with an embedding, layers that share one body, and a head with
the loss. Operations are counted from the products; saved values are those that a layer with a
fused attention keeps for its backward. Every backward may run in halves: the input half takes as
many operations as the weight half, and three quarters of what was saved wait between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from packhorse.model.spec import (
    ITEM_BYTES,
    Block,
    BlockId,
    Body,
    BodyId,
    Half,
    Halves,
    Model,
    Parameter,
    ParameterName,
    Value,
    ValueId,
)

TOKENS, LABELS, LOSS = ValueId("input_ids"), ValueId("labels"), ValueId("loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder, and of its micro-batches."""

    name: str
    num_layers: int
    width: int
    inner_width: int
    kv_width: int
    vocabulary: int
    rows: int
    length: int
    dtype: str = "bfloat16"

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length

    @property
    def value_bytes(self) -> int:
        """Bytes of what passes from layer to layer."""
        return self.num_tokens * self.width * ITEM_BYTES[self.dtype]

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits in float32, in which the loss is computed."""
        return self.num_tokens * self.vocabulary * ITEM_BYTES["float32"]

    def layer_parameters(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters of a layer, by name, with their shapes."""
        wide, inner, narrow = self.width, self.inner_width, self.kv_width
        return {
            "input_layernorm.weight": (wide,),
            "self_attn.q_proj.weight": (wide, wide),
            "self_attn.k_proj.weight": (narrow, wide),
            "self_attn.v_proj.weight": (narrow, wide),
            "self_attn.o_proj.weight": (wide, wide),
            "post_attention_layernorm.weight": (wide,),
            "mlp.gate_proj.weight": (inner, wide),
            "mlp.up_proj.weight": (inner, wide),
            "mlp.down_proj.weight": (wide, inner),
        }


def make_decoder(shape: DecoderShape) -> Model:
    """Build the model of a decoder."""
    last = shape.num_layers + 1
    own: list[Mapping[str, tuple[int, ...]]] = [
        {"embed_tokens.weight": (shape.vocabulary, shape.width)},
        *(
            {f"layers.{at}.{name}": size for name, size in shape.layer_parameters().items()}
            for at in range(shape.num_layers)
        ),
        {"norm.weight": (shape.width,), "lm_head.weight": (shape.vocabulary, shape.width)},
    ]
    bodies = [_embed(shape), _layer(shape), _head(shape)]
    names = ["embed", *(f"layers.{at}" for at in range(shape.num_layers)), "head"]
    return Model(
        name=shape.name,
        fingerprint=f"paper-{shape.name}-{shape.num_layers}x{shape.width}",
        rows=shape.rows,
        length=shape.length,
        loss=LOSS,
        blocks=tuple(
            Block(
                id=BlockId(at),
                name=names[at],
                body=bodies[0 if at == 0 else 2 if at == last else 1].id,
                parameters=tuple(map(ParameterName, own[at])),
                inputs=(TOKENS,) if at == 0 else (_value(at - 1), *([LABELS] * (at == last))),
                outputs=(LOSS,) if at == last else (_value(at),),
                has_backward=True,
            )
            for at in range(last + 1)
        ),
        bodies={body.id: body for body in bodies},
        values=_make_values(shape, last),
        parameters={
            ParameterName(name): Parameter(
                name=ParameterName(name),
                shape=size,
                dtype=shape.dtype,
                trainable=True,
                group="decay" if len(size) > 1 else "no_decay",
                aliases=(),
                blocks=(BlockId(at),),
            )
            for at, parameters in enumerate(own)
            for name, size in parameters.items()
        },
    )


def _value(block: int) -> ValueId:
    return ValueId(f"hidden.{block}")


def _make_values(shape: DecoderShape, last: int) -> dict[ValueId, Value]:
    ends = {TOKENS: BlockId(0), LABELS: BlockId(last)}
    fed = {
        name: Value(
            id=name,
            shape=(shape.rows, shape.length),
            dtype="int64",
            size_bytes=shape.num_tokens * ITEM_BYTES["int64"],
            needs_grad=False,
            producer=None,
            consumers=(user,),
        )
        for name, user in ends.items()
    }
    made = {
        _value(at): Value(
            id=_value(at),
            shape=(shape.rows, shape.length, shape.width),
            dtype=shape.dtype,
            size_bytes=shape.value_bytes,
            needs_grad=True,
            producer=BlockId(at),
            consumers=(BlockId(at + 1),),
        )
        for at in range(last)
    }
    loss = Value(
        id=LOSS,
        shape=(),
        dtype="float32",
        size_bytes=4,
        needs_grad=True,
        producer=BlockId(last),
        consumers=(),
    )
    return {**fed, **made, LOSS: loss}


def _embed(shape: DecoderShape) -> Body:
    return _make_body(
        "embed",
        flops=0,
        moved_bytes=2 * shape.value_bytes,
        saved_bytes=0,
        backward_inputs=(0,),
        has_input_half=False,
    )


def _layer(shape: DecoderShape) -> Body:
    item = ITEM_BYTES[shape.dtype]
    sizes = shape.layer_parameters().values()
    products = 2 * shape.num_tokens * sum(prod(size) for size in sizes if len(size) > 1)
    # Causal attention: scores and their product with values, half of each.
    attention = 2 * shape.num_tokens * shape.length * shape.width
    # Both norms' outputs, queries, what attention gives and its residual; keys and values; gate,
    # up and their product. The layer's input is read again by name.
    widths = 5 * shape.width + 2 * shape.kv_width + 3 * shape.inner_width
    return _make_body(
        "layer",
        flops=products + attention,
        moved_bytes=2 * shape.num_tokens * widths * item,
        saved_bytes=shape.num_tokens * widths * item,
        workspace_bytes=2 * shape.num_tokens * shape.inner_width * item,
        matrices=tuple(at for at, size in enumerate(sizes) if len(size) > 1),
        backward_inputs=(0,),
    )


def _head(shape: DecoderShape) -> Body:
    return _make_body(
        "head",
        flops=2 * shape.num_tokens * shape.vocabulary * shape.width,
        moved_bytes=2 * shape.logits_bytes,
        saved_bytes=shape.logits_bytes + shape.value_bytes,
        workspace_bytes=shape.logits_bytes,
        matrices=(0, 1),
        backward_inputs=(0, 1),
        tangents=(),
    )


def _make_body(
    name: str,
    *,
    flops: int,
    moved_bytes: int,
    saved_bytes: int,
    backward_inputs: tuple[int, ...],
    workspace_bytes: int = 0,
    matrices: tuple[int, ...] = (),
    tangents: tuple[int, ...] = (0,),
    has_input_half: bool = True,
) -> Body:
    # The halves share a backward of twice the forward's work; an embedding has the second alone.
    half = Half(
        compute_flops=flops if has_input_half else 2 * flops,
        moved_bytes=moved_bytes if has_input_half else 2 * moved_bytes,
        workspace_bytes=workspace_bytes,
        parameters=matrices,
        inputs=backward_inputs,
        outputs=(),
        tangents=tangents,
    )
    return Body(
        id=BodyId(name),
        forward_flops=flops,
        backward_flops=2 * flops,
        forward_bytes=moved_bytes,
        backward_bytes=2 * moved_bytes,
        saved_bytes=saved_bytes,
        forward_workspace_bytes=workspace_bytes,
        discard_workspace_bytes=workspace_bytes,
        backward_workspace_bytes=workspace_bytes,
        backward_parameters=matrices,
        backward_inputs=backward_inputs,
        backward_outputs=(),
        num_random=0,
        halves=Halves(
            stash_bytes=saved_bytes * 3 // 4 if has_input_half else 0,
            input=half if has_input_half else None,
            weight=half,
        ),
    )
