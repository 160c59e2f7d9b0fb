"""Writing a token cache. In: packed rows as they stream by. Out: a complete folder, or none.

The files grow in a folder of their own beside the final one; they are made durable (fsync) with
their manifest and folder, and only then does one rename give them their name. Memory is one buffer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from packhorse.data.cache import (
    DOCUMENT_FILE,
    FILES,
    LABEL_FILE,
    MANIFEST,
    ORIGIN_FILE,
    ROW_FILE,
    TOKEN_FILE,
    FileSeal,
    Manifest,
    write_manifest,
)
from packhorse.data.packing import PackedRow
from packhorse.errors import StorageError

_BUFFER_TOKENS: Final = 1024**2


@contextmanager
def guard_storage(folder: Path) -> Generator[None]:
    """Turn what the disk refuses into a `StorageError` that names the folder.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the token cache cannot be written: {error.strerror or error}",
            where=str(error.filename or folder),
            fix="free space there, or name another folder as data_cache",
        ) from error


class _GrowingFile:
    """One file that is only appended to, hashed as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with guard_storage(path):
            self._file = path.open("wb")
        self._hasher = hashlib.blake2b(digest_size=16)
        self._size_bytes = 0

    def append(self, values: NDArray[np.generic]) -> None:
        data = values.tobytes()
        with guard_storage(self._path):
            self._file.write(data)
        self._hasher.update(data)
        self._size_bytes += len(data)

    def finish(self) -> FileSeal:
        with guard_storage(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return FileSeal(size_bytes=self._size_bytes, digest=self._hasher.hexdigest())

    def close(self) -> None:
        self._file.close()


class CacheWriter:
    """Appends rows to the files of a cache in `folder`, which must be empty."""

    def __init__(self, folder: Path, *, token_dtype: str, sources: tuple[Path, ...]) -> None:
        self._files = {name: _GrowingFile(folder / name) for name in FILES}
        self._dtype = np.dtype(token_dtype)
        self._source_numbers = {path: number for number, path in enumerate(sources)}
        self._tokens: list[NDArray[np.int64]] = []
        self._labels: list[NDArray[np.bool_]] = []
        self._document_ends: list[int] = []
        self._row_ends: list[int] = []
        self._origins: list[tuple[int, int]] = []
        self._num_buffered = 0
        self.num_tokens = 0
        self.num_documents = 0
        self.num_rows = 0
        self.num_label_tokens = 0
        self.longest_row = 0
        for name in (DOCUMENT_FILE, ROW_FILE):
            self._files[name].append(np.zeros(1, "<i8"))

    def add_row(self, row: PackedRow) -> None:
        """Append one row of one or more documents."""
        before = self.num_tokens
        for document in row:
            self._tokens.append(document.tokens)
            self._labels.append(document.labelled)
            self.num_tokens += len(document.tokens)
            self.num_label_tokens += int(document.labelled.sum())
            self.num_documents += 1
            self._document_ends.append(self.num_tokens)
            origin = document.origin
            self._origins.append((self._source_numbers[origin.path], origin.line))
        self.num_rows += 1
        self._row_ends.append(self.num_documents)
        self.longest_row = max(self.longest_row, self.num_tokens - before)
        self._num_buffered += self.num_tokens - before
        if self._num_buffered >= _BUFFER_TOKENS:
            self._flush(last=False)

    def finish(self) -> Mapping[str, FileSeal]:
        """Write what is left and make the files durable."""
        self._flush(last=True)
        return {name: file.finish() for name, file in self._files.items()}

    def close(self) -> None:
        """Close the files, finished or not."""
        for file in self._files.values():
            file.close()

    def _flush(self, *, last: bool) -> None:
        if self._tokens:
            self._files[TOKEN_FILE].append(np.concatenate(self._tokens).astype(self._dtype))
            self._files[DOCUMENT_FILE].append(np.asarray(self._document_ends, "<i8"))
            self._files[ROW_FILE].append(np.asarray(self._row_ends, "<i8"))
            self._files[ORIGIN_FILE].append(np.asarray(self._origins, "<i8"))
        if self._labels:
            labels = np.concatenate(self._labels)
            # Bits go out in whole bytes; up to seven wait for the next call.
            whole = len(labels) if last else len(labels) // 8 * 8
            self._files[LABEL_FILE].append(np.packbits(labels[:whole], bitorder="little"))
            self._labels = [labels[whole:].copy()]
        self._tokens, self._document_ends, self._row_ends, self._origins = [], [], [], []
        self._num_buffered = 0


def write_cache(folder: Path, fill: Callable[[Path], Manifest]) -> None:
    """Make a cache appear at `folder` in one step; `fill` writes its files into a new folder.

    What stood at `folder` is removed just before. If anything fails, nothing new is left behind.
    Callers hold the lock of `folder`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    building = folder.with_name(f".building-{folder.name}")
    with guard_storage(folder.parent):
        if building.exists():
            shutil.rmtree(building)
        building.mkdir()
    try:
        manifest = fill(building)
        with guard_storage(folder.parent):
            write_manifest(building, manifest)
            _sync(building / MANIFEST)
            _sync(building)
            if folder.exists():
                shutil.rmtree(folder)
            building.rename(folder)
            _sync(folder.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
