"""From data files to a token cache: the one entry of this package before training.

In: files, a tokenizer, what the loss counts. Out: an opened cache, made now or found as it was.

    files -> rows -> examples -> pieces -> documents -> packed rows -> cache

Everything streams; memory does not grow with the data. A cache is kept under the fingerprint of its
inputs: paths, sizes and times of change of the files, the tokenizer's content, and the options. A
lock makes other processes on the folder wait for the one that writes, then use what it wrote.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from packhorse.data.cache import (
    VERSION,
    Manifest,
    TokenCache,
    choose_token_dtype,
    open_cache,
)
from packhorse.data.cache_writer import CacheWriter, guard_storage, write_cache
from packhorse.data.documents import DataSummary, Tally, make_documents
from packhorse.data.encoding import Encoder
from packhorse.data.formats import (
    DataFormat,
    Example,
    RowFormat,
    Text,
    detect_format,
    parse_row,
)
from packhorse.data.packing import lay_out_rows
from packhorse.data.sources import (
    FieldRow,
    Origin,
    SourceFile,
    TextPart,
    find_sources,
    read_rows,
)
from packhorse.data.tokenizer import Tokenizer
from packhorse.errors import DataError, FileFormatError

Progress = Callable[[int, int | None], None]

_MIN_LENGTH: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What decides how files become rows, besides the files and the tokenizer."""

    data_format: DataFormat
    vocab_size: int
    max_length: int
    packing: bool
    assistant_only_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """An opened cache, and how it came about.

    `because` says in words why it was made now; it is None when an earlier one was taken.
    """

    cache: TokenCache
    because: str | None

    @property
    def reused(self) -> bool:
        """Whether the cache was there already."""
        return self.because is None

    @property
    def summary(self) -> DataSummary:
        """What became of the data."""
        return self.cache.summary


def prepare_data(
    *,
    files: Sequence[str | Path],
    tokenizer: Tokenizer | None,
    cache_folder: Path,
    vocab_size: int,
    max_length: int,
    data_format: DataFormat = "auto",
    packing: bool = False,
    assistant_only_loss: bool = True,
    base_folder: Path | None = None,
    progress: Progress | None = None,
) -> PreparedData:
    """Tokenise the data into a cache below `cache_folder`, or find the one that is there.

    Args:
        files: files, folders and globs, relative to `base_folder` (else the current folder).
        tokenizer: may be None where all data is of format `tokens`.
        vocab_size: tokens in the model's embedding; one more is an error.
        max_length: most tokens in a row.
        packing: put several documents into a row.
        assistant_only_loss: False trains on every token of every format.
        progress: called with bytes read and bytes in all, from time to time.

    Raises:
        DataError: nothing to learn from, or a file, row or token is wrong; names file and line.
        InputError: an extra is missing, or a tokenizer is.
        StorageError: the cache cannot be written.
    """
    if max_length < _MIN_LENGTH:
        raise DataError(
            f"max_length is {max_length}; a row needs at least {_MIN_LENGTH} tokens",
            fix="the first token of a row is never predicted; give room for one that is",
        )
    options = DataOptions(
        data_format=data_format,
        vocab_size=vocab_size,
        max_length=max_length,
        packing=packing,
        assistant_only_loss=assistant_only_loss,
    )
    sources = find_sources(files, folder=base_folder)
    fingerprint = _make_fingerprint(sources, tokenizer, options)
    folder = cache_folder / f"tokens-{fingerprint[:16]}"
    with _lock_folder(folder):
        found, because = _find_cache(folder, fingerprint)
        if found is not None:
            return PreparedData(cache=found, because=None)

        def fill(building: Path) -> Manifest:
            return _fill_cache(building, sources, tokenizer, options, fingerprint, progress)

        write_cache(folder, fill)
        return PreparedData(cache=open_cache(folder), because=because)


