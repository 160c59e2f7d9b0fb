"""From an exported module to blocks: the model noun, and the code that runs it.

In: an `Exported`, the rows of a micro-batch, whether the loss is chunked, the optimizer groups.
Out: a `Traced`. Equal blocks share one body: they are traced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from packhorse.errors import ModelError
from packhorse.graph.code import BodyArguments, BodyCode, GradientFlow, HalvesCode
from packhorse.graph.export import Exported, default_device
from packhorse.graph.fingerprint import fingerprint_model
from packhorse.graph.interpret import BlockInterpreter, find_loss_heads
from packhorse.graph.joint import trace_body
from packhorse.graph.nodes import sizes_of, tensor_of
from packhorse.graph.split import Piece, split_graph
from packhorse.model.spec import (
    Block,
    BlockId,
    Body,
    BodyId,
    Model,
    Parameter,
    ParameterName,
    Value,
    ValueId,
)

LOSS: Final = ValueId("loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model and the code of its bodies.

    `constants` are the real tensors each block takes, `noise_ordinals` the numbers of its random
    nodes in the unsplit graph. `loss_can_be_chunked` says whether the chunked loss applies.
    `halves` are empty until `halving` makes them.
    """

    model: Model
    code: Mapping[BodyId, BodyCode]
    constants: Mapping[BlockId, tuple[Tensor, ...]]
    noise_ordinals: Mapping[BlockId, tuple[int, ...]]
    loss_can_be_chunked: bool
    vocabulary: int | None
    halves: Mapping[BodyId, HalvesCode] = field(default_factory=dict[BodyId, HalvesCode])


def trace_blocks(
    exported: Exported,
    *,
    rows: int,
    chunk_tokens: int | None = None,
    groups: Mapping[str, str] | None = None,
    name: str = "model",
    compute_dtype: torch.dtype = torch.float32,
) -> Traced:
    """Trace every block at `rows` rows.

    Args:
        rows: rows of a micro-batch; other than the example's only if the batch is dynamic.
        chunk_tokens: tokens whose logits may exist at a time; None leaves the loss whole.
        groups: optimizer group by canonical parameter name; absent names are in `default`.

    Raises:
        ModelError: the model's batch is not dynamic and `rows` is another number.
    """
    if rows != exported.rows and not exported.batch_is_dynamic:
        raise ModelError(
            f"the model was traced for {exported.rows} rows and its batch is not dynamic",
            fix=f"use micro-batches of {exported.rows} rows",
        )
    pieces = split_graph(exported)
    with default_device(exported.device):
        assembler = _Assembler(exported, pieces, rows, chunk_tokens, compute_dtype)
        return assembler.assemble(groups or {}, name)


@dataclass(frozen=True, slots=True)
class _BlockFlow:
    arguments: BodyArguments
    flow: GradientFlow | None


