"""Text, JSONL, Parquet and folders of them -> one token file, streaming: a piece of one document is in memory."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy.typing as npt

from echelon.data.chat_tokens import ChatTokenizer
from echelon.data.decompression import TextInput
from echelon.data.file_format import FOLDER_SUFFIXES, TextError, file_format
from echelon.data.parquet_records import ParquetRecords
from echelon.data.records import ChatRecord, JsonLines, Record, RecordFault, RecordFormat
from echelon.data.token_file import AnyPath, TokenFile, TokenWriter
from echelon.data.tokenizer import ByteTokenizer, Tokenizer
from echelon.input_file import MIB, InputFileError, os_reason

MAX_DOCUMENT_BYTES = 4096 * MIB
"""of a compressed text file, without its compression"""
MAX_FAULTS, CHECKED_AFTER_FAULT = 10, 1000
"""faults of one file to report, and records to check for more of them after the first"""
_BINARY_PROBE_BYTES = 1 << 16
"""bytes at the start of a file in which a NUL means that it is not text"""

Progress = Callable[[int, int], None]
"""Called with the bytes of the files read so far, and the bytes of all of them."""


def tokenize(
    paths: Sequence[AnyPath],
    output: AnyPath,
    *,
    tokenizer: Tokenizer | None = None,
    records: RecordFormat | None = None,
    progress: Progress | None = None,
) -> TokenFile:
    """Tokenise the data under `paths` into one token file, by default as bytes.

    Each text file is a document, and each record of JSONL and Parquet.
    """
    tokenizer, records = tokenizer or ByteTokenizer(), records or RecordFormat()
    files = text_files(paths)
    total, done = sum(file.stat().st_size for file in files), 0

    def report(position: int) -> None:
        if progress is not None:
            # The file may grow while it is read.
            progress(done + position, max(done + position, total))

    writer = TokenWriter(output, vocab_size=tokenizer.vocab_size, eos=tokenizer.eos, tokenizer=tokenizer.name)
    with writer, ExitStack() as stack:
        documents = _DocumentWriter(writer, tokenizer, records, stack)
        for path in files:
            try:
                done += _write_file(path, documents, report)
            except InputFileError as error:
                raise TextError(f"{error}; check data.path") from error
            except OSError as error:
                raise TextError(f"{path} cannot be read ({os_reason(error)}); check data.path") from error
    return TokenFile(output)


def text_files(paths: Sequence[AnyPath]) -> list[Path]:
    """Files as given; in directories every file with a suffix of data, in an order independent of the file system.

    Hidden files are skipped. A file that is reached twice counts once; weights make a source count more often.
    """
    files: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inside = find_files(path)
            if not inside:
                suffixes = " ".join(FOLDER_SUFFIXES[:6])
                raise TextError(
                    f"no text in the directory ({path}: no file ends in {suffixes} ...); list its files one by one"
                )
        elif path.is_file():
            inside = [path]
        else:
            raise TextError(f"no such file or directory ({path}); check data.path")
        for file in inside:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def find_files(
    folder: Path, *, suffixes: tuple[str, ...] = FOLDER_SUFFIXES, exclude: frozenset[str] = frozenset()
) -> list[Path]:
    """The files below a directory that end in one of the suffixes, without hidden names and those in `exclude`."""
    paths = []
    for root, folders, names in os.walk(folder):
        # In place, so that os.walk skips them: an installed torch alone has thousands of directories.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in exclude]
        paths += [Path(root, name) for name in names if not name.startswith(".") and name.lower().endswith(suffixes)]
    # Sorted by parts, not by text: the order of "a/b" and "a-b" would depend on the separator.
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(folder).parts)


class _DocumentWriter:
    """Tokenizes documents into a token file."""

    def __init__(self, writer: TokenWriter, tokenizer: Tokenizer, records: RecordFormat, stack: ExitStack) -> None:
        self.records, self._writer, self._tokenizer, self._stack = records, writer, tokenizer, stack
        self._chat: ChatTokenizer | None = None

    def write_text(self, text: BinaryIO, report: Callable[[], None] | None = None) -> None:
        self._writer.write_document(_reported(self._tokenizer.stream(text), report))

    def write_record(self, record: Record) -> None:
        if isinstance(record, ChatRecord):
            if self._chat is None:  # its template may need a process, which the first conversation starts
                renderer = self._stack.enter_context(self.records.chat_template.open())
                self._chat = ChatTokenizer(self._tokenizer, renderer, mask_prompts=self.records.train_on == "assistant")
            tokens, is_target = self._chat.encode(record)
            self._writer.write_document([tokens], is_target=is_target)
        elif not isinstance(record, RecordFault):
            self.write_text(io.BytesIO(record.text.encode()))


def _write_file(path: Path, documents: _DocumentWriter, report: Callable[[int], None]) -> int:
    """Write the documents of a file; returns its bytes."""
    kind = file_format(path)
    if kind == "text":
        with TextInput(path, max_bytes=MAX_DOCUMENT_BYTES) as file:
            if b"\0" in file.start(_BINARY_PROBE_BYTES):
                what = f"not a text file ({path}: it has NUL bytes)"
                raise TextError(f"{what}; give text, or a token file that tokenize wrote")
            documents.write_text(file.text, lambda: report(file.position))
            return file.position
    with (JsonLines if kind == "jsonl" else ParquetRecords)(path, documents.records) as records:
        iterator = iter(records)
        for record in iterator:
            if isinstance(record, RecordFault):
                _refuse_records(record, iterator)
            documents.write_record(record)
            report(records.position)
        return records.position


def _refuse_records(first: RecordFault, records: Iterator[Record]) -> NoReturn:
    """Raise a fault, with those of the records that follow it."""
    faults = [first]
    with suppress(InputFileError, TextError, OSError):  # the first fault comes first
        faults += (record for record in islice(records, CHECKED_AFTER_FAULT) if isinstance(record, RecordFault))
    more = f"\n... and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    raise TextError("\n".join(map(str, faults[:MAX_FAULTS])) + more)


def _reported(pieces: Iterable[npt.ArrayLike], report: Callable[[], None] | None) -> Iterator[npt.ArrayLike]:
    for piece in pieces:
        yield piece
        if report is not None:
            report()
