from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from chat_templates import CHAT
from tokenizers import Tokenizer as BareTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from packhorse.data.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a pack horse carries its load over the high pass",
    "hello world, how are you today? I am fine, thank you.",
    "user assistant system tool",
    "caf\u00e9 na\u00efve \u4f60\u597d \U0001f40e",
]


@pytest.fixture(scope="session")
def bare_tokenizer() -> BareTokenizer:
    bare = BareTokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|eos|>", "<|pad|>", "<|start|>", "<|end|>", "<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(CORPUS, trainer)
    return bare


@pytest.fixture(scope="session")
def make_tokenizer(bare_tokenizer: BareTokenizer) -> Callable[..., Tokenizer]:
    def make(template: str | None = CHAT, *, eos: bool = True, bos: bool = False) -> Tokenizer:
        bare = BareTokenizer.from_str(bare_tokenizer.to_str())
        if bos:
            bare.post_processor = processors.TemplateProcessing(
                single="<|bos|> $A", special_tokens=[("<|bos|>", 4)]
            )
        inner = PreTrainedTokenizerFast(
            tokenizer_object=bare,
            eos_token="<|eos|>" if eos else None,
            pad_token="<|pad|>",
            bos_token="<|bos|>" if bos else None,
        )
        inner.chat_template = template
        inner.name_or_path = "tiny-chat"
        return Tokenizer(inner)

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: Sequence[object], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            text = json.dumps(rows, indent=1)
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        return path

    return write
