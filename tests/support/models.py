"""Small made-up models and plans, for tests of the torch-free half.

`make_model` builds a chain of an embedding, layers and a head with a loss; skips, a parameter
shared by several layers, a head tied to the embedding, frozen parameters and two optimizer groups
are options. `make_plan` fits a plan to it. Odd layers read their input and output again in the
backward, even ones do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from packhorse.compiler.chunks import pack_chunks
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
from packhorse.plan.spec import (
    ActivationChoice,
    BlockPlan,
    Choice,
    ChunkPlan,
    HeapMode,
    Numerics,
    OptimizerPlan,
    Order,
    PipelinePlan,
    Plan,
    TiedSum,
)
from packhorse.program.buffers import TierName
from packhorse.schedule.spec import Schedule

INPUT_IDS = ValueId("input_ids")
LABELS = ValueId("labels")
LOSS = ValueId("loss")


def make_model(
    *,
    num_layers: int = 2,
    hidden: int = 32,
    vocabulary: int = 64,
    rows: int = 1,
    length: int = 8,
    dtype: str = "float32",
    tied_head: bool = False,
    shared_layers: Sequence[int] = (),
    skips: Sequence[tuple[int, int]] = (),
    frozen: Sequence[str] = (),
    saves: bool = True,
    halved: bool = False,
) -> Model:
    """Build a model of `num_layers` + 2 blocks.

    Args:
        num_layers: blocks 1 to `num_layers`; block 0 embeds, the last one has the loss.
        hidden: width; a layer has `hidden` * (`hidden` + 2) scalars.
        vocabulary: rows of the embedding and of the head.
        rows: rows of a micro-batch.
        length: tokens of a row.
        dtype: of parameters and values.
        tied_head: the head uses the embedding's weight.
        shared_layers: blocks of layers that also use `shared.weight`.
        skips: (producer block, consumer block) pairs: the consumer also takes that value.
        frozen: prefixes of names of parameters that are not trained.
        saves: False makes every body save nothing.
        halved: every backward can run in halves; those of odd layers stash nothing.
    """
    last = num_layers + 1
    item = ITEM_BYTES[dtype]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, hidden)}
    users: dict[str, list[int]] = {"embed.weight": [0]}
    parameters: dict[int, list[str]] = {0: ["embed.weight"]}
    for layer in range(1, num_layers + 1):
        own = {
            f"layers.{layer}.norm.weight": (hidden,),
            f"layers.{layer}.proj.weight": (hidden, hidden),
            f"layers.{layer}.proj.bias": (hidden,),
        }
        shapes |= own
        users |= {name: [layer] for name in own}
        parameters[layer] = list(own)
        if layer in shared_layers:
            shapes["shared.weight"] = (hidden, hidden)
            users.setdefault("shared.weight", []).append(layer)
            parameters[layer].append("shared.weight")
    head = "embed.weight" if tied_head else "head.weight"
    shapes[head] = (vocabulary, hidden)
    users.setdefault(head, []).append(last)
    parameters[last] = [head]

    inputs: dict[int, list[ValueId]] = {0: [INPUT_IDS]}
    for block in range(1, last + 1):
        taken = [block - 1] + [made for made, user in skips if user == block and made < block - 1]
        inputs[block] = [ValueId(f"h{made}") for made in dict.fromkeys(taken)]
    inputs[last].append(LABELS)

    trained = {name: not any(name.startswith(prefix) for prefix in frozen) for name in shapes}
    has_backward: list[bool] = []
    for block in range(last + 1):
        below = any(
            has_backward[int(value[1:])] for value in inputs[block] if value.startswith("h")
        )
        has_backward.append(below or any(trained[name] for name in parameters[block]))

    blocks: list[Block] = []
    bodies: dict[BodyId, Body] = {}
    for block in range(last + 1):
        body = _body(
            block=block,
            last=last,
            num_inputs=len(inputs[block]),
            num_parameters=len(parameters[block]),
            value_bytes=rows * length * hidden * item,
            logits_bytes=rows * length * vocabulary * item,
            flops=2 * rows * length * sum(prod(shapes[name]) for name in parameters[block]),
            saves=saves,
        )
        if halved and has_backward[block]:
            flows = any(has_backward[int(v[1:])] for v in inputs[block] if v.startswith("h"))
            trains = any(trained[name] for name in parameters[block])
            cut = _halves(body, block, last, flows=flows, trains=trains)
            name = BodyId(f"{body.id}.{'I' * flows}{'W' * trains}")
            body = replace(body, id=name, halves=cut)
        bodies[body.id] = body
        blocks.append(
            Block(
                id=BlockId(block),
                name="embed" if block == 0 else "head" if block == last else f"layers.{block}",
                body=body.id,
                parameters=tuple(ParameterName(name) for name in parameters[block]),
                inputs=tuple(inputs[block]),
                outputs=(LOSS,) if block == last else (ValueId(f"h{block}"),),
                has_backward=has_backward[block],
            )
        )
    consumers = {
        value: tuple(BlockId(b) for b in range(last + 1) if value in inputs[b])
        for value in [INPUT_IDS, LABELS, LOSS, *(ValueId(f"h{b}") for b in range(last))]
    }
    values = {
        name: Value(
            id=name,
            shape=(rows, length),
            dtype="int64",
            size_bytes=rows * length * 8,
            needs_grad=False,
            producer=None,
            consumers=consumers[name],
        )
        for name in (INPUT_IDS, LABELS)
    }
    for block in range(last):
        name = ValueId(f"h{block}")
        values[name] = Value(
            id=name,
            shape=(rows, length, hidden),
            dtype=dtype,
            size_bytes=rows * length * hidden * item,
            needs_grad=has_backward[block],
            producer=BlockId(block),
            consumers=consumers[name],
        )
    values[LOSS] = Value(
        id=LOSS,
        shape=(),
        dtype="float32",
        size_bytes=4,
        needs_grad=has_backward[last],
        producer=BlockId(last),
        consumers=(),
    )
    return Model(
        name="toy",
        fingerprint=f"toy-{num_layers}-{hidden}-{vocabulary}",
        rows=rows,
        length=length,
        loss=LOSS,
        blocks=tuple(blocks),
        bodies=bodies,
        values=values,
        parameters={
            ParameterName(name): Parameter(
                name=ParameterName(name),
                shape=shape,
                dtype=dtype,
                trainable=trained[name],
                group="decay" if len(shape) > 1 else "no_decay",
                aliases=("head.weight",) if tied_head and name == "embed.weight" else (),
                blocks=tuple(BlockId(b) for b in users[name]),
            )
            for name, shape in shapes.items()
        },
    )


def _body(
    *,
    block: int,
    last: int,
    num_inputs: int,
    num_parameters: int,
    value_bytes: int,
    logits_bytes: int,
    flops: int,
    saves: bool,
) -> Body:
    matrices: tuple[int, ...]
    backward_inputs: tuple[int, ...] = ()
    backward_outputs: tuple[int, ...] = ()
    if block == 0:
        name, matrices, backward_inputs = "embed", (), (0,)
        saved, forward, discard, backward = 0, 0, 0, value_bytes
    elif block == last:
        name, matrices, backward_inputs = f"head.{num_inputs}", (0,), (0, num_inputs - 1)
        saved, forward, discard, backward = logits_bytes, 0, logits_bytes, 2 * logits_bytes
    else:
        name = f"layer.{block % 2}.{num_inputs}.{num_parameters}"
        matrices = (1,) if num_parameters == 3 else (1, 3)
        if block % 2:
            backward_inputs, backward_outputs = (0,), (0,)
        saved, forward = 3 * value_bytes, value_bytes
        discard, backward = 3 * value_bytes, 2 * value_bytes
    return Body(
        id=BodyId(name),
        forward_flops=flops,
        backward_flops=2 * flops,
        forward_bytes=4 * value_bytes,
        backward_bytes=8 * value_bytes,
        saved_bytes=saved if saves else 0,
        forward_workspace_bytes=forward,
        discard_workspace_bytes=discard,
        backward_workspace_bytes=backward,
        backward_parameters=matrices,
        backward_inputs=backward_inputs,
        backward_outputs=backward_outputs,
        num_random=0,
    )


def _halves(body: Body, block: int, last: int, *, flows: bool, trains: bool) -> Halves:
    """Weight halves of odd layers read the block's input and a gradient again, others stash."""
    tangents = () if block == last else (0,)
    first = Half(
        compute_flops=body.forward_flops,
        moved_bytes=body.forward_bytes,
        workspace_bytes=body.backward_workspace_bytes // 2,
        parameters=body.backward_parameters,
        inputs=body.backward_inputs,
        outputs=body.backward_outputs,
        tangents=tangents,
    )
    second = Half(
        compute_flops=body.backward_flops - body.forward_flops,
        moved_bytes=body.backward_bytes - body.forward_bytes,
        workspace_bytes=body.backward_workspace_bytes // 4,
        parameters=body.backward_parameters[1:],
        inputs=body.backward_inputs,
        outputs=(),
        tangents=tangents,
    )
    whole = replace(
        first,
        compute_flops=body.backward_flops,
        moved_bytes=body.backward_bytes,
        workspace_bytes=body.backward_workspace_bytes,
    )
    stashes = flows and trains and not (block % 2 and block != last)
    return Halves(
        stash_bytes=body.saved_bytes // 2 if stashes else 0,
        input=(first if trains else whole) if flows else None,
        weight=(second if flows else whole) if trains else None,
    )


