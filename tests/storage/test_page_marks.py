"""A mark finds every page that is not the one that was written, whole or piece by piece."""

from __future__ import annotations

import ctypes
import mmap
import random

import pytest

from packhorse.storage.page_marks import PAGE_BYTES, mark_pages

SIZES = [0, 1, 7, 8, 9, 4095, 4096, 4097, 3 * 4096, 3 * 4096 + 5, 10 * 4096]


def content_of(size_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_pieces_have_the_mark_of_the_whole(size_bytes: int) -> None:
    content = content_of(size_bytes)
    whole = mark_pages(content, size_bytes)
    for step in (PAGE_BYTES, 2 * PAGE_BYTES):
        mark = 0
        for start in range(0, size_bytes, step):
            piece = content[start : start + step]
            mark = mark_pages(piece, len(piece), mark)
        assert mark == whole


@pytest.mark.parametrize("size_bytes", [size for size in SIZES if size])
def test_a_page_of_another_content_has_another_mark(size_bytes: int) -> None:
    content, other = content_of(size_bytes), content_of(size_bytes, seed=2)
    mark = mark_pages(content, size_bytes)
    for start in range(0, size_bytes, PAGE_BYTES):
        changed = bytearray(content)
        changed[start : start + PAGE_BYTES] = other[start : start + PAGE_BYTES]
        assert mark_pages(changed, size_bytes) != mark


def test_pages_that_change_places_have_another_mark() -> None:
    content = content_of(3 * PAGE_BYTES)
    swapped = content[PAGE_BYTES : 2 * PAGE_BYTES] + content[:PAGE_BYTES] + content[-PAGE_BYTES:]
    assert mark_pages(swapped, len(swapped)) != mark_pages(content, len(content))


def test_all_kinds_of_memory_have_the_same_mark_and_are_left_free() -> None:
    content = content_of(2 * PAGE_BYTES + 100)
    mark = mark_pages(content, len(content))
    assert mark_pages(bytearray(content), len(content)) == mark
    with mmap.mmap(-1, 3 * PAGE_BYTES) as memory:  # closing it fails while a view of it is left
        memory[: len(content)] = content
        assert mark_pages(memory, len(content)) == mark
    held = ctypes.create_string_buffer(content, len(content))
    assert mark_pages(ctypes.addressof(held), len(content)) == mark
