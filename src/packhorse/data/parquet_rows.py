"""Rows of a .parquet file. In: its path. Out: fields, row by row. Needs the extra `data`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packhorse.errors import DataError, InputError

_BATCH_ROWS: Final = 256


def read_parquet_rows(path: Path) -> Iterator[tuple[Mapping[str, object], int, int]]:
    """Stream (fields, number of the row from 1, rows in all).

    Raises:
        InputError: pyarrow is not installed.
        DataError: the file is no parquet file, or damaged.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")  # an optional extra without types
        parquet: Any = importlib.import_module("pyarrow.parquet")  # the same
    except ImportError as error:
        raise InputError(f"reading {path} needs pyarrow: pip install 'packhorse[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            num_rows = int(file.metadata.num_rows)
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield fields, number, num_rows
    except arrow.ArrowException as error:
        raise DataError(f"{path} is no readable parquet file: {error}", where=str(path)) from error
