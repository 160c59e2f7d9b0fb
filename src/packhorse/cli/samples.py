"""A look at the first rows of some data: their format, and how long they are in tokens.

In: data files and a tokenizer's folder. Out: a `Sample`. Reads at most `MOST_ROWS` rows, spread
over the files, whatever the size of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from packhorse.data.formats import Example, RowFormat
    from packhorse.data.sources import Origin, SourceFile

MOST_ROWS: Final = 1000
_NO_LIMIT: Final = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the first rows look like; `lengths` are in tokens, sorted.

    `flows` says that the data is running text, which is cut to rows rather than truncated.
    """

    formats: tuple[RowFormat, ...]
    lengths: tuple[int, ...]
    flows: bool
    num_files: int
    size_bytes: int

    def length_of(self, share: float) -> int:
        """The length that a share of the rows does not exceed; 0 without rows."""
        if not self.lengths:
            return 0
        return self.lengths[min(len(self.lengths), ceil(share * len(self.lengths))) - 1]


def take_sample(entries: Sequence[str], tokenizer_folder: Path) -> Sample:
    """Read and tokenise the first rows.

    Raises:
        DataError: a file is missing, or a row fits no format.
        InputError: the tokenizer cannot be loaded.
    """
    from packhorse.data.encoding import Encoder
    from packhorse.data.sources import find_sources
    from packhorse.data.tokenizer import load_tokenizer

    sources = find_sources(entries)
    formats: dict[RowFormat, None] = {}
    rows = list(_read_examples(sources, formats))
    needs_tokenizer = set(formats) != {"tokens"}
    encoder = Encoder(
        tokenizer=load_tokenizer(tokenizer_folder) if needs_tokenizer else None,
        vocab_size=_NO_LIMIT,
        assistant_only=False,
    )
    return Sample(
        formats=tuple(formats),
        lengths=tuple(sorted(len(piece.tokens) for piece in encoder.encode(rows))),
        flows=all(source.path.suffix.lower() == ".txt" for source in sources),
        num_files=len(sources),
        size_bytes=sum(source.size_bytes for source in sources),
    )


def _read_examples(
    sources: Sequence[SourceFile], formats: dict[RowFormat, None]
) -> Iterator[tuple[Origin, Example]]:
    from packhorse.data.formats import Text, detect_format, parse_row
    from packhorse.data.sources import TextPart, read_rows

    each = max(1, MOST_ROWS // len(sources))
    for source in sources[:MOST_ROWS]:
        row_format: RowFormat | None = None
        for row in islice(read_rows(source), each):
            if isinstance(row, TextPart):
                formats["text"] = None
                yield row.origin, Text(text=row.text, starts=row.starts, ends=row.ends)
                continue
            row_format = row_format or detect_format(row.fields, row.origin)
            formats[row_format] = None
            yield row.origin, parse_row(row.fields, row_format, row.origin)