def _make_fingerprint(
    sources: tuple[SourceFile, ...], tokenizer: Tokenizer | None, options: DataOptions
) -> str:
    content = {
        "version": VERSION,
        "files": [
            [str(source.path.resolve()), source.size_bytes, source.modified_ns]
            for source in sources
        ],
        "tokenizer": None if tokenizer is None else tokenizer.digest(),
        "options": asdict(options),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _lock_folder(folder: Path) -> Generator[None]:
    """Hold the only right to write `folder`; wait while another process has it."""
    with guard_storage(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock").open("a")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _find_cache(folder: Path, fingerprint: str) -> tuple[TokenCache | None, str]:
    if not folder.exists():
        return None, "there was none for these files, tokenizer and options"
    try:
        cache = open_cache(folder)
    except FileFormatError as error:
        return None, f"the one there could not be used: {error.what}"
    if cache.manifest.fingerprint != fingerprint:
        return None, "the one there was made from other inputs"
    return cache, ""


def _fill_cache(
    folder: Path,
    sources: tuple[SourceFile, ...],
    tokenizer: Tokenizer | None,
    options: DataOptions,
    fingerprint: str,
    progress: Progress | None,
) -> Manifest:
    token_dtype = choose_token_dtype(options.vocab_size)
    paths = tuple(source.path for source in sources)
    tally = Tally()
    formats: list[tuple[Path, RowFormat]] = []
    encoder = Encoder(
        tokenizer=tokenizer,
        vocab_size=options.vocab_size,
        assistant_only=options.assistant_only_loss,
    )
    examples = _read_examples(sources, options.data_format, formats, progress)
    documents = make_documents(encoder.encode(examples), max_length=options.max_length, tally=tally)
    writer = CacheWriter(folder, token_dtype=token_dtype, sources=paths)
    try:
        for row in lay_out_rows(documents, max_length=options.max_length, packing=options.packing):
            writer.add_row(row)
        if writer.num_rows == 0:
            raise _nothing_left(tally, options)
        seals = writer.finish()
    finally:
        writer.close()
    return Manifest(
        fingerprint=fingerprint,
        token_dtype=token_dtype,
        vocab_size=options.vocab_size,
        max_length=options.max_length,
        packing=options.packing,
        pad_id=_choose_pad(tokenizer, options.vocab_size),
        sources=paths,
        summary=DataSummary(
            formats=tuple(formats),
            num_read=tally.num_read,
            num_empty=tally.num_empty,
            num_without_labels=tally.num_without_labels,
            num_dropped=tally.num_dropped,
            num_truncated=tally.num_truncated,
            num_documents=writer.num_documents,
            num_rows=writer.num_rows,
            num_tokens=writer.num_tokens,
            num_label_tokens=writer.num_label_tokens,
            longest_row=writer.longest_row,
        ),
        seals=seals,
    )


def _read_examples(
    sources: tuple[SourceFile, ...],
    data_format: DataFormat,
    formats: list[tuple[Path, RowFormat]],
    progress: Progress | None,
) -> Iterator[tuple[Origin, Example]]:
    """Parse the rows of all files; each file's format goes to `formats` at its first row."""
    total_bytes = sum(source.size_bytes for source in sources)
    before_bytes = 0
    for source in sources:
        row_format: RowFormat | None = None
        for row in read_rows(source):
            if row_format is None:
                row_format = _choose_format(row, data_format)
                formats.append((source.path, row_format))
            yield row.origin, _parse_example(row, row_format)
            if progress is not None:
                progress(before_bytes + row.read_bytes, total_bytes)
        before_bytes += source.size_bytes


def _choose_format(row: TextPart | FieldRow, data_format: DataFormat) -> RowFormat:
    match row:
        case TextPart():
            if data_format not in ("auto", "text"):
                raise DataError(
                    f"{row.origin.path} is plain text, but data_format is {data_format}",
                    fix="set data_format: auto, or give .jsonl, .json or .parquet files",
                )
            return "text"
        case FieldRow():
            if data_format == "auto":
                return detect_format(row.fields, row.origin)
            return data_format


def _parse_example(row: TextPart | FieldRow, row_format: RowFormat) -> Example:
    match row:
        case TextPart():
            return Text(text=row.text, starts=row.starts, ends=row.ends)
        case FieldRow():
            return parse_row(row.fields, row_format, row.origin)


def _choose_pad(tokenizer: Tokenizer | None, vocab_size: int) -> int:
    """Choose any token: padding is never learnt, and nothing before it sees it."""
    pad_id = None if tokenizer is None else tokenizer.pad_id
    return pad_id if pad_id is not None and pad_id < vocab_size else 0


def _nothing_left(tally: Tally, options: DataOptions) -> DataError:
    fix = "check the files with packhorse data --show 3"
    if tally.num_dropped:
        fix = f"raise max_length ({options.max_length}), which cuts off all that could be learnt"
    elif tally.num_without_labels:
        fix = "the chats need turns of the assistant with text, or set assistant_only_loss: false"
    return DataError(
        "no row of the data has a token to learn from",
        where=f"{tally.num_read} read: {tally.num_empty} empty, {tally.num_without_labels} without "
        f"labels, {tally.num_dropped} with all labels beyond max_length",
        fix=fix,
    )