class _Assembler:
    """Walks the pieces forward for shapes, backward for gradients, then traces distinct bodies."""

    def __init__(
        self,
        exported: Exported,
        pieces: tuple[Piece, ...],
        rows: int,
        chunk_tokens: int | None,
        compute_dtype: torch.dtype,
    ) -> None:
        self.exported = exported
        self.pieces = pieces
        self.rows = rows
        self.chunk_tokens = chunk_tokens
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.users: dict[str, list[int]] = {}
        for index, piece in enumerate(pieces):
            for parameter in piece.parameters:
                self.users.setdefault(parameter, []).append(index)
        self.loss_name = pieces[-1].outputs[-1]
        with self.mode:
            self.parameters = {
                name: torch.empty(
                    spec.shape, dtype=_traced_dtype(spec.dtype, compute_dtype)
                ).requires_grad_(spec.trainable)
                for name, spec in exported.specs.items()
            }
            self.step_inputs = {
                meaning: _concrete(_placeholder(exported.graph, name), rows)
                for name, meaning in exported.inputs.items()
            }
        self.fakes: dict[str, Tensor] = {}
        self.forwards: dict[str, tuple[Tensor, ...]] = {}

    def assemble(self, groups: Mapping[str, str], name: str) -> Traced:
        arguments = [self._run_forward(piece) for piece in self.pieces]
        flows = self._run_backward(arguments)
        code: dict[BodyId, BodyCode] = {}
        keys: dict[str, BodyId] = {}
        body_of: list[BodyId] = []
        for piece, args, flow in zip(self.pieces, arguments, flows, strict=True):
            key = _body_key(piece, args, flow, self.chunk_tokens)
            if key not in keys:
                body = BodyId(f"b{len(keys)}")
                keys[key] = body
                code[body] = trace_body(
                    piece.graph,
                    args,
                    flow,
                    module=piece.module,
                    mode=self.mode,
                    chunk_tokens=self.chunk_tokens,
                )
            body_of.append(keys[key])
        return self._build(groups, name, flows, body_of, code)

    def _run_forward(self, piece: Piece) -> BodyArguments:
        constants = tuple(self.exported.constants[name] for name in piece.constants)
        with self.mode:
            fake_constants = tuple(torch.empty(c.shape, dtype=c.dtype) for c in constants)
            values = tuple(
                self.fakes[name].detach().requires_grad_(self.fakes[name].requires_grad)
                for name in piece.values
            )
            arguments = BodyArguments(
                parameters=tuple(self.parameters[name] for name in piece.parameters),
                constants=fake_constants,
                inputs=(*(self.step_inputs[name] for name in piece.step_inputs), *values),
                num_step_inputs=len(piece.step_inputs),
            )
            outputs = self._infer_outputs(piece, arguments)
        for name, output in zip(piece.outputs, outputs, strict=True):
            self.fakes[name] = output
        return arguments

    def _infer_outputs(self, piece: Piece, arguments: BodyArguments) -> tuple[Tensor, ...]:
        """Fake outputs of a piece; equal pieces give equal shapes, so only the first one runs."""
        key = _body_key(piece, arguments, None, self.chunk_tokens)
        known = self.forwards.get(key)
        if known is not None:
            # Tensors of their own: values of two pieces share no storage.
            return tuple(
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).requires_grad_(
                    t.requires_grad
                )
                for t in known
            )
        interpreter = BlockInterpreter(
            piece.graph,
            module=piece.module,
            training=True,
            noise=None,
            chunk_tokens=self.chunk_tokens,
        )
        self.forwards[key] = tuple(interpreter.run(*arguments.flat))
        return self.forwards[key]

    def _run_backward(self, arguments: list[BodyArguments]) -> list[GradientFlow | None]:
        """Find, last block first, which values and parameters have a gradient when."""
        reached_values: set[str] = set()
        reached_parameters: set[str] = set()
        flows: list[GradientFlow | None] = []
        for index in reversed(range(len(self.pieces))):
            piece, args = self.pieces[index], arguments[index]
            steps = args.num_step_inputs
            loss = piece.outputs.index(self.loss_name) if self.loss_name in piece.outputs else None
            flow = GradientFlow(
                tangents=tuple(name in reached_values for name in piece.outputs),
                input_roots=(
                    *(False for _ in range(steps)),
                    *(name in reached_values for name in piece.values),
                ),
                parameter_roots=tuple(name in reached_parameters for name in piece.parameters),
                sinks=tuple(self.users[name][0] == index for name in piece.parameters),
                loss=loss,
            )
            wanted = [tensor for tensor in args.flat if tensor.requires_grad]
            arrives = loss is not None or any(
                (*flow.tangents, *flow.input_roots, *flow.parameter_roots)
            )
            if not wanted or not arrives:
                flows.append(None)
                continue
            flows.append(flow)
            for name, tensor in zip(piece.parameters, args.parameters, strict=True):
                if tensor.requires_grad:
                    reached_parameters.add(name)
            for name, tensor in zip(piece.values, args.inputs[steps:], strict=True):
                if tensor.requires_grad:
                    reached_values.add(name)
        return flows[::-1]

    def _build(
        self,
        groups: Mapping[str, str],
        name: str,
        flows: list[GradientFlow | None],
        body_of: list[BodyId],
        code: dict[BodyId, BodyCode],
    ) -> Traced:
        ids = self._name_values()
        blocks: list[Block] = []
        ordinals: dict[BlockId, tuple[int, ...]] = {}
        next_ordinal = 0
        consumers: dict[ValueId, list[BlockId]] = {}
        names = _name_blocks(self.pieces)
        for index, piece in enumerate(self.pieces):
            block, body = BlockId(index), code[body_of[index]]
            inputs = tuple(
                ids[source]
                for position, source in enumerate((*piece.step_inputs, *piece.values))
                if position in body.used_inputs
            )
            for value in inputs:
                consumers.setdefault(value, []).append(block)
            ordinals[block] = tuple(range(next_ordinal, next_ordinal + len(body.noise)))
            next_ordinal += len(body.noise)
            blocks.append(
                Block(
                    id=block,
                    name=names[index],
                    body=body_of[index],
                    parameters=tuple(ParameterName(p) for p in piece.parameters),
                    inputs=inputs,
                    outputs=tuple(ids[output] for output in piece.outputs),
                    has_backward=body.backward is not None,
                )
            )
        values = self._describe_values(ids, consumers, flows)
        heads = [found for piece in self.pieces for found in find_loss_heads(piece.graph).values()]
        model = Model(
            name=name,
            fingerprint=fingerprint_model(self.exported, self.pieces),
            rows=self.rows,
            length=self.exported.length,
            loss=LOSS,
            blocks=tuple(blocks),
            bodies={body: _describe_body(body, found) for body, found in code.items()},
            values=values,
            parameters=self._describe_parameters(groups, flows),
        )
        vocabulary = None
        if heads:
            weight = tensor_of(heads[0].weight)
            vocabulary = int(weight.shape[0])
        return Traced(
            model=model,
            code=code,
            constants={
                BlockId(i): tuple(self.exported.constants[n].detach() for n in piece.constants)
                for i, piece in enumerate(self.pieces)
            },
            noise_ordinals=ordinals,
            loss_can_be_chunked=bool(heads),
            vocabulary=vocabulary,
        )

    def _name_values(self) -> dict[str, ValueId]:
        ids = {name: ValueId(name) for name in (*self.step_inputs,)}
        for index, piece in enumerate(self.pieces):
            many = len(piece.outputs) > 1
            for place, output in enumerate(piece.outputs):
                ids[output] = ValueId(f"h{index}.{place}" if many else f"h{index}")
        ids[self.loss_name] = LOSS
        return ids

    def _describe_values(
        self,
        ids: Mapping[str, ValueId],
        consumers: Mapping[ValueId, list[BlockId]],
        flows: list[GradientFlow | None],
    ) -> dict[ValueId, Value]:
        values: dict[ValueId, Value] = {}
        for name, fake in self.step_inputs.items():
            values[ids[name]] = _describe_value(ids[name], fake, False, None, consumers)
        for index, piece in enumerate(self.pieces):
            flow = flows[index]
            for place, output in enumerate(piece.outputs):
                reached = flow is not None and flow.tangents[place]
                fake = self.fakes[output]
                values[ids[output]] = _describe_value(
                    ids[output], fake, reached, BlockId(index), consumers
                )
        return values

    def _describe_parameters(
        self, groups: Mapping[str, str], flows: list[GradientFlow | None]
    ) -> dict[ParameterName, Parameter]:
        described: dict[ParameterName, Parameter] = {}
        for name, spec in self.exported.specs.items():
            users = self.users.get(name, [])
            trained = spec.trainable and any(flows[user] is not None for user in users)
            described[ParameterName(name)] = Parameter(
                name=ParameterName(name),
                shape=spec.shape,
                dtype=_dtype_name(self.parameters[name].dtype),
                trainable=trained,
                group=groups.get(name, "default"),
                aliases=spec.aliases,
                blocks=tuple(BlockId(user) for user in users),
            )
        return described


