from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.data import json_lists, sources
from packhorse.data.segments import find_cut, split_text
from packhorse.data.sources import FieldRow, TextPart, find_sources, read_rows
from packhorse.errors import DataError, InputError

WriteRows = Callable[..., Path]


def read_all(path: Path | str) -> list[TextPart | FieldRow]:
    return [row for source in find_sources([path]) for row in read_rows(source)]


def read_fields(path: Path) -> list[object]:
    return [row.fields for row in read_all(path) if isinstance(row, FieldRow)]


def refuse(path: Path | str, *, where: str = "", what: str = "") -> DataError:
    with pytest.raises(DataError) as caught:
        read_all(path)
    assert what in caught.value.what
    assert where in str(caught.value)
    return caught.value


def test_folder_takes_data_files_in_full_depth_and_passes_over_others(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.jsonl", "a/d.json", "README.md", ".hidden/e.txt", "f.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    found = [source.path.relative_to(tmp_path).as_posix() for source in find_sources([tmp_path])]
    assert found == ["a/c.jsonl", "a/d.json", "b.txt"]


def test_globs_are_relative_to_the_base_folder_and_sorted(tmp_path: Path) -> None:
    for name in ("2.txt", "1.txt", "3.md"):
        (tmp_path / name).write_text("x")
    found = [source.path.name for source in find_sources(["*"], folder=tmp_path)]
    assert found == ["1.txt", "2.txt"]
    odd = tmp_path / "run[1]"
    odd.mkdir()
    (odd / "a.txt").write_text("x")
    assert [source.path for source in find_sources(["*.txt"], folder=odd)] == [odd / "a.txt"]
    assert [source.path for source in find_sources([str(tmp_path / "[12].txt")])] == [
        tmp_path / "1.txt",
        tmp_path / "2.txt",
    ]


def test_nothing_found_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    refuse(tmp_path / "trian.jsonl", where="train.jsonl")
    refuse(tmp_path / "*.parquet", what="finds no data file")
    refuse(tmp_path / "no" / "such.txt", where="does not exist either")
    empty = tmp_path / "pictures"
    empty.mkdir()
    (empty / "a.png").write_bytes(b"x")
    refuse(empty, where=".png")
    (tmp_path / "table.csv").write_text("x")
    refuse(tmp_path / "table.csv", what=".csv")
    with pytest.raises(DataError, match="no data files are given"):
        find_sources([])


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "same.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match="named twice"):
        find_sources([tmp_path / "a.txt", str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match="named twice"):
        find_sources([tmp_path])


def test_empty_files_and_files_without_rows(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", b""),
        ("b.txt", b" \n\r\n"),
        ("c.jsonl", b"\n\n"),
        ("d.json", b"[]"),
        ("e.json", b"  [ \n ] \n"),
        ("f.jsonl", b"\xef\xbb\xbf"),
    ):
        (tmp_path / name).write_bytes(content)
        refuse(tmp_path / name, what=name)


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (part,) = read_all(text)
    assert isinstance(part, TextPart)
    assert (part.text, part.starts, part.ends) == ("one\ntwo\n", True, True)
    rows = tmp_path / "b.jsonl"
    rows.write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\n"}\r\n\r\n{"text": "b"}')
    assert read_fields(rows) == [{"text": "a\r\n"}, {"text": "b"}]
    listed = tmp_path / "c.json"
    listed.write_bytes(b'\xef\xbb\xbf[{"text": "a"},\r\n{"text": "b"}]\r\n')
    assert read_fields(listed) == [{"text": "a"}, {"text": "b"}]


def test_bytes_that_are_not_utf8_name_their_line(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", b"one\ntwo\nthr\xe9e"),
        ("b.jsonl", b'{"text": "a"}\n{"text": "b"}\n{"text": "\xe9"}\n'),
        ("c.json", b'[{"text": "a"},\n{"text": "b"},\n{"text": "\xe9"}]'),
    ):
        (tmp_path / name).write_bytes(content)
        refuse(tmp_path / name, where=f"{name}:3", what="0xe9")
    (tmp_path / "wide.txt").write_bytes("hello".encode("utf-16"))
    refuse(tmp_path / "wide.txt", what="UTF-16")
    (tmp_path / "cut.txt").write_bytes("caf\u00e9".encode()[:-1])
    refuse(tmp_path / "cut.txt", where="cut.txt:1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"text": "a"}\n{"text": "b"\n', 2),
        ('{"text": "a"}\n\n"just a string"\n', 3),
        ("[1, 2]\n", 1),
        ('{"text": "a"}\n{"text": "b"} {"text": "c"}\n', 2),
        ("\x00\x00\n", 1),
    ],
)
def test_broken_json_lines_name_their_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    refuse(path, where=f"rows.jsonl:{line}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"text": "a"},\n{"text": }]', 2),
        ('[{"text": "a"},\n{"text": "b"},\n]', 3),
        ('[{"text": "a"}\n{"text": "b"}]', 2),
        ('[{"text": "a"},\n3]', 2),
        ('[{"text": "a"}\n] more', 2),
        ('[{"text": "a"}\n]\n{"b": 1}', 3),
        ('[{"text": "a"},\n{"text": "b', 2),
        ('[{"text": "a"}\n}', 2),
        ("[{'text': 'a'}]", 1),
    ],
)
def test_broken_json_lists_name_their_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    refuse(path, where=f"rows.json:{line}")


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}")
    refuse(path, where="rows.jsonl:1", what="nested")


