from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import chat_templates as tiny
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BareTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from packhorse.data import encoding, segments
from packhorse.data.chat import encode_chat
from packhorse.data.encoding import Encoder, Piece
from packhorse.data.formats import Chat, Completion, Example, Instruction, Text, Tokens
from packhorse.data.sources import Origin
from packhorse.data.tokenizer import Tokenizer, load_tokenizer
from packhorse.errors import DataError, InputError

HERE = Origin(path=Path("train.jsonl"), line=7)
MakeTokenizer = Callable[..., Tokenizer]


def make_chat(*turns: str, num_prompt_messages: int = 0) -> Chat:
    messages = tuple(dict(zip(("role", "content"), t.split(": "), strict=True)) for t in turns)
    return Chat(messages=messages, num_prompt_messages=num_prompt_messages)


TWO_ROUNDS = make_chat(
    "system: be kind",
    "user: hello",
    "assistant: hi there",
    "user: more",
    "assistant: fine \U0001f40e",
)


def learnt_text(tokenizer: Tokenizer, tokens: np.ndarray, labelled: np.ndarray) -> list[str]:
    """Decode every stretch of labelled tokens."""
    stretches: list[list[int]] = []
    before = False
    for token, label in zip(tokens, labelled, strict=True):
        if label and not before:
            stretches.append([])
        if label:
            stretches[-1].append(int(token))
        before = bool(label)
    return [tokenizer.decode(stretch) for stretch in stretches]


def encode_all(encoder: Encoder, examples: Iterable[Example]) -> list[Piece]:
    return list(encoder.encode((HERE, example) for example in examples))


def make_encoder(tokenizer: Tokenizer | None, *, only: bool = True, size: int = 400) -> Encoder:
    return Encoder(tokenizer=tokenizer, vocab_size=size, assistant_only=only)


def test_prefixes_find_the_assistants_turns_and_their_end(tokenizer: Tokenizer) -> None:
    tokens, labelled = encode_chat(tokenizer, TWO_ROUNDS, HERE, assistant_only=True)
    assert learnt_text(tokenizer, tokens, labelled) == [
        "hi there<|end|>\n",
        "fine \U0001f40e<|end|>\n",
    ]
    assert tokenizer.decode(tokens.tolist()) == tokenizer.render(
        TWO_ROUNDS.messages, (), prompt=False
    )