def _traced_dtype(dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    return compute_dtype if dtype.is_floating_point else dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _placeholder(graph: fx.Graph, name: str) -> Tensor:
    return tensor_of(next(n for n in graph.nodes if n.op == "placeholder" and n.name == name))


def _concrete(symbolic: Tensor, rows: int) -> Tensor:
    return torch.empty(sizes_of(symbolic, rows), dtype=symbolic.dtype)


def _describe_value(
    value: ValueId,
    fake: Tensor,
    needs_grad: bool,
    producer: BlockId | None,
    consumers: Mapping[ValueId, list[BlockId]],
) -> Value:
    shape = tuple(int(dim) for dim in fake.shape)
    return Value(
        id=value,
        shape=shape,
        dtype=_dtype_name(fake.dtype),
        size_bytes=prod(shape) * fake.element_size(),
        needs_grad=needs_grad,
        producer=producer,
        consumers=tuple(consumers.get(value, ())),
    )


def _describe_body(body: BodyId, code: BodyCode) -> Body:
    renumber = {old: new for new, old in enumerate(code.used_inputs)}
    backward = code.backward
    return Body(
        id=body,
        forward_flops=code.costs.forward_flops,
        backward_flops=code.costs.backward_flops,
        forward_bytes=code.costs.forward_bytes,
        backward_bytes=code.costs.backward_bytes,
        saved_bytes=code.costs.saved_bytes,
        forward_workspace_bytes=code.costs.forward_workspace_bytes,
        discard_workspace_bytes=code.costs.discard_workspace_bytes,
        backward_workspace_bytes=code.costs.backward_workspace_bytes,
        backward_parameters=backward.parameters if backward else (),
        backward_inputs=tuple(renumber[i] for i in backward.inputs) if backward else (),
        backward_outputs=backward.outputs if backward else (),
        num_random=len(code.noise),
        first_backward_workspace_bytes=code.costs.first_backward_workspace_bytes,
    )


def _name_blocks(pieces: tuple[Piece, ...]) -> list[str]:
    names: list[str] = []
    for index, piece in enumerate(pieces):
        path = piece.module.removeprefix("module").removeprefix(".")
        name = path or ("head" if index + 1 == len(pieces) else f"block{index}")
        names.append(name if name not in names else f"{name}#{index}")
    return names


def _canonical(graph: fx.Graph) -> str:
    """The graph as text in which nodes are numbered, so that equal graphs have equal texts."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    lines: list[str] = []
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args}")
    return "\n".join(lines)


def _body_key(
    piece: Piece, arguments: BodyArguments, flow: GradientFlow | None, chunk_tokens: int | None
) -> str:
    shapes = [(tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for t in arguments.flat]
    return repr((_canonical(piece.graph), shapes, flow, chunk_tokens))
