"""Records of Parquet files: the columns of a text and of conversations, read a few rows at a time.

Only these columns are read, row group by row group, and pyarrow decodes `BATCH_ROWS` rows of them at once, so memory is
bounded by that many texts and not by the file. Checksums of pages are compared where the file has them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from echelon.data.file_format import TextError, format_problem
from echelon.data.records import Record, RecordFault, RecordFormat, missing_fields, parse_record
from echelon.input_file import InputFileError, open_input

BATCH_ROWS = 8
"""few: a page of a few bytes may hold the same long text again and again"""
READ_BYTES = 1 << 20
"""of a column chunk that pyarrow reads at once"""
MAGIC = b"PAR1"


class ParquetRecords:
    """The records of a Parquet file."""

    def __init__(self, path: Path, records: RecordFormat) -> None:
        if problem := format_problem(path):
            raise InputFileError(path, problem)
        import pyarrow.parquet

        self._path, self._records, self._row, self._num_rows = path, records, 0, 0
        self._file = file = open_input(path)
        try:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise InputFileError(path, f"is not a Parquet file (it begins with {start!r})")
            file.seek(0, 2)
            self._num_bytes = file.tell()
            try:
                self._parquet = pyarrow.parquet.ParquetFile(
                    file, pre_buffer=False, buffer_size=READ_BYTES, page_checksum_verification=True
                )
                self._num_rows = self._parquet.metadata.num_rows
                names = self._parquet.schema_arrow.names
            except Exception as error:  # pyarrow raises classes of its own and of Python for what it cannot read
                raise self._corrupt(error) from error
            wanted = [name for name in (records.text_field, records.chat_field) if name]
            self._columns = [name for name in wanted if name in names]
            if not self._columns:
                raise TextError(f"{path}: {missing_fields(names, records)}")
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.close()
        self._file.close()

    @property
    def position(self) -> int:
        """Bytes of the file, in proportion to the rows that are read."""
        return self._num_bytes * self._row // max(1, self._num_rows)

    def __iter__(self) -> Iterator[Record]:
        for values in self._rows():
            self._row += 1
            where = f"{self._path}: row {self._row}"
            if isinstance(values, UnicodeDecodeError):
                yield RecordFault(where, f"a text is not UTF-8 ({values.reason} at byte {values.start})")
            else:
                yield parse_record(values, where, self._records)
        if self._row != self._num_rows:
            raise self._corrupt(f"it has {self._row} rows, and its footer names {self._num_rows}")

    def _rows(self) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
        try:
            for batch in self._parquet.iter_batches(BATCH_ROWS, columns=self._columns, use_threads=False):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for number in range(len(batch)):
                    # One row at a time becomes Python: a text is in memory twice, and not eight times more.
                    try:
                        yield {name: column[number].as_py() for name, column in columns.items()}
                    except UnicodeDecodeError as error:
                        yield error
        except Exception as error:
            raise self._corrupt(error) from error

    def _corrupt(self, error: object) -> InputFileError:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return InputFileError(self._path, f"is not a valid Parquet file ({reason})")
