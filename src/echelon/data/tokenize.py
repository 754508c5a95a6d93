"""Text files and folders -> one token file, streaming: one piece of one document is in memory at a time."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from echelon.data.token_file import AnyIntArray, AnyPath, TokenFile, TokenWriter
from echelon.data.tokenizer import ByteTokenizer, Tokenizer
from echelon.input_file import InputFileError, open_input, os_reason

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts"),
)

_BINARY_PROBE_BYTES = 1 << 16
"""bytes at the start of a file in which a NUL means that it is not text"""

Progress = Callable[[int, int], None]
"""Called with the bytes of text read so far, and the bytes of all of it."""


class TextError(ValueError):
    """Text that cannot be found or read."""


def tokenize(
    paths: Sequence[AnyPath], output: AnyPath, *, tokenizer: Tokenizer | None = None, progress: Progress | None = None
) -> TokenFile:
    """Tokenise the text under `paths` into one token file, each text file a document; by default as bytes."""
    tokenizer = tokenizer or ByteTokenizer()
    files = text_files(paths)
    total, done = sum(file.stat().st_size for file in files), 0
    with TokenWriter(output, vocab_size=tokenizer.vocab_size, eos=tokenizer.eos, tokenizer=tokenizer.name) as writer:
        for path in files:
            try:
                with open_input(path) as file:
                    _refuse_binary(file, path)
                    writer.write_document(_with_progress(tokenizer.stream(file), file, done, total, progress))
                    done += file.tell()
            except InputFileError as error:
                raise TextError(f"{error}; check data.path") from error
            except OSError as error:
                raise TextError(f"{path} cannot be read ({os_reason(error)}); check data.path") from error
    return TokenFile(output)


def text_files(paths: Sequence[AnyPath]) -> list[Path]:
    """Files as given; in directories every file with a text suffix, in an order independent of the file system.

    Hidden files are skipped. A file that is reached twice counts once; weights make a source count more often.
    """
    files: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inside = find_files(path)
            if not inside:
                raise TextError(
                    f"no text in the directory ({path}: no file ends in {' '.join(TEXT_SUFFIXES)}); "
                    "list its files one by one"
                )
        elif path.is_file():
            inside = [path]
        else:
            raise TextError(f"no such file or directory ({path}); check data.path")
        for file in inside:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def find_files(
    folder: Path, *, suffixes: tuple[str, ...] = TEXT_SUFFIXES, exclude: frozenset[str] = frozenset()
) -> list[Path]:
    """The files below a directory that end in one of the suffixes, without hidden names and those in `exclude`."""
    paths = []
    for root, folders, names in os.walk(folder):
        # In place, so that os.walk skips them: an installed torch alone has thousands of directories.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in exclude]
        paths += [Path(root, name) for name in names if not name.startswith(".") and name.lower().endswith(suffixes)]
    # Sorted by parts, not by text: the order of "a/b" and "a-b" would depend on the separator.
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(folder).parts)


def _refuse_binary(file: BinaryIO, path: Path) -> None:
    if b"\0" in file.read(_BINARY_PROBE_BYTES):
        raise TextError(f"not a text file ({path}: it has NUL bytes); give text, or a token file that tokenize wrote")
    file.seek(0)


def _with_progress(
    pieces: Iterator[AnyIntArray], file: BinaryIO, before: int, total: int, progress: Progress | None
) -> Iterator[AnyIntArray]:
    for piece in pieces:
        yield piece
        if progress is not None:
            done = before + file.tell()
            # The file may grow while it is read.
            progress(done, max(done, total))
