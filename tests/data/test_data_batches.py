from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from packhorse.data.batches import Batches, count_steps, find_row_length
from packhorse.data.cache import TokenCache
from packhorse.data.display import mark_labels, show_row
from packhorse.data.order import FileOrder, ShuffledOrder, split_rows
from packhorse.data.preparation import prepare_data
from packhorse.data.tokenizer import Tokenizer
from packhorse.errors import DataError

MakeCache = Callable[..., TokenCache]


@pytest.fixture
def make_cache(write_rows: Callable[..., Path]) -> MakeCache:
    def make(lengths: list[int], *, max_length: int = 64, packing: bool = False) -> TokenCache:
        rows = [
            {"input_ids": [10 + number] * length, "labels": [-100] + [10 + number] * (length - 1)}
            for number, length in enumerate(lengths)
        ]
        path = write_rows(rows)
        return prepare_data(
            files=[path],
            tokenizer=None,
            cache_folder=path.parent / "cache",
            vocab_size=1000,
            max_length=max_length,
            packing=packing,
        ).cache

    return make


def test_rows_are_padded_right_to_one_static_shape(make_cache: MakeCache) -> None:
    cache = make_cache([3, 13, 2, 5, 9])
    batches = Batches(cache, FileOrder(num_rows=5), global_batch_size=2)
    assert (batches.row_length, batches.steps_per_epoch) == (16, 3)
    first, _, last = (batches.batch(step) for step in range(3))
    assert set(first.inputs) == {"input_ids", "labels"}
    for batch in (first, last):
        for tensor in batch.inputs.values():
            assert (tensor.shape, tensor.dtype) == ((2, 16), torch.int64)
    assert first.inputs["input_ids"][0].tolist() == [10] * 3 + [0] * 13
    assert first.inputs["labels"][0].tolist() == [-100, 10, 10] + [-100] * 13
    assert (first.num_items, first.num_rows, first.num_tokens) == (2 + 12, 2, 16)
    assert (last.num_items, last.num_rows, last.num_tokens) == (8, 1, 9)
    assert last.inputs["input_ids"][1].tolist() == [0] * 16
    assert (last.inputs["labels"][1] == -100).all()


def test_items_are_counted_as_the_loss_counts_them(make_cache: MakeCache) -> None:
    cache = make_cache([3, 13, 2, 5, 9, 30, 30, 4], packing=True)
    batches = Batches(
        cache, ShuffledOrder(num_cache_rows=cache.num_rows, seed=1), global_batch_size=2
    )
    total = 0
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        labels = batch.inputs["labels"]
        assert batch.num_items == int((labels[..., 1:] != -100).sum())
        total += batch.num_items
    assert total == cache.summary.num_label_tokens


def test_the_row_length_is_no_longer_than_it_must_be(make_cache: MakeCache) -> None:
    short, long = make_cache([3, 13]), make_cache([3, 60], max_length=62)
    assert find_row_length(short) == 16
    assert find_row_length(long) == 62
    batches = Batches(short, FileOrder(num_rows=2), global_batch_size=2, row_length=62)
    assert batches.batch(0).inputs["labels"].shape == (2, 62)
    with pytest.raises(DataError, match="cannot hold the longest one, 13"):
        Batches(short, FileOrder(num_rows=2), global_batch_size=2, row_length=12)
    with pytest.raises(DataError, match="global_batch_size is 0"):
        Batches(short, FileOrder(num_rows=2), global_batch_size=0)


def test_any_step_is_found_without_the_ones_before(make_cache: MakeCache) -> None:
    cache = make_cache(list(range(2, 25)))
    order = ShuffledOrder(num_cache_rows=23, seed=5)
    one, two = (Batches(cache, order, global_batch_size=4) for _ in range(2))
    walked = [one.batch(step) for step in range(20)]
    for step in (19, 0, 7):
        jumped = two.batch(step)
        for name, tensor in jumped.inputs.items():
            assert torch.equal(tensor, walked[step].inputs[name])
    for epoch in range(3):
        seen = [
            int(row[0])
            for batch in walked[6 * epoch : 6 * epoch + 6]
            for row in batch.inputs["input_ids"][: batch.num_rows]
        ]
        assert sorted(seen) == list(range(10, 33))
    assert [int(batch.inputs["input_ids"][0, 0]) for batch in walked[:3]] != [
        int(batch.inputs["input_ids"][0, 0]) for batch in walked[6:9]
    ]
    with pytest.raises(IndexError):
        one.batch(-1)