def test_a_json_file_may_hold_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert read_fields(path) == [{"text": "a"}, {"text": "b"}]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), min_size=1),
    indent=st.sampled_from([None, 0, 3]),
    block_bytes=st.integers(1, 9),
    ascii_only=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_json_lists_read_the_same_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, object]],
    indent: int | None,
    block_bytes: int,
    ascii_only: bool,
) -> None:
    path = tmp_path_factory.mktemp("lists") / "rows.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(text.encode("utf-8", "replace"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lists, "_BLOCK_BYTES", block_bytes)
        elements = list(json_lists.read_json_list(path, max_bytes=2**20))
    assert [json.loads(element.text) for element in elements] == json.loads(path.read_bytes())
    lines = path.read_text(encoding="utf-8").split("\n")
    assert all(lines[element.line - 1].lstrip(" ,[")[:1] == "{" for element in elements)


def test_a_long_line_is_read_and_an_endless_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "word " * 2_000_000}) + "\n")
    (row,) = read_all(path)
    assert isinstance(row, FieldRow)
    assert row.read_bytes == path.stat().st_size > 10_000_000
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 1024)
    refuse(path, where="rows.jsonl:1", what="longer than")
    listed = tmp_path / "rows.json"
    listed.write_text('[\n{"text": "' + "word " * 1_000_000)
    refuse(listed, where="rows.json:2")


def test_long_texts_come_in_parts_that_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SEGMENT_CHARS", 50)
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 33)
    text = "".join(f"line {number} caf\u00e9\n\n" for number in range(40))
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8")
    parts = [part for part in read_all(path) if isinstance(part, TextPart)]
    assert "".join(part.text for part in parts) == text
    assert [part.starts for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    for part in parts:
        assert part.text.split("\n")[0] in text.split("\n")[part.origin.line - 1]


@given(text=st.text(alphabet="ab \n", max_size=80), limit=st.integers(1, 20))
def test_cuts_keep_the_text_and_make_progress(text: str, limit: int) -> None:
    stretches = list(split_text(text, limit))
    assert "".join(stretches) == text
    assert all(0 < len(stretch) <= limit for stretch in stretches)


def test_cuts_come_before_white_space_best_after_a_word() -> None:
    assert find_cut("ab cd. ef gh", 8) == 2
    assert find_cut("ab cd. ef gh", 9) == 9
    assert find_cut("ab\n\ncd. ef", 9) == 2
    assert find_cut("-- ==. efghij", 9) == 6
    assert find_cut("abcdefghijk", 9) == 9
    assert find_cut("short", 9) == 5


def test_parquet_without_its_extra_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'packhorse\[data\]'"):
        read_all(path)


def test_parquet_rows_are_numbered(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    rows = read_all(path)
    assert [(row.origin.line, row.fields) for row in rows if isinstance(row, FieldRow)] == [
        (1, {"text": "a"}),
        (2, {"text": "b"}),
    ]
    path.write_bytes(path.read_bytes()[:-9])
    refuse(path, what="no readable parquet file")
