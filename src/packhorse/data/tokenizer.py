"""The tokenizer, as data sees it. In: a local Hugging Face folder. Out: tokens and renderings.

Always: nothing is fetched, nothing is truncated or padded here, and `digest` depends on content
alone (vocabulary, rules, chat template, special tokens), never on where the files lie.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from packhorse.errors import DataError, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARK: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Tokens of one text and the characters each stands for: `text[starts[i]:ends[i]]`."""

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class Tokenizer:
    """A transformers tokenizer with the few calls that making rows needs.

    `opening` holds the tokens that it puts before a text, such as a beginning-of-text token.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        if not inner.is_fast:
            raise InputError(
                f"the tokenizer {type(inner).__name__} has no fast version (tokenizer.json)",
                fix="convert it: load it with transformers and save_pretrained() it again",
            )
        self.inner: Any = inner  # most of its attributes are untyped
        self.name = str(self.inner.name_or_path) or type(inner).__name__
        self.opening = self._find_opening()

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document."""
        return self.inner.eos_token_id

    @property
    def pad_id(self) -> int | None:
        """The token that fills rows, else the end-of-document token."""
        pad_id: int | None = self.inner.pad_token_id
        return self.eos_id if pad_id is None else pad_id

    @property
    def chat_template(self) -> str | None:
        """The text of the template that chats are rendered with."""
        template: str | dict[str, str] | None = self.inner.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks the assistant's part itself."""
        return bool(_GENERATION_MARK.search(self.chat_template or ""))

    def digest(self) -> str:
        """Hash everything that decides which tokens a text becomes."""
        rules: dict[str, object] = json.loads(self.inner.backend_tokenizer.to_str())
        # How the last caller truncated and padded is state, not content.
        rules.pop("truncation", None)
        rules.pop("padding", None)
        content = [rules, self.chat_template, self.eos_id, self.pad_id, type(self.inner).__name__]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Tokenise texts as they are, without opening or end."""
        return [np.asarray(ids, np.int64) for ids in self._call(texts, False)["input_ids"]]

    def encode_with_places(self, text: str) -> Encoding:
        """Tokenise a rendered chat and say which characters each token stands for."""
        found = self._call([text], False, return_offsets_mapping=True)
        places = np.asarray(found["offset_mapping"][0], np.int64).reshape(-1, 2)
        return Encoding(
            ids=np.asarray(found["input_ids"][0], np.int64), starts=places[:, 0], ends=places[:, 1]
        )

    def render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object], *, prompt: bool
    ) -> str:
        """Render a chat; `prompt` ends it where the assistant's next turn would begin."""
        return self.inner.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
        )

    def render_marked(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object]
    ) -> tuple[Encoding, NDArray[np.bool_]]:
        """Render and tokenise a chat; the mask is the template's own generation marks."""
        found = self.inner.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        places = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
        encoding = Encoding(
            ids=np.asarray(found["input_ids"], np.int64), starts=places[:, 0], ends=places[:, 1]
        )
        return encoding, np.asarray(found["assistant_masks"], np.bool_)

    @property
    def num_tokens(self) -> int:
        """How many tokens it has, added ones included."""
        return len(self.inner)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn tokens back into text, special tokens included."""
        return self.inner.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _find_opening(self) -> NDArray[np.int64]:
        framed, plain = (self._call(["a"], special)["input_ids"][0] for special in (True, False))
        for length in range(len(framed) - len(plain) + 1):
            if framed[length : length + len(plain)] == plain:
                return np.asarray(framed[:length], np.int64)
        raise InputError(
            f"the tokenizer {self.name} changes a text's tokens when it adds its special ones",
            fix="use a tokenizer that puts special tokens only before and after a text",
        )

    def _call(
        self, texts: Sequence[str], special_tokens: bool, **options: bool
    ) -> Mapping[str, list[list[int]]]:
        return self.inner(
            list(texts),
            add_special_tokens=special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a local Hugging Face folder; nothing is fetched.

    Raises:
        InputError: transformers is not installed, or the tokenizer has no fast version.
        DataError: the folder is missing or holds no tokenizer that loads.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"there is no tokenizer folder {folder}",
            fix="give the folder that holds tokenizer.json and tokenizer_config.json",
        )
    try:
        transformers: Any = importlib.import_module("transformers")  # partly untyped
    except ImportError as error:
        raise InputError(
            "tokenising text needs transformers: pip install 'packhorse[hf]'"
        ) from error
    try:
        inner = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the folder {folder} holds no tokenizer that loads",
            where=str(error).strip().splitlines()[0] if str(error).strip() else None,
            fix="it needs tokenizer.json and tokenizer_config.json, as save_pretrained() writes",
        ) from error
    return Tokenizer(inner)