def test_generation_marks_are_taken_as_they_stand(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(tiny.MARKED_CHAT)
    assert tokenizer.marks_generation
    tokens, labelled = encode_chat(tokenizer, TWO_ROUNDS, HERE, assistant_only=True)
    assert learnt_text(tokenizer, tokens, labelled) == ["hi there<|end|>", "fine \U0001f40e<|end|>"]


@pytest.mark.parametrize("template", [tiny.CHAT, tiny.MARKED_CHAT])
def test_prompt_messages_are_not_learnt(make_tokenizer: MakeTokenizer, template: str) -> None:
    tokenizer = make_tokenizer(template)
    chat = Chat(messages=TWO_ROUNDS.messages, num_prompt_messages=4)
    tokens, labelled = encode_chat(tokenizer, chat, HERE, assistant_only=True)
    (learnt,) = learnt_text(tokenizer, tokens, labelled)
    assert learnt.startswith("fine")


@pytest.mark.parametrize("template", [tiny.CHAT, tiny.MARKED_CHAT, tiny.FORGETFUL_CHAT])
def test_all_tokens_are_learnt_if_asked(make_tokenizer: MakeTokenizer, template: str) -> None:
    tokenizer = make_tokenizer(template)
    tokens, labelled = encode_chat(tokenizer, TWO_ROUNDS, HERE, assistant_only=False)
    assert labelled.all()
    assert len(tokens) == len(labelled) > 10


def test_a_template_that_looks_ahead_is_refused_by_name(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(tiny.FORGETFUL_CHAT)
    one_round = make_chat("user: hello", "assistant: hi")
    tokens, labelled = encode_chat(tokenizer, one_round, HERE, assistant_only=True)
    assert learnt_text(tokenizer, tokens, labelled) == ["(thinks) hi<|end|>\n"]
    with pytest.raises(DataError) as caught:
        encode_chat(tokenizer, TWO_ROUNDS, HERE, assistant_only=True)
    text = str(caught.value)
    assert "chat template of tiny-chat" in text
    assert "first 3 messages differently" in text
    assert "train.jsonl:7" in text
    assert "(thinks)" in text
    assert "{% generation %}" in text


def test_a_template_that_refuses_a_chat_is_quoted(make_tokenizer: MakeTokenizer) -> None:
    strict = (
        "{% for m in messages %}{% if loop.first and m['role'] != 'user' %}"
        "{{ raise_exception('the first turn must be the user') }}{% endif %}{{ m['content'] }}"
        "{% endfor %}"
    )
    tokenizer = make_tokenizer(strict)
    with pytest.raises(DataError, match=r"tiny-chat refuses the chat: the first turn must be") as c:
        encode_chat(tokenizer, TWO_ROUNDS, HERE, assistant_only=True)
    assert "turns: system, user, assistant" in str(c.value)


def test_a_broken_template_is_named(make_tokenizer: MakeTokenizer) -> None:
    for only in (True, False):
        with pytest.raises(DataError, match="tiny-chat"):
            encode_chat(make_tokenizer("{% for %}"), TWO_ROUNDS, HERE, assistant_only=only)
    with pytest.raises(DataError, match="tiny-chat has no chat template"):
        encode_chat(make_tokenizer(None), TWO_ROUNDS, HERE, assistant_only=True)


def test_chats_without_an_assistant_have_no_labels(tokenizer: Tokenizer) -> None:
    (piece,) = encode_all(make_encoder(tokenizer), [make_chat("user: hello")])
    assert not piece.labelled.any()


def test_texts_are_opened_and_ended(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(bos=True)
    (piece,) = encode_all(make_encoder(tokenizer), [Text(text="hello world")])
    assert tokenizer.decode(piece.tokens.tolist()) == "<|bos|>hello world<|eos|>"
    assert piece.labelled.all()
    assert piece.may_cut


def test_an_end_that_the_text_brings_is_not_doubled(tokenizer: Tokenizer) -> None:
    (piece,) = encode_all(make_encoder(tokenizer), [Text(text="hello<|eos|>")])
    assert tokenizer.decode(piece.tokens.tolist()) == "hello<|eos|>"


@given(
    parts=st.lists(
        st.sampled_from(["the", "fox", "7", ". ", ".\n\n", " ", "  ", "\n", "\n\n"]), min_size=99
    )
)
@settings(max_examples=40, deadline=None)
def test_long_texts_are_tokenised_in_stretches_without_a_seam(
    make_tokenizer: MakeTokenizer, parts: list[str]
) -> None:
    tokenizer = make_tokenizer(bos=True)
    text = "the " + " fox ".join(parts)
    (whole,) = encode_all(make_encoder(tokenizer), [Text(text=text)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "SEGMENT_CHARS", 100)
        patch.setattr(encoding, "split_text", lambda value: segments.split_text(value, 100))
        pieces = encode_all(make_encoder(tokenizer), [Text(text=text)])
    assert len(pieces) > 5
    assert np.array_equal(np.concatenate([piece.tokens for piece in pieces]), whole.tokens)
    assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_stretches_have_no_seam_for_tokenizers_that_mark_beginnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = BareTokenizer(models.BPE(unk_token="<unk>"))
    bare.normalizer = normalizers.Replace("\n", "|")
    bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=80, special_tokens=["<unk>", "<eos>"], show_progress=False
    )
    bare.train_from_iterator(["over the|lazy dog|", "the fox|"], trainer)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>"))
    text = "the lazy dog\nthe fox\n" * 20
    assert tokenizer.encode(["fox"])[0].tolist() != tokenizer.encode(["\nfox"])[0].tolist()[-1:]
    (whole,) = encode_all(make_encoder(tokenizer), [Text(text=text)])
    monkeypatch.setattr(encoding, "SEGMENT_CHARS", 50)
    monkeypatch.setattr(encoding, "split_text", lambda value: segments.split_text(value, 50))
    pieces = encode_all(make_encoder(tokenizer), [Text(text=text)])
    assert len(pieces) > 5
    assert np.array_equal(np.concatenate([piece.tokens for piece in pieces]), whole.tokens)


def test_completions_are_learnt_with_their_end(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(None, bos=True)
    example = Completion(prompt="hello world,", completion=" how are you")
    (piece,) = encode_all(make_encoder(tokenizer), [example])
    assert learnt_text(tokenizer, piece.tokens, piece.labelled) == [" how are you<|eos|>"]
    assert tokenizer.decode(piece.tokens.tolist()) == "<|bos|>hello world, how are you<|eos|>"
    (piece,) = encode_all(make_encoder(tokenizer, only=False), [example])
    assert piece.labelled.all()


def test_a_border_inside_a_token_keeps_the_prompts_tokens(tokenizer: Tokenizer) -> None:
    example = Completion(prompt="the qui", completion="ck brown")
    prompt, joined = tokenizer.encode(["the qui", "the quick brown"])
    assert not np.array_equal(joined[: len(prompt)], prompt)
    (piece,) = encode_all(make_encoder(tokenizer), [example])
    assert np.array_equal(piece.tokens[: len(prompt)], prompt)
    assert learnt_text(tokenizer, piece.tokens, piece.labelled) == ["ck brown<|eos|>"]


def test_instructions_use_the_template_or_plain_headings(make_tokenizer: MakeTokenizer) -> None:
    task = Instruction(instruction="add", input="1 2", output="3", system="be kind")
    chatty, plain = make_tokenizer(), make_tokenizer(None)
    (piece,) = encode_all(make_encoder(chatty), [task])
    assert learnt_text(chatty, piece.tokens, piece.labelled) == ["3<|end|>\n"]
    assert chatty.decode(piece.tokens.tolist()).startswith(
        "<|start|>system\nbe kind<|end|>\n<|start|>user\nadd\n\n1 2<|end|>\n"
    )
    (piece,) = encode_all(make_encoder(plain), [task])
    assert learnt_text(plain, piece.tokens, piece.labelled) == ["3<|eos|>"]
    assert plain.decode(piece.tokens.tolist()) == (
        "be kind\n\n### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n3<|eos|>"
    )


def test_tokens_outside_the_vocabulary_are_named(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode(["<|end|>"])[0].tolist()
    with pytest.raises(DataError) as caught:
        encode_all(make_encoder(tokenizer, size=token), [Text(text="<|start|><|end|>")])
    text = str(caught.value)
    assert f"token {token} ('<|end|>') lies outside the model's vocabulary of {token}" in text
    assert "train.jsonl:7, token 2 of the row" in text
    for bad in (400, -1, 2**40, 2**80):
        for used in (None, tokenizer):
            with pytest.raises(DataError, match=r"train\.jsonl:7"):
                encode_all(make_encoder(used), [Tokens(input_ids=(1, bad), labelled=None)])


def test_what_is_missing_is_said(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(InputError, match="no tokenizer is given"):
        encode_all(make_encoder(None), [Text(text="a")])
    with pytest.raises(InputError, match="no end-of-text token"):
        encode_all(make_encoder(make_tokenizer(eos=False)), [Text(text="a")])


def test_missing_extras_are_one_line_with_the_command(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'packhorse\[hf\]'"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)

    def refuse(*_: object, **__: object) -> str:
        raise ImportError("jinja2")

    monkeypatch.setattr(tokenizer.inner, "apply_chat_template", refuse)
    with pytest.raises(InputError, match=r"pip install 'packhorse\[hf\]'"):
        encode_chat(tokenizer, TWO_ROUNDS, HERE, assistant_only=True)


def test_tokenizers_load_from_a_folder_and_are_told_apart_by_content(
    tmp_path: Path, make_tokenizer: MakeTokenizer
) -> None:
    first = make_tokenizer(tiny.CHAT)
    for name in ("a", "b"):
        first.inner.save_pretrained(tmp_path / name)
    one, two = load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "b")
    assert one.digest() == two.digest()
    assert one.encode(["hello world"])[0].tolist() == first.encode(["hello world"])[0].tolist()
    before = one.digest()
    one.inner(["hello", "hello world"], padding=True, truncation=True, max_length=4)
    assert one.digest() == before
    assert make_tokenizer(tiny.MARKED_CHAT).digest() != first.digest()
    assert make_tokenizer(tiny.CHAT, bos=True).digest() != first.digest()


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no tokenizer folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no tokenizer that loads"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(DataError, match="holds no tokenizer that loads"):
        load_tokenizer(tmp_path)