def make_plan(
    model: Model,
    *,
    chunk_bytes: int = 8192,
    parameters: TierName | Sequence[TierName] = "device",
    gradients: TierName | Sequence[TierName] = "device",
    optimizer: TierName | Sequence[TierName] = "device",
    update: TierName | Sequence[TierName] = "device",
    stride: int = 0,
    activations: ActivationChoice | Sequence[ActivationChoice] = "keep",
    num_microbatches: int = 1,
    compute_dtype: str = "float32",
    clips: bool = True,
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq"),
    heap: HeapMode = "map",
    budget_bytes: Mapping[TierName, int] | None = None,
    base_bytes: int = 0,
    heap_slack: float = 0.0,
    order: Order = "depth_first",
    boundaries: TierName = "device",
    offload: TierName = "disk",
    tied_sum: TiedSum = "per_microbatch",
) -> Plan:
    """Fit a plan to a model; a sequence of tiers or activations is repeated over the chunks.

    The optimizer is AdamW when there are states `exp_avg` and `exp_avg_sq`, else SGD; a master
    copy exists when `compute_dtype` is not float32.
    """
    chunks = pack_chunks(model, chunk_bytes)
    return Plan(
        model=model.fingerprint,
        model_name=model.name,
        machine="toy",
        length=model.length,
        budget_bytes=budget_bytes or dict.fromkeys(("device", "host", "disk"), 1 << 40),
        base_bytes=base_bytes,
        numerics=Numerics(
            microbatch_rows=_choice(model.rows),
            num_microbatches=num_microbatches,
            num_workers=1,
            compute_dtype=compute_dtype,
            loss_chunk_tokens=_choice(None),
            tied_sum=tied_sum,
            attention="causal",
            num_threads=1,
            device="cpu",
        ),
        optimizer=OptimizerPlan(
            name="adamw" if "exp_avg" in states else "sgd",
            states=states,
            master=compute_dtype != "float32",
            clips=clips,
        ),
        heap=_choice(heap),
        heap_slack=heap_slack,
        chunk_bytes=_choice(chunk_bytes),
        chunks=tuple(
            ChunkPlan(
                pieces=chunk.pieces,
                group=chunk.group,
                trainable=chunk.trainable,
                parameters=_choice(_turn(parameters, index)),
                gradients=_choice(_turn(gradients, index)),
                optimizer=_choice(_turn(optimizer, index)),
                update=_choice(_turn(update, index)),
            )
            for index, chunk in enumerate(chunks)
        ),
        blocks=tuple(
            BlockPlan(name=block.name, activations=_choice(_turn(activations, index)))
            for index, block in enumerate(model.blocks)
        ),
        pins=(),
        prediction=None,
        order=_choice(order),
        boundaries=_choice(boundaries),
        offload=_choice(offload),
        stride=_choice(stride),
    )


def _turn(options: str | Sequence[str], index: int):
    return options if isinstance(options, str) else options[index % len(options)]


def _choice(value):
    return Choice(value=value, because="a test")


def make_pipeline(schedule: Schedule, bounds: Sequence[int]) -> PipelinePlan:
    """Cut a model at blocks for the stages of a schedule."""
    return PipelinePlan(
        name=Choice(value="by hand", because=""),
        schedule=schedule,
        bounds=Choice(value=tuple(bounds), because=""),
    )
