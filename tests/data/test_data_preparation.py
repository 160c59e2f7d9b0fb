from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.data import cache, cache_writer, encoding
from packhorse.data.cache import FILES, MANIFEST, TokenCache, open_cache
from packhorse.data.preparation import PreparedData, prepare_data
from packhorse.data.tokenizer import Tokenizer
from packhorse.errors import DataError, FileFormatError, StorageError

WriteRows = Callable[..., Path]


def prepare(path: Path, tokenizer: Tokenizer | None, **options: Any) -> PreparedData:
    settings: dict[str, Any] = {"vocab_size": 400, "max_length": 64, **options}
    return prepare_data(
        files=[path], tokenizer=tokenizer, cache_folder=path.parent / "cache", **settings
    )


def read_documents(cache: TokenCache) -> list[tuple[list[int], list[bool]]]:
    found = []
    for index in range(cache.num_rows):
        row = cache.row(index)
        ends = (*row.document_starts[1:], len(row.tokens))
        for start, end in zip(row.document_starts, ends, strict=True):
            found.append((row.tokens[start:end].tolist(), row.labelled[start:end].tolist()))
    return found


def token_rows(lengths: list[int]) -> list[dict[str, object]]:
    return [
        {"input_ids": list(range(n, n + length)), "labels": list(range(n, n + length))}
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("vocab_size", [400, 70_000])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_come_back_as_they_went_in(
    write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch, vocab_size: int, packing: bool
) -> None:
    monkeypatch.setattr(cache_writer, "_BUFFER_TOKENS", 50)
    lengths = [2, 3, 31, 64, 5, 17, 8, 9, 2, 2, 40, 1, 63]
    rows = token_rows(lengths)
    for number, row in enumerate(rows):
        if number % 3 == 0:
            row["labels"] = [-100, *list(row["input_ids"])[1:]]  # type: ignore[call-overload] a list
    path = write_rows(rows)
    prepared = prepare(path, None, vocab_size=vocab_size, packing=packing)
    expected = [
        (row["input_ids"], [False] + [True] * (length - 1))
        for row, length in zip(rows, lengths, strict=True)
        if length > 1
    ]
    found = read_documents(prepared.cache)
    assert sorted(found) == sorted(expected)
    if not packing:
        assert found == expected
        assert [prepared.cache.row(i).origin.line for i in range(3)] == [1, 2, 3]
    summary = prepared.summary
    assert (summary.num_read, summary.num_empty, summary.num_documents) == (13, 1, 12)
    assert summary.num_tokens == sum(lengths) - 1
    assert summary.num_label_tokens == sum(lengths) - len(lengths)
    assert prepared.cache.manifest.token_dtype == ("<u2" if vocab_size == 400 else "<u4")


def test_packing_fills_rows_and_splits_no_document(write_rows: WriteRows) -> None:
    path = write_rows(token_rows([30, 20, 40, 10, 25, 64, 2, 2]))
    cache = prepare(path, None, packing=True).cache
    lengths = sorted(
        [
            np.diff([*cache.row(i).document_starts, len(cache.row(i).tokens)]).tolist()
            for i in range(cache.num_rows)
        ]
    )
    assert lengths == [[30, 20, 10, 2, 2], [40], [64], [25]] or lengths == sorted(
        [[30, 20, 10, 2, 2], [40], [25], [64]]
    )


def test_long_texts_lose_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog\n" * 300
    path = tmp_path / "book.txt"
    path.write_text(text)
    whole = [*tokenizer.encode([text])[0].tolist(), tokenizer.eos_id]
    for max_length in (2, 3, 7, 64, len(whole) - 1, len(whole), len(whole) + 1):
        prepared = prepare(path, tokenizer, max_length=max_length)
        documents = [tokens for tokens, _ in read_documents(prepared.cache)]
        joined = [token for tokens in documents for token in tokens]
        if max_length > 2:
            assert joined == whole
        else:
            assert joined == whole[: len(whole) // 2 * 2]
        assert all(2 <= len(tokens) <= max_length for tokens in documents)
        assert prepared.summary.num_read == 1
        assert prepared.summary.num_truncated == 0


def test_counts_of_truncated_dropped_and_without_labels(
    tokenizer: Tokenizer, write_rows: WriteRows
) -> None:
    def chat(question: str, *answer: str) -> dict[str, object]:
        turns = [{"role": "user", "content": question}]
        turns += [{"role": "assistant", "content": content} for content in answer]
        return {"messages": turns}

    path = write_rows(
        [
            chat("hello", "hi"),
            chat("hello", "word " * 50),
            chat("word " * 50, "hi"),
            chat("hello"),
        ]
    )
    prepared = prepare(path, tokenizer, max_length=32)
    summary = prepared.summary
    assert summary.num_read == 4
    assert (summary.num_truncated, summary.num_dropped, summary.num_without_labels) == (2, 1, 1)
    assert (summary.num_rows, summary.longest_row) == (2, 32)
    assert summary.formats == ((path, "messages"),)
    everything = prepare(path, tokenizer, max_length=32, assistant_only_loss=False).summary
    assert (everything.num_rows, everything.num_truncated) == (4, 2)
    assert everything.num_label_tokens == everything.num_tokens - 4


def test_nothing_to_learn_from_is_an_error_that_leaves_nothing(
    tokenizer: Tokenizer, write_rows: WriteRows
) -> None:
    turns = [{"role": "user", "content": "hello " * 40}]
    path = write_rows([{"messages": turns}])
    with pytest.raises(DataError, match="no row of the data") as caught:
        prepare(path, tokenizer)
    assert "1 without labels" in str(caught.value)
    assert "assistant_only_loss: false" in str(caught.value)
    path = write_rows([{"messages": [*turns, {"role": "assistant", "content": "hi"}]}])
    with pytest.raises(DataError, match="raise max_length"):
        prepare(path, tokenizer, max_length=16)
    path = write_rows([{"text": ""}, {"text": ""}])
    with pytest.raises(DataError, match="2 empty"):
        prepare(path, tokenizer)
    assert [item.suffix for item in (path.parent / "cache").iterdir()] == [".lock"] * 3
    with pytest.raises(DataError, match="max_length is 1"):
        prepare(path, tokenizer, max_length=1)


def test_files_of_several_formats_mix_but_rows_of_one_file_do_not(
    tokenizer: Tokenizer, write_rows: WriteRows
) -> None:
    folder = write_rows([{"text": "hello"}], "all/a.jsonl").parent
    write_rows([{"prompt": "hello", "completion": " world"}], "all/b.json")
    (folder / "c.txt").write_text("fine")
    prepared = prepare(folder, tokenizer)
    assert [name for _, name in prepared.summary.formats] == ["text", "prompt_completion", "text"]
    write_rows([{"text": "hello"}, {"messages": []}], "all/a.jsonl")
    with pytest.raises(DataError, match="looks like messages") as caught:
        prepare(folder, tokenizer)
    assert str(caught.value.where).endswith("a.jsonl:2")


def test_a_given_format_is_kept_to(tokenizer: Tokenizer, write_rows: WriteRows) -> None:
    path = write_rows([{"text": "hello", "messages": []}])
    assert prepare(path, tokenizer, data_format="text").summary.num_rows == 1
    with pytest.raises(DataError, match='needs "input_ids"'):
        prepare(path, tokenizer, data_format="tokens")
    text = path.with_name("a.txt")
    text.write_text("hello")
    with pytest.raises(DataError, match="is plain text, but data_format is messages"):
        prepare(text, tokenizer, data_format="messages")


def test_a_cache_is_made_once(
    make_tokenizer: Callable[..., Tokenizer], write_rows: WriteRows
) -> None:
    path = write_rows([{"text": "hello world"}])
    first = prepare(path, make_tokenizer())
    assert not first.reused
    assert first.because == "there was none for these files, tokenizer and options"
    again = prepare(path, make_tokenizer())
    assert again.reused
    assert again.cache.folder == first.cache.folder
    assert again.cache.manifest == first.cache.manifest
    for options in ({"max_length": 8}, {"packing": True}, {"vocab_size": 500}):
        assert not prepare(path, make_tokenizer(), **options).reused
    assert not prepare(path, make_tokenizer(bos=True)).reused
    path.write_text('{"text": "hello there"}\n')
    assert not prepare(path, make_tokenizer()).reused


def test_the_digest_follows_content_and_not_place(
    tokenizer: Tokenizer, write_rows: WriteRows
) -> None:
    here = prepare(write_rows([{"text": "hello world"}], "a/x.jsonl"), tokenizer).cache.manifest
    there = prepare(write_rows([{"text": "hello world"}], "b/y.jsonl"), tokenizer).cache.manifest
    other = prepare(write_rows([{"text": "hello worlds"}], "c/z.jsonl"), tokenizer).cache.manifest
    assert here.fingerprint != there.fingerprint
    assert here.digest == there.digest != other.digest


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_damage_is_named_and_prepared_again(write_rows: WriteRows, name: str, damage: str) -> None:
    path = write_rows(token_rows([5, 6, 7]))
    cache = prepare(path, None).cache
    before = read_documents(cache)
    file = cache.folder / name
    content = bytearray(file.read_bytes())
    match damage:
        case "flip":
            content[len(content) // 2] ^= 4
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:-1])
        case "grow":
            file.write_bytes(content + b"\0")
        case _:
            file.unlink()
    with pytest.raises(FileFormatError, match=name):
        open_cache(cache.folder)
    again = prepare(path, None)
    assert again.because is not None
    assert name in again.because
    assert read_documents(again.cache) == before


def test_manifests_that_are_not_ours_are_refused(write_rows: WriteRows, tmp_path: Path) -> None:
    path = write_rows(token_rows([5, 6, 7]))
    folder = prepare(path, None).cache.folder
    manifest = folder / MANIFEST
    fields = json.loads(manifest.read_text())
    assert (fields["kind"], fields["version"]) == ("token-cache", 1)
    assert list(fields)[:2] == ["kind", "version"]
    for change, words in (
        ({"kind": "plan"}, "of kind 'plan'"),
        ({"version": 2}, "version 2; this Packhorse reads up to 1"),
        ({"seals": {}}, "does not list tokens.bin"),
        ({"token_dtype": "<f4"}, "cannot be read"),
        ({"summary": None}, "cannot be read"),
    ):
        manifest.write_text(json.dumps(fields | change))
        with pytest.raises(FileFormatError, match=words):
            open_cache(folder)
    manifest.write_text("{")
    with pytest.raises(FileFormatError, match=MANIFEST):
        open_cache(folder)
    with pytest.raises(FileFormatError, match=MANIFEST):
        open_cache(tmp_path / "nowhere")


def test_a_killed_build_leaves_no_cache_and_is_cleared_away(
    write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(token_rows([5, 6, 7]))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_writer, "write_manifest", stop)
        patch.setattr(shutil, "rmtree", lambda *_args, **_options: None)
        with pytest.raises(KeyboardInterrupt):
            prepare(path, None)
    (left,) = (path.parent / "cache").glob(".building-*")
    prepared = prepare(path, None)
    assert not prepared.reused
    assert not left.exists()
    assert prepared.cache.num_rows == 3


def test_a_full_disk_is_a_storage_error(
    write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(token_rows([5, 6, 7]))

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="No space left on device"):
        prepare(path, None)
    assert not list((path.parent / "cache").glob("*tokens-*[!k]"))


def test_a_cache_folder_that_cannot_be_made_is_a_storage_error(write_rows: WriteRows) -> None:
    path = write_rows(token_rows([5]))
    (path.parent / "cache").write_text("in the way")
    with pytest.raises(StorageError, match="token cache cannot be written"):
        prepare(path, None)


def _prepare_and_tell(path: Path, answers: Any) -> None:
    answers.put(prepare(path, None).reused)


def test_of_two_processes_one_writes_and_both_have_it(write_rows: WriteRows) -> None:
    path = write_rows(token_rows([60] * 200))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=_prepare_and_tell, args=(path, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    reused = sorted(answers.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert reused == [False, True]


def test_memory_does_not_grow_with_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_writer, "_BUFFER_TOKENS", 2_000)
    monkeypatch.setattr(cache, "_HASH_BLOCK_BYTES", 4096)
    monkeypatch.setattr(encoding, "_GROUP_EXAMPLES", 16)

    def peak_bytes(num_rows: int) -> int:
        path = tmp_path / f"{num_rows}.jsonl"
        line = json.dumps({"input_ids": list(range(100))}) + "\n"
        path.write_text(line * num_rows)
        tracemalloc.start()
        try:
            prepare(path, None, max_length=100)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(100)
    assert peak_bytes(4_000) < 1.2 * peak_bytes(500)


def test_progress_runs_to_the_end(tokenizer: Tokenizer, write_rows: WriteRows) -> None:
    path = write_rows([{"text": f"hello {number}"} for number in range(20)])
    seen: list[tuple[int, int | None]] = []
    prepare(path, tokenizer, progress=lambda done, total: seen.append((done, total)))
    size = path.stat().st_size
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_summaries_are_values(write_rows: WriteRows) -> None:
    summary = prepare(write_rows(token_rows([5])), None).summary
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.num_rows = 3  # type: ignore[misc] that is the point
