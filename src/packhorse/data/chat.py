"""Which tokens of a chat the assistant wrote.

In: a chat and the tokenizer's template. Out: tokens and a mask, True where the loss counts.

A template with generation marks says it itself. For any other, every assistant turn k lies between
two renderings of the chat's beginning:

    before = render(messages[:k], with the prompt for the assistant's turn)
    after  = render(messages[:k + 1])
    full   = render(messages)            before and after must both be beginnings of full

so characters len(before) to len(after) of `full` are the assistant's, with its end-of-turn mark.
`full` is tokenised once; a token counts if it holds one of these characters, as transformers does
for marks. A template whose earlier text depends on later turns breaks the rule and is refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packhorse.data.formats import Chat, Message
from packhorse.data.sources import Origin
from packhorse.data.tokenizer import Encoding, Tokenizer
from packhorse.errors import DataError, InputError

_CONTEXT_CHARS = 30


def encode_chat(
    tokenizer: Tokenizer, chat: Chat, origin: Origin, *, assistant_only: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Render and tokenise a chat, and mark the tokens that carry loss (all unless assistant_only).

    Raises:
        DataError: there is no template, it refuses the chat, or its renderings do not continue one
            another.
        InputError: jinja2 is not installed.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"the tokenizer {tokenizer.name} has no chat template",
            where=str(origin),
            fix="use the tokenizer of a chat model, or write prompt and completion instead",
        )
    if not assistant_only:
        encoding = tokenizer.encode_with_places(
            _render(tokenizer, chat, origin, len(chat.messages))
        )
        return encoding.ids, np.ones(len(encoding.ids), np.bool_)
    if tokenizer.marks_generation:
        return _encode_marked(tokenizer, chat, origin)
    full = _render(tokenizer, chat, origin, len(chat.messages))
    encoding = tokenizer.encode_with_places(full)
    labelled = np.zeros(len(encoding.ids), np.bool_)
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and index >= chat.num_prompt_messages:
            start = _find_beginning(tokenizer, chat, origin, full, index, prompt=True)
            end = _find_beginning(tokenizer, chat, origin, full, index + 1, prompt=False)
            labelled |= _mark_span(encoding, start, end)
    return encoding.ids, labelled


def _encode_marked(
    tokenizer: Tokenizer, chat: Chat, origin: Origin
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    try:
        encoding, labelled = tokenizer.render_marked(chat.messages, chat.tools)
    except _template_errors() as error:
        raise _refused(tokenizer, chat.messages, origin, error) from error
    if chat.num_prompt_messages:
        full = _render(tokenizer, chat, origin, len(chat.messages))
        start = _find_beginning(
            tokenizer, chat, origin, full, chat.num_prompt_messages, prompt=True
        )
        labelled = labelled & (encoding.ends > start)
    return encoding.ids, labelled


def _mark_span(encoding: Encoding, start: int, end: int) -> NDArray[np.bool_]:
    return (encoding.ends > start) & (encoding.starts < end)


def _find_beginning(
    tokenizer: Tokenizer, chat: Chat, origin: Origin, full: str, num_messages: int, *, prompt: bool
) -> int:
    """Length of the rendering of the first messages, checked to be the beginning of `full`."""
    text = _render(tokenizer, chat, origin, num_messages, prompt=prompt)
    if full.startswith(text):
        return len(text)
    differs = next(
        (
            index
            for index, (left, right) in enumerate(zip(text, full, strict=False))
            if left != right
        ),
        min(len(text), len(full)),
    )
    shown = slice(max(0, differs - _CONTEXT_CHARS), differs + _CONTEXT_CHARS)
    raise DataError(
        f"the chat template of {tokenizer.name} renders the first {num_messages} messages"
        f"{' and the prompt for the next turn' if prompt else ''} differently when more follow, "
        "so the assistant's tokens cannot be told apart",
        where=f"{origin}, character {differs}\n"
        f"alone: {text[shown]!a}\nwithin the chat: {full[shown]!a}",
        fix="put {% generation %} ... {% endgeneration %} around the assistant's part of the "
        "template,\nor train on all tokens: assistant_only_loss: false",
    )


def _render(
    tokenizer: Tokenizer, chat: Chat, origin: Origin, num_messages: int, *, prompt: bool = False
) -> str:
    messages = chat.messages[:num_messages]
    try:
        return tokenizer.render(messages, chat.tools, prompt=prompt)
    except _template_errors() as error:
        raise _refused(tokenizer, messages, origin, error) from error


def _refused(
    tokenizer: Tokenizer, messages: tuple[Message, ...], origin: Origin, error: Exception
) -> DataError:
    roles = ", ".join(str(message["role"]) for message in messages) or "none"
    return DataError(
        f"the chat template of {tokenizer.name} refuses the chat: {error}",
        where=f"{origin}; turns: {roles}",
        fix="write the turns as the template wants them, or use another template",
    )


def _template_errors() -> tuple[type[Exception], ...]:
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        raise InputError("chat templates need jinja2: pip install 'packhorse[hf]'") from error
    return (TemplateError, TypeError, ValueError, KeyError, AttributeError)
