"""The default corpus: the sources of Python's standard library, which need no download."""

import sysconfig
from pathlib import Path

from echelon.data.file_format import TextError
from echelon.data.token_cache import cached_token_file
from echelon.data.token_file import AnyPath
from echelon.data.tokenize import Progress, find_files
from echelon.data.tokenizer import ByteTokenizer, Tokenizer

DEFAULT_BYTES = 8_000_000
# Installed packages, and tables and tests that teach a model little.
_EXCLUDED_DIRS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})


def default_corpus(
    folder: AnyPath,
    *,
    max_bytes: int = DEFAULT_BYTES,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Path:
    """The token file of the default corpus, written if `folder` lacks it: full files, at most `max_bytes` of text."""
    files, tokenizer = stdlib_files(max_bytes), tokenizer or ByteTokenizer()
    return cached_token_file(files, folder, name="stdlib", tokenizer=tokenizer, progress=progress)


def stdlib_files(max_bytes: int = DEFAULT_BYTES) -> list[Path]:
    """The standard library's sources in sorted order, as many as fit."""
    library = Path(sysconfig.get_path("stdlib"))
    files, left = [], max_bytes
    for file in find_files(library, suffixes=(".py",), exclude=_EXCLUDED_DIRS):
        size = file.stat().st_size
        if 0 < size <= left:
            files.append(file)
            left -= size
    if not files:
        raise TextError(
            f"no default corpus (no source of at most {max_bytes} bytes in {library}); "
            "set data.path to a text file or folder"
        )
    return files
