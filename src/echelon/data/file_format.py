"""Formats of data files by the suffixes of their names: text, JSONL and Parquet, and what is compressed."""

import importlib.util
from pathlib import Path, PurePath
from typing import Literal

from echelon.data.decompression import COMPRESSIONS, DATA_EXTRA, missing_decoder

FileFormat = Literal["text", "jsonl", "parquet"]

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts"),
)
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json-lines", ".jsonlines")
PARQUET_SUFFIXES = (".parquet",)
FOLDER_SUFFIXES = (
    *TEXT_SUFFIXES,
    *JSONL_SUFFIXES,
    *(suffix + compressed for suffix in (*TEXT_SUFFIXES, *JSONL_SUFFIXES) for compressed in COMPRESSIONS),
    *PARQUET_SUFFIXES,
)
"""of the files that are read in a directory"""


class TextError(ValueError):
    """Text that cannot be found or read."""


def file_format(path: PurePath) -> FileFormat:
    """The format of a file: text, unless its name says JSONL or Parquet."""
    suffix = _inner_suffix(path)
    return "jsonl" if suffix in JSONL_SUFFIXES else "parquet" if suffix in PARQUET_SUFFIXES else "text"


def may_hold_records(path: PurePath) -> bool:
    """Whether a path of `data.path` names records, or is no file, and may be a directory with records in it."""
    return file_format(path) != "text" or not Path(path).is_file()


def format_problem(path: Path) -> str:
    """Return why a file of this name cannot be read here, as the end of a sentence; empty if it can."""
    if file_format(path) != "parquet":
        return missing_decoder(path)
    if path.suffix.lower() in COMPRESSIONS:
        return "is a compressed Parquet file, and Parquet compresses its columns itself; decompress it"
    if importlib.util.find_spec("pyarrow") is None:
        return f"needs the pyarrow package; {DATA_EXTRA}"
    return ""


def _inner_suffix(path: PurePath) -> str:
    """The suffix under that of a compression, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
