"""The token cache: a folder of flat files, written once, mapped for reading.

    tokens.bin     uint16 or uint32, every token of every row, one row after another
    labels.bin     one bit a token, lowest first: 1 where the loss counts
    documents.bin  int64, num_documents + 1 places in tokens.bin
    rows.bin       int64, num_rows + 1 places in documents.bin
    origins.bin    int64, per document: number of its file, line in it
    manifest.json  kind, version, what it was made from, counts, size and digest of each file

All numbers are little-endian. A cache is opened only if every file has the size and digest that
the manifest gives; rows are read through the mapping, so memory is that of the rows read since the
last `release`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from packhorse.data.documents import DataSummary
from packhorse.data.sources import Origin
from packhorse.errors import DataError, FileFormatError

KIND: Final = "token-cache"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
TOKEN_FILE: Final = "tokens.bin"
LABEL_FILE: Final = "labels.bin"
DOCUMENT_FILE: Final = "documents.bin"
ROW_FILE: Final = "rows.bin"
ORIGIN_FILE: Final = "origins.bin"
FILES: Final = (TOKEN_FILE, LABEL_FILE, DOCUMENT_FILE, ROW_FILE, ORIGIN_FILE)
_HASH_BLOCK_BYTES: Final = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One row: its tokens, which carry loss, and where in it each document starts."""

    tokens: NDArray[np.int64]
    labelled: NDArray[np.bool_]
    document_starts: tuple[int, ...]
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSeal:
    """Size and digest of one file of a cache."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a cache says of itself.

    `fingerprint` stands for the inputs (files, tokenizer, options), `digest` for the content alone:
    it stays the same where the same data lies elsewhere.
    """

    fingerprint: str
    token_dtype: Literal["<u2", "<u4"]
    vocab_size: int
    max_length: int
    packing: bool
    pad_id: int
    sources: tuple[Path, ...]
    summary: DataSummary
    seals: Mapping[str, FileSeal]

    @property
    def digest(self) -> str:
        """Hash of everything a batch depends on."""
        content: list[object] = [self.token_dtype, self.pad_id, self.packing, self.max_length]
        content += [self.seals[name].digest for name in FILES if name != ORIGIN_FILE]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    kind: str
    version: int


class TokenCache:
    """A cache that was opened; its files stay mapped while it is in use."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._mappings = {name: _map_file(folder / name) for name in FILES}
        places = np.dtype("<i8")
        self._tokens = np.frombuffer(self._mappings[TOKEN_FILE], np.dtype(manifest.token_dtype))
        self._labels = np.frombuffer(self._mappings[LABEL_FILE], np.uint8)
        self._documents = np.frombuffer(self._mappings[DOCUMENT_FILE], places)
        self._rows = np.frombuffer(self._mappings[ROW_FILE], places)
        self._origins = np.frombuffer(self._mappings[ORIGIN_FILE], places)

    @property
    def num_rows(self) -> int:
        """Rows that batches are made of."""
        return self.manifest.summary.num_rows

    @property
    def summary(self) -> DataSummary:
        """What became of the data when the cache was made."""
        return self.manifest.summary

    def row(self, index: int) -> TokenRow:
        """Copy one row out of the mapping."""
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} is outside 0 .. {self.num_rows - 1}")
        first, last = int(self._rows[index]), int(self._rows[index + 1])
        places = self._documents[first : last + 1]
        start, end = int(places[0]), int(places[-1])
        bits = np.unpackbits(self._labels[start // 8 : (end + 7) // 8], bitorder="little")
        file_number, line = self._origins[2 * first : 2 * first + 2]
        return TokenRow(
            tokens=self._tokens[start:end].astype(np.int64),
            labelled=bits[start % 8 : start % 8 + end - start].astype(np.bool_),
            document_starts=tuple(int(place) - start for place in places[:-1]),
            origin=Origin(path=self.manifest.sources[int(file_number)], line=int(line)),
        )

    def release(self) -> None:
        """Hand back the memory of the pages read so far, which counts as this process's."""
        for mapping in self._mappings.values():
            mapping.madvise(mmap.MADV_DONTNEED)


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Rows are read in random order: reading ahead would only fill memory.
    mapping.madvise(mmap.MADV_RANDOM)
    return mapping


def open_cache(folder: Path) -> TokenCache:
    """Open a cache after checking size and digest of each of its files.

    Raises:
        FileFormatError: it is no cache, of a newer version, or damaged; names the file.
    """
    manifest = read_manifest(folder)
    for name in FILES:
        found = seal_file(folder / name)
        expected = manifest.seals.get(name)
        if expected is None:
            raise FileFormatError(
                f"the token cache is damaged: {MANIFEST} does not list {name}",
                where=str(folder / MANIFEST),
                fix=f"remove {folder}; it is made again from the data",
            )
        if found != expected:
            raise FileFormatError(
                f"the token cache is damaged: {name} has {found.size_bytes} bytes and digest "
                f"{found.digest}, not {expected.size_bytes} and {expected.digest}",
                where=str(folder / name),
                fix=f"remove {folder}; it is made again from the data",
            )
    return TokenCache(folder, manifest)


def seal_file(path: Path) -> FileSeal:
    """Read a file through and take its size and digest.

    Raises:
        FileFormatError: it cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=16)
    size_bytes = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK_BYTES):
                hasher.update(block)
                size_bytes += len(block)
    except OSError as error:
        raise FileFormatError(
            f"the token cache is damaged: {path.name} cannot be read ({error.strerror or error})",
            where=str(path),
            fix=f"remove {path.parent}; it is made again from the data",
        ) from error
    return FileSeal(size_bytes=size_bytes, digest=hasher.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; the caller makes it durable."""
    fields = TypeAdapter(Manifest).dump_python(manifest, mode="json")
    text = json.dumps({"kind": KIND, "version": VERSION, **fields}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="ascii")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a cache.

    Raises:
        FileFormatError: there is none, it is of a newer version, or damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
        head = TypeAdapter(_Head).validate_json(text)
        if head.kind != KIND:
            raise FileFormatError(f"{path} is of kind {head.kind!r}, not {KIND!r}", where=str(path))
        if head.version > VERSION:
            raise FileFormatError(
                f"{path} has version {head.version}; this Packhorse reads up to {VERSION}",
                where=str(path),
                fix="use a newer Packhorse, or remove the cache",
            )
        return TypeAdapter(Manifest).validate_json(text)
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise FileFormatError(
            f"the token cache is damaged: {MANIFEST} cannot be read ({reason})",
            where=str(path),
            fix=f"remove {folder}; it is made again from the data",
        ) from error


def choose_token_dtype(vocab_size: int) -> Literal["<u2", "<u4"]:
    """Pick the narrowest type that holds every token of a vocabulary.

    Raises:
        DataError: no token can be that large.
    """
    if not 1 <= vocab_size <= 2**32:
        raise DataError(f"a vocabulary of {vocab_size} tokens is outside 1 .. 2^32")
    return "<u2" if vocab_size <= 2**16 else "<u4"
