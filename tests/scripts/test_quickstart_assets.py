"""The parts of the quickstart's assets that need neither the wheel nor the network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts import quickstart_assets as assets


def test_unpermute_rotary_undoes_the_order_of_llama_cpp() -> None:
    num_heads, head_size, columns = 3, 8, 5
    weight = np.arange(num_heads * head_size * columns, dtype=np.float32)
    weight = weight.reshape(num_heads * head_size, columns)
    halves = weight.reshape(num_heads, 2, head_size // 2, columns)
    permuted = halves.swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(permuted, weight)
    assert np.array_equal(assets.unpermute_rotary(permuted, num_heads), weight)


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_name_tensor(gguf_name: str, name: str) -> None:
    assert assets.name_tensor(gguf_name) == name


def test_passages_are_whole_verses_of_one_chapter() -> None:
    verses: list[assets.Json] = [
        {"book": "Jude", "chapter": chapter, "verse": verse, "text": "x" * length}
        for chapter, verse, length in ((1, 1, 4), (1, 2, 4), (1, 3, 4), (2, 1, 4), (2, 2, 30))
    ]
    rows = list(assets.join_verses(verses, 10))
    assert [row["citation"] for row in rows] == [
        "Jude 1:1-2", "Jude 1:3", "Jude 2:1", "Jude 2:2",
    ]  # fmt: skip
    assert rows[0]["text"] == "xxxx xxxx"
    assert [len(row["text"]) for row in rows] == [9, 4, 4, 30]


def test_a_changed_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / assets.GGUF_NAME
    path.write_bytes(b"not the model")
    with pytest.raises(assets.AssetError, match="is not the file that was pinned"):
        assets.convert_model(path, tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == [assets.GGUF_NAME]
