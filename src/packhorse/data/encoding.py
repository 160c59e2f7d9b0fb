"""Rows to tokens. In: examples with their origin. Out: tokens with a mask of what is learnt.

    text               the tokenizer's opening, the text, end-of-document token; all learnt
    prompt_completion  prompt, completion, end-of-document token; the completion on is learnt
    instruction        a chat if the tokenizer has a template, else as prompt_completion
    messages           the rendered chat; see chat.py
    tokens             as given

Texts are tokenised many at a time, since tokenizers work in parallel over a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, assert_never

import numpy as np
from numpy.typing import NDArray

from packhorse.data.chat import encode_chat
from packhorse.data.formats import Chat, Completion, Example, Instruction, Text, Tokens
from packhorse.data.segments import SEGMENT_CHARS, split_text
from packhorse.data.sources import Origin
from packhorse.data.tokenizer import Tokenizer
from packhorse.errors import DataError, InputError

_GROUP_EXAMPLES: Final = 512
_GROUP_CHARS: Final = 4 * SEGMENT_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of a document, or of a stretch of it.

    A document that `may_cut` becomes several rows if it is long; any other is truncated. `starts`
    and `ends` are both True but for a stretch of a longer text.
    """

    origin: Origin
    tokens: NDArray[np.int64]
    labelled: NDArray[np.bool_]
    may_cut: bool
    starts: bool = True
    ends: bool = True


