from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from packhorse.checkpoint.checksums import RangeChecksum, combine_checksums
from packhorse.checkpoint.header import TensorSpec, read_header
from packhorse.checkpoint.tensor_files import TensorFiles
from packhorse.checkpoint.tensor_writer import BLOCK_BYTES, TensorFileWriter
from packhorse.errors import FileFormatError, StorageError


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_combine(first: bytes, second: bytes) -> None:
    combined = combine_checksums(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


@given(st.binary(min_size=1, max_size=200), st.lists(st.integers(0, 200)), st.randoms())
def test_ranges_in_any_order_give_the_files_checksum(data: bytes, cuts: list[int], order) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    ranges = list(itertools.pairwise(edges))
    order.shuffle(ranges)
    checksum = RangeChecksum()
    for start, stop in ranges:
        assert checksum.find_gap(len(data)) is not None
        checksum.add(start, data[start:stop])
    assert checksum.find_gap(len(data)) is None
    assert checksum.result() == zlib.crc32(data)


def test_ranges_twice_or_missing_are_refused() -> None:
    checksum = RangeChecksum()
    checksum.add(10, b"0123456789")
    for start in (5, 10, 12, 19):
        with pytest.raises(ValueError, match="written twice"):
            checksum.add(start, b"012345")
    assert checksum.find_gap(30) == (0, 10)
    checksum.add(0, b"0123456789")
    assert checksum.find_gap(30) == (20, 30)


def write_some(path: Path) -> dict[str, torch.Tensor]:
    big = BLOCK_BYTES // 4 + 1234
    values = {
        "big": torch.randn(big, generator=torch.Generator().manual_seed(1)),
        "half": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(2)).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }
    specs = [
        TensorSpec(name=n, dtype=str(v.dtype).removeprefix("torch."), shape=tuple(v.shape))
        for n, v in sorted(values.items(), reverse=True)
    ]
    with TensorFileWriter(path, specs) as writer:
        cut = big // 3
        writer.write("big", cut, values["big"][cut:])
        for name in ("half", "flags", "none", "scalar"):
            writer.write(name, 0, values[name])
        writer.write("big", 0, values["big"][:cut])
        entry = writer.finish()
    assert entry.crc32 == zlib.crc32(path.read_bytes())
    assert entry.size_bytes == path.stat().st_size
    assert all(place.offset_bytes % 4096 == 0 for place in list(writer.places.values())[:1])
    return values


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = write_some(path)
    loaded = load_file(path)
    assert set(loaded) == set(values)
    for name, value in values.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)


def test_reads_ranges_and_converts(tmp_path: Path) -> None:
    values = write_some(tmp_path / "model.safetensors")
    with TensorFiles.open(tmp_path) as files:
        assert set(files.names) == set(values)
        for start, stop in ((0, values["big"].numel()), (17, BLOCK_BYTES // 4 + 100), (5, 5)):
            target = torch.zeros(stop - start)
            files.read_into("big", start, stop, target)
            assert torch.equal(target, values["big"][start:stop])
        target = torch.zeros(100)
        files.read_into("half", 3, 103, target)
        assert torch.equal(target, values["half"].view(-1)[3:103].float())
        files.check_shape("half", (3, 5, 7))
        with pytest.raises(FileFormatError, match=r"shape \[3, 5, 7\], the model needs \[105\]"):
            files.check_shape("half", (105,))
        with pytest.raises(FileFormatError, match="tensor 'bog' is missing") as caught:
            files.place("bog")
        assert "'big'" in str(caught.value)
        assert "model.safetensors" in str(caught.value)
        with pytest.raises(ValueError, match="cannot read elements 0 to 106 of 'half'"):
            files.read_into("half", 0, 106, torch.zeros(106))


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    values = {"a": torch.randn(33, 3), "b": torch.arange(7).to(torch.float8_e4m3fn)}
    save_file(values, tmp_path / "model.safetensors")
    with TensorFiles.open(tmp_path) as files:
        target = torch.zeros(33, 3)
        files.read_into("a", 0, 99, target)
        assert torch.equal(target, values["a"])
        with pytest.raises(FileFormatError, match="stored as F8_E4M3, which cannot be read"):
            files.read_into("b", 0, 7, torch.zeros(7))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 10_000), max_size=5), st.randoms(use_true_random=False))