def test_batches_leave_no_pages_of_the_cache_in_memory(make_cache: MakeCache) -> None:
    cache = make_cache([64] * 500)

    def mapped_bytes() -> int:
        held = 0
        inside = False
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            if "-" in line.split()[0]:
                inside = str(cache.folder) in line
            elif inside and line.startswith("Rss:"):
                held += int(line.split()[1]) * 1024
        return held

    for index in range(500):
        cache.row(index)
    assert mapped_bytes() >= 500 * 64 * 2
    Batches(cache, FileOrder(num_rows=500), global_batch_size=4).batch(100)
    assert mapped_bytes() == 0


def test_evaluation_takes_the_held_out_rows_in_file_order(make_cache: MakeCache) -> None:
    cache = make_cache([4] * 20)
    train, held_out = split_rows(cache.num_rows, share=0.25, seed=3)
    evaluation = Batches(cache, held_out, global_batch_size=5)
    assert evaluation.steps_per_epoch == 1
    rows = evaluation.batch(0).inputs["input_ids"][:, 0].tolist()
    assert rows == [10 + row for row in held_out.rows]
    training = Batches(cache, train, global_batch_size=5)
    trained = {
        row for step in range(3) for row in training.batch(step).inputs["input_ids"][:, 0].tolist()
    }
    assert trained | set(rows) == set(range(10, 30))
    assert not trained & set(rows)


def test_packed_rows_describe_their_documents(make_cache: MakeCache) -> None:
    cache = make_cache([3, 2, 4], packing=True)
    batch = Batches(cache, FileOrder(num_rows=1), global_batch_size=2, row_length=12).batch(0)
    inputs = {name: tensor.tolist() for name, tensor in batch.inputs.items()}
    assert inputs["input_ids"][0] == [10] * 3 + [11] * 2 + [12] * 4 + [0] * 3
    ignored = -100
    assert inputs["labels"][0] == [
        *(ignored, 10, 10),
        *(ignored, 11),
        *(ignored, 12, 12, 12),
        *(ignored, ignored, ignored),
    ]
    assert inputs["position_ids"][0] == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert inputs["document_ids"][0] == [1, 1, 1, 2, 2, 3, 3, 3, 3, 0, 0, 0]
    assert inputs["position_ids"][1] == list(range(12))
    assert inputs["document_ids"][1] == [0] * 12


def test_packed_rows_give_the_loss_of_rows_of_their_own(make_cache: MakeCache) -> None:
    torch.manual_seed(0)
    lengths = [3, 2, 6, 4, 11, 5]
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).double()
    losses: list[float] = []
    for packing, isolated in ((False, True), (True, True), (True, False)):
        cache = make_cache(lengths, max_length=16, packing=packing)
        batch = Batches(cache, FileOrder(num_rows=cache.num_rows), global_batch_size=8).batch(0)
        assert batch.num_items == sum(lengths) - len(lengths)
        logits = model(
            batch.inputs["input_ids"],
            position_ids=batch.inputs["position_ids"] if packing and isolated else None,
            use_cache=False,
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.inputs["labels"][:, 1:].flatten(), reduction="sum"
        )
        losses.append(float(loss.detach()) / batch.num_items)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert abs(losses[2] - losses[0]) > 1e-3


def test_steps_of_a_run() -> None:
    assert count_steps(10, num_train_epochs=3) == 30
    assert count_steps(10, num_train_epochs=0.25) == 3
    assert count_steps(10, num_train_epochs=3, max_steps=7) == 7
    with pytest.raises(DataError, match="max_steps is 0"):
        count_steps(10, num_train_epochs=1, max_steps=0)
    for epochs in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="num_train_epochs"):
            count_steps(10, num_train_epochs=epochs)


def test_rows_show_which_tokens_are_learnt(
    tokenizer: Tokenizer, write_rows: Callable[..., Path]
) -> None:
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "caf\u00e9 \U0001f40e"},
    ]
    path = write_rows([{"messages": turns}])
    cache = prepare_data(
        files=[path],
        tokenizer=tokenizer,
        cache_folder=path.parent / "cache",
        vocab_size=400,
        max_length=64,
    ).cache
    shown = show_row(cache, 0, tokenizer)
    assert "".join(token.text for token in shown) == tokenizer.render(turns, (), prompt=False)
    assert mark_labels(shown) == (
        "<|start|>user\nhello<|end|>\n<|start|>assistant\n[[caf\u00e9 \U0001f40e<|end|>\n]]"
    )
    assert not any("\ufffd" in token.text for token in shown)
    ids = [token for item in shown for token in item.token_ids]
    assert ids == cache.row(0).tokens.tolist()
    numbers = show_row(cache, 0, None)
    assert [token.token_ids[0] for token in numbers] == ids