class Encoder:
    """Tokenises examples of every format with one tokenizer and one choice of loss."""

    def __init__(
        self, *, tokenizer: Tokenizer | None, vocab_size: int, assistant_only: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._assistant_only = assistant_only

    def encode(self, examples: Iterable[tuple[Origin, Example]]) -> Iterator[Piece]:
        """Tokenise a stream of examples, in order.

        Raises:
            DataError: a token lies outside the vocabulary; names file, line, token and limit.
        """
        for group in _group_examples(examples):
            yield from map(self._check_vocabulary, self._encode_group(group))

    def _encode_group(self, group: list[tuple[Origin, Example]]) -> Iterator[Piece]:
        texts = [example for _, example in group if isinstance(example, Text)]
        encoded = iter(self._encode_texts(texts) if texts else ())
        for origin, example in group:
            match example:
                case Text():
                    yield self._finish_text(example, origin, next(encoded))
                case Chat():
                    yield self._encode_chat(example, origin)
                case Completion():
                    yield self._encode_completion(example, origin)
                case Instruction():
                    yield self._encode_instruction(example, origin)
                case Tokens():
                    yield _take_tokens(example, origin)
                case _:
                    assert_never(example)

    def _encode_texts(self, texts: list[Text]) -> list[NDArray[np.int64]]:
        """Tokenise texts; a later stretch sees a line end before it, as it does in its document.

        Many tokenizers treat the beginning of a text specially. The line end's own tokens go again.
        """
        tokenizer = self._need_tokenizer()
        (line_end,) = tokenizer.encode(["\n"])
        encoded = tokenizer.encode(
            [text.text if text.starts else "\n" + text.text for text in texts]
        )
        for index, text in enumerate(texts):
            if not text.starts:
                tokens = encoded[index]
                if np.array_equal(tokens[: len(line_end)], line_end):
                    encoded[index] = tokens[len(line_end) :]
                else:
                    (encoded[index],) = tokenizer.encode([text.text])
        return encoded

    def _finish_text(self, example: Text, origin: Origin, tokens: NDArray[np.int64]) -> Piece:
        if example.starts and len(tokens):
            tokens = np.concatenate([self._need_tokenizer().opening, tokens])
        if example.ends and (len(tokens) or not example.starts):
            tokens = self._end_document(tokens)
        return Piece(
            origin=origin,
            tokens=tokens,
            labelled=np.ones(len(tokens), np.bool_),
            may_cut=True,
            starts=example.starts,
            ends=example.ends,
        )

    def _encode_chat(self, chat: Chat, origin: Origin) -> Piece:
        tokens, labelled = encode_chat(
            self._need_tokenizer(), chat, origin, assistant_only=self._assistant_only
        )
        return Piece(origin=origin, tokens=tokens, labelled=labelled, may_cut=False)

    def _encode_completion(self, example: Completion, origin: Origin) -> Piece:
        """Tokenise prompt and completion as one text where the prompt's tokens stay the same.

        Where the border falls inside a token of the joined text the two are tokenised apart, as
        they are when the model is asked to go on from the prompt.
        """
        tokenizer = self._need_tokenizer()
        prompt, joined = tokenizer.encode([example.prompt, example.prompt + example.completion])
        if not np.array_equal(joined[: len(prompt)], prompt):
            joined = np.concatenate([prompt, *tokenizer.encode([example.completion])])
        num_prompt = len(tokenizer.opening) + len(prompt)
        tokens = self._end_document(np.concatenate([tokenizer.opening, joined]))
        labelled = np.ones(len(tokens), np.bool_)
        if self._assistant_only:
            labelled[:num_prompt] = False
        return Piece(origin=origin, tokens=tokens, labelled=labelled, may_cut=False)

    def _encode_instruction(self, example: Instruction, origin: Origin) -> Piece:
        if self._need_tokenizer().chat_template is None:
            parts = [
                example.system,
                f"### Instruction:\n{example.instruction}",
                f"### Input:\n{example.input}" if example.input else "",
                "### Response:\n",
            ]
            prompt = "\n\n".join(part for part in parts if part)
            completion = Completion(prompt=prompt, completion=example.output)
            return self._encode_completion(completion, origin)
        task = "\n\n".join(part for part in (example.instruction, example.input) if part)
        turns = [("system", example.system)] if example.system else []
        turns += [("user", task), ("assistant", example.output)]
        messages = tuple({"role": role, "content": content} for role, content in turns)
        return self._encode_chat(Chat(messages=messages), origin)

    def _end_document(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        eos_id = self._need_tokenizer().eos_id
        if eos_id is None:
            raise InputError(
                f"the tokenizer {self._need_tokenizer().name} has no end-of-text token",
                fix="set eos_token in its tokenizer_config.json",
            )
        if len(tokens) and tokens[-1] == eos_id:
            return tokens
        return np.append(tokens, np.int64(eos_id))

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InputError(
                "the data is text, and no tokenizer is given",
                fix="give a model folder that holds one, or data of format tokens",
            )
        return self._tokenizer

    def _check_vocabulary(self, piece: Piece) -> Piece:
        outside = (piece.tokens < 0) | (piece.tokens >= self._vocab_size)
        if outside.any():
            place = int(np.argmax(outside))
            token = int(piece.tokens[place])
            text = ""
            if self._tokenizer is not None and 0 <= token < self._tokenizer.num_tokens:
                text = f" ({self._tokenizer.decode([token])!a})"
            raise DataError(
                f"token {token}{text} lies outside the model's vocabulary of {self._vocab_size}",
                where=f"{piece.origin}, token {place + 1} of the row",
                fix="use the tokenizer that belongs to the model, or resize the model's embedding",
            )
        return piece


def _take_tokens(example: Tokens, origin: Origin) -> Piece:
    labelled = (
        np.ones(len(example.input_ids), np.bool_)
        if example.labelled is None
        else np.asarray(example.labelled, np.bool_)
    )
    try:
        tokens = np.asarray(example.input_ids, np.int64)
    except OverflowError as error:
        raise DataError("input_ids holds a number over 64 bits", where=str(origin)) from error
    return Piece(origin=origin, tokens=tokens, labelled=labelled, may_cut=example.labelled is None)


def _group_examples(
    examples: Iterable[tuple[Origin, Example]],
) -> Iterator[list[tuple[Origin, Example]]]:
    group: list[tuple[Origin, Example]] = []
    num_chars = 0
    for origin, example in examples:
        for part in _split_example(example):
            group.append((origin, part))
            num_chars += len(part.text) if isinstance(part, Text) else 0
            if len(group) >= _GROUP_EXAMPLES or num_chars >= _GROUP_CHARS:
                yield group
                group, num_chars = [], 0
    if group:
        yield group


def _split_example(example: Example) -> Iterator[Example]:
    """Cut a long text into stretches, so that no call of the tokenizer is unbounded."""
    if not isinstance(example, Text) or len(example.text) <= SEGMENT_CHARS:
        yield example
        return
    stretches = list(split_text(example.text))
    for index, stretch in enumerate(stretches):
        yield Text(
            text=stretch,
            starts=example.starts and index == 0,
            ends=example.ends and index == len(stretches) - 1,
        )