def test_conversion_does_not_depend_on_the_cut(tmp_path_factory, cuts: list[int], order) -> None:
    path = tmp_path_factory.mktemp("cut") / "x.safetensors"
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(9))
    edges = sorted({0, 10_000, *cuts})
    ranges = list(itertools.pairwise(edges))
    order.shuffle(ranges)
    spec = TensorSpec(name="x", dtype="bfloat16", shape=(10_000,))
    with TensorFileWriter(path, [spec]) as writer:
        for start, stop in ranges:
            writer.write("x", start, values[start:stop])
        writer.finish()
    assert torch.equal(load_file(path)["x"], values.bfloat16())


def test_wrong_pieces_are_refused(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=(10, 10))
    with TensorFileWriter(tmp_path / "x.safetensors", [spec]) as writer:
        with pytest.raises(ValueError, match="no tensor 'y'"):
            writer.write("y", 0, torch.zeros(1))
        with pytest.raises(ValueError, match="elements 90 to 101 are outside of 'x'"):
            writer.write("x", 90, torch.zeros(11))
        writer.write("x", 0, torch.zeros(40))
        writer.write("x", 60, torch.zeros(40))
        with pytest.raises(ValueError, match="written twice"):
            writer.write("x", 39, torch.zeros(2))
        with pytest.raises(ValueError, match="elements 40 to 59 of 'x' were never written"):
            writer.finish()
    with pytest.raises(StorageError):
        TensorFileWriter(tmp_path / "x.safetensors", [spec])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(10), "b": torch.ones(3, dtype=torch.int64)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match=r"model\.safetensors is damaged"):
            TensorFiles.open(tmp_path)
    path.write_bytes(whole + b"x")
    with pytest.raises(FileFormatError, match="too long"):
        TensorFiles.open(tmp_path)


def write_header(path: Path, header: object, num_data_bytes: int = 0) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_data_bytes))


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "message"),
    [
        (b"{nonsense", 0, "is not JSON"),
        (b"\xff\xfe{}", 0, "is not JSON"),
        ([], 0, "is not a JSON object"),
        ({"a": 3}, 0, "the entry of 'a' is malformed"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, 4, "malformed"),
        ({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, 4, "malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, r"\[2\] of float32"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "leaves a gap"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 3, "truncated"),
    ],
)
def test_damaged_headers_are_refused(
    tmp_path: Path, header: object, num_data_bytes: int, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    write_header(path, header, num_data_bytes)
    with pytest.raises(FileFormatError, match=message):
        read_header(path)


def test_huge_header_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(FileFormatError, match="would take 4611686018427387904 bytes"):
        read_header(path)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"there is no model\.safetensors"):
        TensorFiles.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FileFormatError, match="pickled weights") as caught:
        TensorFiles.open(tmp_path)
    assert "save_pretrained" in str(caught.value)


def test_sharded_folder(tmp_path: Path) -> None:
    values = {"a": torch.randn(5), "b": torch.randn(6)}
    for number, name in enumerate(values, start=1):
        save_file({name: values[name]}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    weight_map = {name: f"model-{n:05d}-of-00002.safetensors" for n, name in ((1, "a"), (2, "b"))}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with TensorFiles.open(tmp_path) as files:
        for name, value in values.items():
            target = torch.zeros_like(value)
            files.read_into(name, 0, value.numel(), target)
            assert torch.equal(target, value)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileFormatError, match=r"shard 'model-00002-of-00002\.safetensors', which is"
    ):
        TensorFiles.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(FileFormatError, match="which is missing"):
        TensorFiles.open(tmp_path)
    index.write_text("[]")
    with pytest.raises(FileFormatError, match="no weight_map"):
        TensorFiles.open(tmp_path)


@pytest.mark.parametrize("present", ["embed", "head"])
def test_either_tied_name_serves_both(tmp_path: Path, present: str) -> None:
    value = torch.randn(6)
    save_file({present: value}, tmp_path / "model.safetensors")
    with TensorFiles.open(tmp_path, ties={"embed": ("head",)}) as files:
        for name in ("embed", "head"):
            target = torch.zeros(6)
            files.read_into(name, 0, 6, target)
            assert torch.equal(target, value)


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    value = torch.randn(BLOCK_BYTES // 4 + 10)
    path = tmp_path / "model.safetensors"
    save_file({"embed": value, "head": value.clone()}, path)
    with TensorFiles.open(tmp_path, ties={"embed": ("head",)}) as files:
        assert "head" in files
    other = value.clone()
    other[-1] += 1
    save_file({"embed": value, "head": other}, path)
    with pytest.raises(FileFormatError, match="'embed' and 'head' are one parameter") as caught:
        TensorFiles.open(tmp_path, ties={"embed": ("head",)})
    assert "tie_word_embeddings" in str(caught.value)
    with TensorFiles.open(tmp_path) as files:
        assert "head" in files
