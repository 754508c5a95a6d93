import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echelon.data import RecordFormat, TextError, TokenFile, tokenize
from echelon.data.parquet_records import BATCH_ROWS, ParquetRecords
from echelon.data.records import Record, RecordFault, TextRecord

TEXTS = [f"text {number} " * (number % 7) for number in range(100)]


def read(path: Path, **format_: Any) -> list[Record]:
    with ParquetRecords(path, RecordFormat(**format_)) as records:
        return list(records)


def texts(path: Path, **format_: Any) -> list[str]:
    found = read(path, **format_)
    assert all(isinstance(record, TextRecord) for record in found), found
    return [record.text for record in found if isinstance(record, TextRecord)]


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_every_row_of_every_row_group(tmp_path: Path, compression: str, kind: pa.DataType) -> None:
    table = pa.table({"id": range(100), "text": pa.array(TEXTS).cast(kind)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=17, compression=compression)
    assert texts(tmp_path / "x.parquet") == TEXTS
    assert [record.where for record in read(tmp_path / "x.parquet")][98:] == [
        f"{tmp_path / 'x.parquet'}: row 99",
        f"{tmp_path / 'x.parquet'}: row 100",
    ]


def test_only_the_columns_of_records_are_read(tmp_path: Path) -> None:
    """The bytes of another column are destroyed, which none of its readers would survive."""
    noise = np.random.default_rng(0).integers(0, 256, (100, 200), np.uint8)
    table = pa.table({"noise": [row.tobytes() for row in noise], "text": TEXTS})
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    data = bytearray(path.read_bytes())
    start = column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    assert texts(path) == TEXTS
    with pytest.raises(TextError, match="is not a valid Parquet file"):
        tokenize([path], tmp_path / "x.tokens", records=RecordFormat(text_field="noise"))


def test_memory_is_bounded_by_a_few_rows(tmp_path: Path) -> None:
    """20,000 texts of 2 kB in one row group: neither the file nor the column is in memory."""
    rng = np.random.default_rng(0)
    column = ["".join(map(chr, rng.integers(97, 123, 20))) * 100 for _ in range(20_000)]
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet", use_dictionary=False, compression="none")
    del column
    allocated, longest = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    with ParquetRecords(tmp_path / "x.parquet", RecordFormat()) as records:
        for number, _ in enumerate(records):
            if number % 97 == 0:
                longest = max(longest, pa.total_allocated_bytes() - allocated)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert number == 19_999
    assert longest < 6_000_000
    assert peak < 6_000_000


def test_a_repeated_text_is_decoded_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """100,000 rows that share one text of 100 kB are a file of 100 kB, and 10 GB of text."""
    dictionary = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), ["a" * 100_000])
    pq.write_table(pa.table({"text": dictionary}), tmp_path / "x.parquet")
    before = pa.total_allocated_bytes()
    with ParquetRecords(tmp_path / "x.parquet", RecordFormat()) as records:
        for _, record in zip(range(100), records, strict=False):
            assert isinstance(record, TextRecord)
            assert pa.total_allocated_bytes() - before < 8 * BATCH_ROWS * 100_000


def test_faults_name_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a", None, "c"], "messages": pa.array([None] * 3, pa.list_(pa.string()))}), path)
    assert [isinstance(record, RecordFault) for record in read(path)] == [False, True, False]
    with pytest.raises(TextError, match=r'x.parquet: row 2: missing field "text" or "messages" \(fields: text, mess'):
        tokenize([path], tmp_path / "x.tokens")
    bad = pa.array([b"a", b"\xff\xfe", b"c"]).view(pa.string())
    pq.write_table(pa.table({"text": bad}), path)
    with pytest.raises(TextError, match=r"x.parquet: row 2: a text is not UTF-8 \(invalid start byte at byte 0\)"):
        tokenize([path], tmp_path / "x.tokens")
    pq.write_table(pa.table({"text": ["a" * 50, "b" * 51]}), path)
    monkeypatch.setattr("echelon.data.records.MAX_RECORD_BYTES", 50)
    with pytest.raises(TextError, match=r'x.parquet: row 2: field "text" is too long'):
        tokenize([path], tmp_path / "x.tokens")


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([1]), "is a number, not a text"),
        (pa.array([b"x"]), "is of type bytes, not a text"),
        (pa.array([["x"]]), "is a list, not a text"),
        (pa.array([{"a": 1}]), "is an object, not a text"),
    ],
)
def test_columns_of_other_types(tmp_path: Path, column: pa.Array, says: str) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
    with pytest.raises(TextError, match=f'x.parquet: row 1: field "text" {says}'):
        tokenize([tmp_path / "x.parquet"], tmp_path / "x.tokens")


def test_messages_of_other_types(tmp_path: Path) -> None:
    import datetime

    for messages, says in (
        ([{"role": "assistant", "content": "x", "when": datetime.date(2024, 1, 1)}], "a value that JSON has not"),
        ([{"role": "assistant", "content": b"x"}], 'has of type bytes as "content" of message 1'),
        ('[{"role": "assistant"}]', "is a text, not a list of messages"),
    ):
        pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "x.parquet")
        with pytest.raises(TextError, match=f'x.parquet: row 1: field "messages" .*{says}'):
            tokenize([tmp_path / "x.parquet"], tmp_path / "x.tokens")


def test_a_file_without_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"txt": ["a"], "id": [1]}), tmp_path / "x.parquet")
    with pytest.raises(TextError, match=r'^\S*x.parquet: missing field "text" or "messages" \(fields: txt, id\); set'):
        tokenize([tmp_path / "x.parquet"], tmp_path / "x.tokens")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") == []


def test_damaged_files_end_in_a_sentence(tmp_path: Path) -> None:
    """Flipped bits and truncations: an error of ours, or tokens; with page checksums, the right tokens."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=30, write_page_checksum=True)
    good = path.read_bytes()
    (tmp_path / "good.tokens").write_bytes(tokenize([path], tmp_path / "x.tokens").path.read_bytes())
    rng = np.random.default_rng(0)
    cases = [good[:end] for end in [0, 3, 4, 8, *rng.integers(9, len(good), 40).tolist()]]
    for place in rng.integers(0, len(good), 150).tolist():
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        cases.append(bytes(bad))
    refused = 0
    for case in cases:
        path.write_bytes(case)
        try:
            TokenFile(tokenize([path], tmp_path / "x.tokens").path)
        except TextError as error:
            assert "x.parquet" in str(error)  # noqa: PT017 - either is right
            refused += 1
    assert refused > 100


def test_foreign_files_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_text('{"text": "a"}')
    with pytest.raises(TextError, match=r"x.parquet is not a Parquet file \(it begins with b'.\"te'\); check"):
        tokenize([tmp_path / "x.parquet"], tmp_path / "x.tokens")
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"x" * 100)
    with pytest.raises(TextError, match=r"x.parquet is not a valid Parquet file \("):
        tokenize([tmp_path / "x.parquet"], tmp_path / "x.tokens")
    (tmp_path / "x.parquet.gz").write_bytes(b"x")
    with pytest.raises(TextError, match=r"is a compressed Parquet file, .*; decompress it"):
        tokenize([tmp_path / "x.parquet.gz"], tmp_path / "x.tokens")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TextError, match=r'x.parquet needs the pyarrow package; run pip install "echelon\[data\]"'):
        tokenize([tmp_path / "x.parquet"], tmp_path / "x.tokens")
