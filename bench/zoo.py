"""Tiny models with everything that makes the order of sums hard, and batches for them.

In: a name from `ZOO`. Out: a freshly built module (each from a config of its own), which of its
parameters a variant freezes or groups, and the micro-batches of a few steps. Rows are longer than
every sliding window, label tokens are unevenly spread, and where the loss is a sum, one micro-batch
of several has no label at all.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from packhorse.optim.optimizers import SGD, AdamW, Optimizer, ParameterGroup

VOCABULARY: Final = 97
LENGTH: Final = 24
WINDOW: Final = 8
LAYERS: Final = 4
_IGNORED: Final = -100

Feed = Mapping[str, Tensor]
Step = tuple[Feed, ...]
Training = Literal["all", "frozen", "groups"]
OptimizerName = Literal["adamw", "momentum", "sgd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model of the zoo.

    `embeddings` and `frozen` are patterns of parameter names: the embeddings, and what is frozen
    beside them (half of the blocks: the lowest, and one with trained blocks below and above).
    `loss` says what the forward returns: a sum divided by the number of label tokens, or a mean.
    """

    name: str
    build: Callable[[], nn.Module]
    embeddings: str
    frozen: str
    loss: Literal["sum", "mean"]


class Weave(nn.Module):
    """Blocks with skips over several blocks, and weights that several blocks share.

    `shared` is used by three blocks, twice inside one of them; the head is tied to the embedding.
    Returns the mean cross-entropy.
    """

    def __init__(self, *, width: int = 32, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.shared = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            WeaveBlock(width, None if index == 2 else self.shared, 2 if index == 3 else 1)
            for index in range(5)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids)
        seen = [x_BTD]
        for index, block in enumerate(self.blocks):
            # Block 3 and 4 also take what blocks 0 and 1 made.
            x_BTD = block(x_BTD, seen[index - 2] if index > 2 else None)
            seen.append(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD) + seen[1])
        return functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten())


class WeaveBlock(nn.Module):
    """An MLP that also applies a layer it may share, once or twice."""

    def __init__(self, width: int, shared: nn.Linear | None, times: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.shared = shared
        self.times = times

    def forward(self, x_BTD: Tensor, skip_BTD: Tensor | None) -> Tensor:
        y_BTD = self.down(functional.gelu(self.up(self.norm(x_BTD))))
        if self.shared is not None:
            for _ in range(self.times):
                y_BTD = y_BTD + torch.tanh(self.shared(y_BTD))
        return x_BTD + y_BTD if skip_BTD is None else x_BTD + y_BTD * skip_BTD


def _shapes() -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }


def build_llama() -> nn.Module:
    """Llama with a head tied to the embedding."""
    return LlamaForCausalLM(LlamaConfig(**_shapes(), tie_word_embeddings=True))


def build_gpt2(dropout: float = 0.0) -> nn.Module:
    """GPT-2, in training mode; `dropout` is that of embeddings, residuals and attention."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64,
        bos_token_id=0, eos_token_id=0,
        embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def build_qwen3() -> nn.Module:
    """Qwen3: norms on queries and keys, a head of its own."""
    return Qwen3ForCausalLM(Qwen3Config(**_shapes(), head_dim=8, tie_word_embeddings=False))


def build_gemma3() -> nn.Module:
    """Gemma3: layers with a sliding window shorter than the rows, and full ones."""
    kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    config = Gemma3TextConfig(
        **_shapes(), head_dim=8, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=8
    )
    return Gemma3ForCausalLM(config)


def build_mixtral() -> nn.Module:
    """Mixtral: two of four experts for each token."""
    return MixtralForCausalLM(
        MixtralConfig(**_shapes(), num_local_experts=4, num_experts_per_tok=2)
    )


_LAYERS_0_AND_2: Final = r"(model\.layers|transformer\.h|blocks)\.[02]\."

ZOO: Final[Mapping[str, Entry]] = {
    name: Entry(
        name=name, build=build, embeddings=embeddings, frozen=_LAYERS_0_AND_2, loss=loss
    )
    for name, build, embeddings, loss in (
        ("llama", build_llama, r"model\.embed_tokens\.", "sum"),
        ("gpt2", build_gpt2, r"transformer\.w[tp]e\.", "sum"),
        ("qwen3", build_qwen3, r"model\.embed_tokens\.", "sum"),
        ("gemma3", build_gemma3, r"model\.embed_tokens\.", "sum"),
        ("mixtral", build_mixtral, r"model\.embed_tokens\.", "sum"),
        ("weave", Weave, r"embed\.", "mean"),
    )
}  # fmt: skip


def build_model(entry: Entry, training: Training = "all", *, seed: int = 0) -> nn.Module:
    """Build a model of the zoo with seeded weights, frozen as the variant says."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = entry.build().train()
    if training == "frozen":
        for name, parameter in module.named_parameters():
            if re.match(entry.embeddings, name) or re.match(entry.frozen, name):
                parameter.requires_grad_(False)
    return module


def make_steps(
    entry: Entry,
    *,
    num_steps: int,
    num_microbatches: int,
    rows: int = 2,
    length: int = LENGTH,
    seed: int = 1,
) -> tuple[Step, ...]:
    """Make the micro-batches of some steps, each with the denominator of its loss."""
    generator = torch.Generator().manual_seed(seed)
    steps: list[Step] = []
    for _ in range(num_steps):
        shape = (num_microbatches, rows, length)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        # A plain module does not shift its labels; its embedding alone could copy unshifted ones.
        labels = tokens.clone() if entry.loss == "sum" else tokens.roll(1, dims=-1)
        kept = torch.rand(shape, generator=generator) < torch.rand((), generator=generator)
        kept[:, 0, : 2 + rows] = True
        labels[~kept] = _IGNORED
        if entry.loss == "sum" and num_microbatches > 1:
            labels[1] = _IGNORED
        steps.append(cut_step(entry, tokens, labels))
    return tuple(steps)


def cut_step(entry: Entry, tokens_MBT: Tensor, labels_MBT: Tensor) -> Step:
    """Give the feeds of the micro-batches of one step."""
    if entry.loss == "mean":
        denominator = torch.tensor(float(tokens_MBT.shape[0]))
    else:
        denominator = (labels_MBT[..., 1:] != _IGNORED).sum().float()
    return tuple(
        {"input_ids": tokens, "labels": labels, "denominator": denominator}
        for tokens, labels in zip(tokens_MBT, labels_MBT, strict=True)
    )


def batch_of(steps: Sequence[Step]) -> Feed:
    """A micro-batch as the module takes it."""
    return {name: tensor for name, tensor in steps[0][0].items() if name != "denominator"}


def make_optimizer_words(name: OptimizerName, entry: Entry, training: Training) -> Optimizer:
    """The optimizer that is called `name`; for the variant `groups` embeddings have their own."""
    groups: tuple[ParameterGroup, ...] = ()
    if training == "groups":
        pattern = entry.embeddings.replace("\\", "").replace("w[tp]e", "w?e") + "*"
        overrides = {"lr": 7e-4, "weight_decay": 0.3}
        groups = (ParameterGroup(name="embeddings", patterns=(pattern,), overrides=overrides),)
    match name:
        case "adamw":
            return AdamW(lr=9e-3, weight_decay=0.02, groups=groups)
        case "momentum":
            return SGD(lr=9e-3, momentum=0.9, weight_decay=0.02, groups=groups)
        case "sgd":
            return SGD(lr=9e-3, weight_decay=0.02, groups=groups)


def clip_of(name: OptimizerName) -> float | None:
    """The clipping that goes with an optimizer of the zoo."""
    return 0.5 if name == "adamw" else None
