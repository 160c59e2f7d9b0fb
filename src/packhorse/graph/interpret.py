"""Run a block's graph with the runtime's own randomness and, if asked, a chunked loss.

In: a block's graph. Out: the tensors it computes, with three rewrites applied on the way:
dropout multiplies by noise that is an argument (the runtime draws it from an explicit generator,
so that every plan draws the same); attention with dropout is spelled out as matmul, softmax,
noise, matmul; and the pattern linear -> cross_entropy computes `chunk_tokens` rows of logits at a
time, in forward and in backward, so that all logits never exist together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional

from packhorse.errors import ModelError
from packhorse.graph.nodes import node_of
from packhorse.graph.refusals import describe_place

_aten = torch.ops.aten
_RECURRENT = (
    _aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input
)  # fmt: skip
_PASS_THROUGH = (
    _aten.view.default,
    _aten.reshape.default,
    _aten.alias.default,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.contiguous.default,
    _aten._to_copy.default,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A tensor of dropout noise: 0 with probability `p`, else 1 / (1 - p)."""

    shape: tuple[int, ...]
    p: float
    dtype: torch.dtype


class BlockInterpreter(fx.Interpreter):
    """Interprets a block's graph; see the module's docstring.

    Args:
        graph: the block's graph.
        module: name of the module the block belongs to, for messages.
        training: False makes dropout the identity.
        noise: the noise tensors in the order in which the graph draws; None collects `requests`.
        chunk_tokens: rows of logits that may exist at a time; None keeps the loss as it is.
    """

    def __init__(
        self,
        graph: fx.Graph,
        *,
        module: str,
        training: bool,
        noise: Sequence[Tensor] | None,
        chunk_tokens: int | None,
    ) -> None:
        runnable = fx.GraphModule({}, graph)
        super().__init__(runnable, garbage_collect_values=True)
        self.block_module = module
        self.training = training
        self.noise = noise
        self.requests: list[Noise] = []
        self.current = next(iter(runnable.graph.nodes))
        self.chunk_tokens = chunk_tokens
        self.heads = find_loss_heads(runnable.graph) if chunk_tokens else {}
        self.skipped = {node for head in self.heads.values() for node in head.replaced}
        if self.heads:
            # The head's inputs must outlive the nodes that the chunked loss replaces.
            self.garbage_collect_values = False

    def run_node(self, n: fx.Node) -> Any:  # Any: fx.Interpreter's own signature
        self.current = n
        if n in self.skipped:
            return None
        head = self.heads.get(n)
        if head is not None:
            assert self.chunk_tokens is not None
            hidden = self.env[head.hidden]
            weight = self.env[head.weight]
            bias = self.env[head.bias] if head.bias is not None else None
            target = self.env[head.target]
            return chunked_loss(hidden, weight, bias, target, self.chunk_tokens)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:  # Any: fx's signature
        if target is _aten.dropout.default:
            x, p, train = args
            if not (train and self.training) or p == 0:
                return x
            return x * self._draw(tuple(x.shape), p, x.dtype)
        if target is _aten.scaled_dot_product_attention.default:
            p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if p == 0 or not self.training:
                if p:
                    args = (*args[:4], 0.0, *args[5:])
                return super().call_function(target, args, kwargs)
            return self._attend_with_dropout(p, args, kwargs)
        if target in _RECURRENT:
            raise ModelError(
                f"{target} runs a kernel whose state no trace shows, so it cannot be planned",
                where=describe_place(self.current, block=self.block_module),
                fix="write the recurrence with cells, such as torch.nn.LSTMCell or GRUCell",
            )
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            raise ModelError(
                f"{target} draws random numbers that the plan cannot reproduce",
                where=describe_place(self.current, block=self.block_module),
                fix="use torch.nn.Dropout or functional.dropout, or remove the random operation",
            )
        return super().call_function(target, args, kwargs)

    def _draw(self, shape: tuple[int, ...], p: float, dtype: torch.dtype) -> Tensor:
        index = len(self.requests)
        self.requests.append(Noise(shape=shape, p=p, dtype=dtype))
        if self.noise is None:
            return torch.empty(shape, dtype=dtype)
        return self.noise[index]

    def _attend_with_dropout(
        self,
        p: float,
        args: Any,  # Any: arguments of the operation, as fx hands them on
        kwargs: Any,  # Any: as above
    ) -> Tensor:
        query, key, value = args[:3]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
        scale = kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        scores = torch.matmul(query, key.transpose(-2, -1)) * scale
        if causal:
            length = scores.shape[-1]
            mask = torch.ones(scores.shape[-2], length, dtype=torch.bool).tril()
        if mask is not None:
            mask_is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, float("-inf")) if mask_is_bool else scores + mask
        weights = torch.softmax(scores, dim=-1)
        weights = weights * self._draw(tuple(weights.shape), p, weights.dtype)
        return torch.matmul(weights, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """The nodes of linear -> views -> cross_entropy(sum)."""

    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    target: fx.Node
    replaced: tuple[fx.Node, ...]


def find_loss_heads(graph: fx.Graph) -> dict[fx.Node, LossHead]:
    """Find each summed cross-entropy over the logits of a linear layer that nothing else uses."""
    heads: dict[fx.Node, LossHead] = {}
    for node in graph.nodes:
        if node.target is not _aten.cross_entropy_loss.default:
            continue
        args = list(node.args)
        weight = args[2] if len(args) > 2 else node.kwargs.get("weight")
        reduction = args[3] if len(args) > 3 else node.kwargs.get("reduction", 1)
        if weight is not None or reduction != 2 or len(args) > 4 or len(node.kwargs) > 1:
            continue
        replaced: list[fx.Node] = []
        current, user = args[0], node
        while isinstance(current, fx.Node) and set(current.users) == {user}:
            replaced.append(current)
            if current.target is _aten.linear.default:
                hidden, matrix, *rest = current.args
                heads[node] = LossHead(
                    hidden=node_of(hidden),
                    weight=node_of(matrix),
                    bias=node_of(rest[0]) if rest and rest[0] is not None else None,
                    target=node_of(args[1]),
                    replaced=tuple(replaced),
                )
                break
            if current.target not in _PASS_THROUGH:
                break
            user, current = current, current.args[0]
    return heads


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of a linear layer, a chunk of rows at a time.

    Only the hidden states are saved; the backward computes each chunk's logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context has no public type
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        chunk: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N)
        ctx.chunk = chunk
        total: Tensor | None = None
        for start in range(0, hidden_ND.shape[0], chunk):
            logits_CV = functional.linear(hidden_ND[start : start + chunk], weight_VD, bias_V)
            part = functional.cross_entropy(
                logits_CV.float(), target_N[start : start + chunk], reduction="sum"
            )
            total = part if total is None else total + part
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # Any: autograd's own signature
        hidden_ND, weight_VD, bias_V, target_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        root = grads[0]
        pieces: list[Tensor] = []
        weight_grad: Tensor | None = None
        bias_grad: Tensor | None = None
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            part_CD = hidden_ND[start : start + ctx.chunk]
            target_C = target_N[start : start + ctx.chunk]
            logits_CV = functional.linear(part_CD, weight_VD, bias_V).float()
            label_C = target_C.clamp(min=0).unsqueeze(1)
            kept_C = (target_C != -100).to(logits_CV.dtype).unsqueeze(1) * root
            grad_CV = torch.softmax(logits_CV, dim=-1).mul(kept_C)
            grad_CV = grad_CV.scatter_add(1, label_C, -kept_C).to(part_CD.dtype)
            if needs_hidden:
                pieces.append(grad_CV @ weight_VD)
            if needs_weight:
                step = grad_CV.t() @ part_CD
                weight_grad = step if weight_grad is None else weight_grad + step
            if needs_bias:
                sums = grad_CV.sum(0)
                bias_grad = sums if bias_grad is None else bias_grad + sums
        hidden_grad = torch.cat(pieces) if pieces else None
        return hidden_grad, weight_grad, bias_grad, None, None


def chunked_loss(
    hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target: Tensor, chunk_tokens: int
) -> Tensor:
    """Sum of the cross-entropy of `linear(hidden)`; at most `chunk_tokens` rows of logits exist."""
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    return cast(  # apply is untyped
        "Tensor",
        _ChunkedLoss.apply(hidden_ND, weight_VD, bias_V, target.reshape(-1), chunk_tokens),
    )
