"""Bytes that are not UTF-8. In: the decoder's error. Out: a `DataError` with file and line."""

from __future__ import annotations

import codecs
from pathlib import Path

from packhorse.errors import DataError


def make_encoding_error(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    """Say which byte of which line is wrong, and whether the file looks like UTF-16."""
    with path.open("rb") as file:
        wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    found = "it looks like UTF-16" if wide else f"byte 0x{error.object[error.start]:02x}"
    return DataError(
        f"{path} is not UTF-8: {found}",
        where=f"{path}:{line}",
        fix="save the file as UTF-8, or remove it if it is not text",
    )
