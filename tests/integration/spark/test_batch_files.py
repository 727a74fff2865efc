"""Rows of files keep the content of the files."""

from __future__ import annotations

import csv
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.batch.file_rows import file_rows, fingerprint_of, partitioned_rows
from penstock.services.spark.batch.settings import BatchSettings
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.common.errors import ConfigError

NAMES = {"application": "visits", "lake": "lake", "topology": "t:t", "live_from": "latest"}


def records(spark: Any, file: Path, text: str, **more: Any) -> list[tuple[str | None, str]]:
    """Keys and values of a file with this text."""
    file.write_text(text)
    settings = BatchSettings.model_validate(NAMES | {"files": str(file), "timestamp_column": "ms"} | more)
    found = file_rows(spark, settings)
    rows = found.rows.select(found.as_bytes(settings.key_column).alias("key"), found.whole.alias("value")).collect()
    return [(None if row.key is None else row.key.decode(), row.value.decode()) for row in rows]


def test_a_line_of_json_is_the_value(spark: Any, tmp_path: Path) -> None:
    """A line is the value byte for byte: no field is added, and none is rewritten."""
    lines = ['{"who":"ann","ms":1}', '{"ms": 2, "x": 1.50, "who": "bob", "deep": {"a": null}}', "no JSON"]
    found = records(spark, tmp_path / "f.json", "\n".join([*lines, "", ""]), format="json", key_column="who")
    assert found == list(zip(["ann", "bob", None], lines, strict=True))


def test_lines_that_the_readers_options_change_are_rows(spark: Any, tmp_path: Path) -> None:
    """Objects of several lines have no line: their value is their fields."""
    text = '[{"who": "ann",\n "ms": 1}, {"who": "bob", "ms": 2, "x": 5}]'
    options = {"multiLine": "true"}
    found = records(spark, tmp_path / "f.json", text, format="json", key_column="who", reader_options=options)
    assert found == [("ann", '{"ms":1,"who":"ann"}'), ("bob", '{"ms":2,"who":"bob","x":5}')]


def test_a_key_of_json_is_its_text(spark: Any, tmp_path: Path) -> None:
    """A whole number stays one, in key and value, even if other rows have fractions. The key of an object is its
    JSON."""
    keys = ["5", "5.5", "12345678901", "true"]
    lines = [f'{{"who":{key},"ms":{i}}}' for i, key in enumerate(keys[:3])]
    found = records(spark, tmp_path / "f.json", "\n".join(lines), format="json", key_column="who")
    assert found == list(zip(keys[:3], lines, strict=True))
    options = {"multiLine": "true"}
    text = f"[{','.join(lines)}]"
    found = records(spark, tmp_path / "g.json", text, format="json", key_column="who", reader_options=options)
    assert [(key, json.loads(value)["who"]) for key, value in found] == [("5", 5), ("5.5", 5.5), (keys[2], 12345678901)]
    deep = '{"who":{"a":[1,"x"]},"ms":1}'
    assert records(spark, tmp_path / "h.json", deep, format="json", key_column="who") == [('{"a":[1,"x"]}', deep)]


def test_a_partition_folder_is_a_column_of_json_lines(spark: Any, tmp_path: Path) -> None:
    """A partition folder's value is a column: text as a key, parsed as a time. The line stays the value."""
    for name in ("value=007", "value=8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text('{"x":1}\n{"x":2}\n')
    given = {"files": str(tmp_path), "format": "json", "timestamp_column": "value", "key_column": "value"}
    found = partitioned_rows(spark, BatchSettings.model_validate(NAMES | given), 1)
    assert [(row.key, row.timestamp_ms, row.value) for row in found.collect()] == [
        (bytearray(key), at, bytearray(b'{"x":%d}' % x)) for key, at in ((b"007", 7), (b"8", 8)) for x in (1, 2)
    ]


@pytest.mark.parametrize("file_format", ["json", "csv", "parquet"])
def test_a_partition_folder_is_text_in_the_json_of_a_row(spark: Any, tmp_path: Path, file_format: str) -> None:
    """A partition folder's column is text as a key and in a row's JSON, even if all its values are numbers or dates."""
    for name in ("store=007/day=2024-01-01", "store=8/day=2024-01-02"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "a.json").write_text('{"x":"a"}\n')
        (folder / "a.csv").write_text("x\na\n")
        pyarrow.parquet.write_table(pa.table({"x": ["a"]}), folder / "a.parquet")
    given = {"files": str(tmp_path), "format": file_format, "timestamp_column": "day", "key_column": "store"}
    options = {"pathGlobFilter": f"*.{file_format}"}
    settings = BatchSettings.model_validate(NAMES | given | {"reader_options": options})
    found = partitioned_rows(spark, settings, 1).collect()
    assert [(row.key, row.timestamp_ms, json.loads(row.value)) for row in found] == [
        (b"007", 1704067200000, {"x": "a", "store": "007", "day": "2024-01-01"}),
        (b"8", 1704153600000, {"x": "a", "store": "8", "day": "2024-01-02"}),
    ]


def test_text_of_digits_stays_what_it_is(spark: Any, tmp_path: Path) -> None:
    """A CSV column with leading zeros stays text. A column of plain numbers is numeric."""
    text = "who,ms,zip,n,x\n007,1,01234,5,0.50\n8,2,56789,6,1.25\n"
    found = records(spark, tmp_path / "f.csv", text, format="csv", key_column="who")
    assert found == [
        ("007", '{"who":"007","ms":1,"zip":"01234","n":5,"x":0.5}'),
        ("8", '{"who":"8","ms":2,"zip":"56789","n":6,"x":1.25}'),
    ]


def test_a_key_that_is_written_as_a_number_is_one(spark: Any, tmp_path: Path) -> None:
    """A column of whole numbers keeps its type in the value, whether it is the key or not. A key or a
    value of another form is text."""
    assert records(spark, tmp_path / "a.csv", "who,ms\n7,1\n-8,2\n", format="csv", key_column="who") == [
        ("7", '{"who":7,"ms":1}'),
        ("-8", '{"who":-8,"ms":2}'),
    ]
    assert records(spark, tmp_path / "b.csv", "who,ms\n1.50,1\n", format="csv", key_column="who") == [
        ("1.50", '{"who":"1.50","ms":1}')
    ]
    given = {"files": str(tmp_path / "b.csv"), "format": "csv", "timestamp_column": "ms", "value_column": "who"}
    (row,) = partitioned_rows(spark, BatchSettings.model_validate(NAMES | given), 1).collect()
    assert row.value == b"1.50"


def test_text_that_looks_like_another_type_stays_text(spark: Any, tmp_path: Path) -> None:
    """Dates, times, signs, leading zeros, capitals and numbers that a double would round are kept. Quotes and
    backslashes are read as RFC 4180 defines it, also in a key.

    Other numbers and booleans in JSON's form get JSON's type.
    """
    columns = {
        "at": ("2013-01-01 05:00", "2013-01-02T06:30:00+02:00"),
        "day": ("2013-01-01", "2013-01-02"),
        "clock": ("05:00", "23:59"),
        "zero": ("007", "8"),
        "plus": ("+5", "6"),
        "point": (".5", "1.5"),
        "caps": ("TRUE", "false"),
        "long": ("12345678901234567", "0.5"),
        "huge": ("1e999", "1.0"),
        "tiny": ("1e-999", "1.0"),
        "fraction": ("0.1234567890123456789", "0.5"),
        "mixed": ("12345678901234567.5", "0.5"),
        "quote": ('"say ""hi"" now"', '"""C:\\dir\\"", he said"'),
        "slash": ('"C:\\dir\\"', "C:\\dir"),
    }
    numbers = {
        "power": ("1e5", "2"),
        "price": ("1.10", "-0.25"),
        "flag": ("true", "false"),
        "n": ("-5", "0"),
        "sum": ("0.30000000000000004", "-0.0"),
        "wide": ("1002003004005.00", "0.00100"),
        "gap": ("", "NaN"),
    }
    texts = columns | numbers
    rows = [",".join(texts[name][i] for name in texts) + f",{i}" for i in (0, 1)]
    text = "\n".join([",".join([*texts, "ms"]), *rows, ""])
    keys, values = zip(*records(spark, tmp_path / "f.csv", text, format="csv", key_column="quote"), strict=True)
    found = [json.loads(value) for value in values]
    written = list(csv.DictReader(text.splitlines()))
    assert [{name: row[name] for name in columns} for row in found] == [
        {name: row[name] for name in columns} for row in written
    ]
    assert keys == tuple(row["quote"] for row in written)
    assert [[row[name] for name in numbers] for row in found] == [
        [1e5, 1.1, True, -5, 0.30000000000000004, 1002003004005, None],
        [2, -0.25, False, 0, 0, 0.001, "NaN"],
    ]


def test_times_are_parsed_from_text_as_spark_parses_them(spark: Any, tmp_path: Path) -> None:
    """The reader's time format and quote are used. Text that cannot be parsed is no time."""
    file = tmp_path / "f.csv"
    file.write_text("""at,nth,said\n'Jan 31, 2013 05:00',+9,'it''s "hi"'\n'Feb 1, 2013 05:00',10,'b'\n""")
    options = {"timestampFormat": "MMM d, yyyy HH:mm", "quote": "'"}
    given = {"files": str(file), "format": "csv", "timestamp_column": "at"}
    found = file_rows(spark, BatchSettings.model_validate(NAMES | given | {"reader_options": options}))
    (_, at), (_, nth) = found.typed("at"), found.typed("nth")
    rows = found.rows.select(F.unix_millis(at).alias("ms"), nth.alias("nth"), found.whole.alias("value")).collect()
    assert [(row.ms, row.nth) for row in rows] == [(1359608400000, 9), (1359694800000, 10)]
    assert json.loads(rows[0].value) == {"at": "Jan 31, 2013 05:00", "nth": "+9", "said": 'it\'s "hi"'}


def test_parquet_files_may_have_columns_of_their_own(spark: Any, tmp_path: Path) -> None:
    """A column of only a later file is kept. Two incompatible types of a column raise an error that names the files."""
    pyarrow.parquet.write_table(pa.table({"who": ["ann"], "ms": [1]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pa.table({"who": ["bob"], "ms": [2], "x": [7]}), tmp_path / "b.parquet")
    names = NAMES | {"timestamp_column": "ms"}
    settings = BatchSettings.model_validate(names | {"files": str(tmp_path)})
    found = file_rows(spark, settings)
    values = sorted(row.value.decode() for row in found.rows.select(found.whole.alias("value")).collect())
    assert values == ['{"who":"ann","ms":1,"x":null}', '{"who":"bob","ms":2,"x":7}']
    pyarrow.parquet.write_table(pa.table({"who": ["eve"], "ms": [3.5]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigError, match=r"(?s)column ms.*bigint.*a\.parquet.*double.*c\.parquet"):
        file_rows(spark, settings)


def test_a_nested_column_is_a_key_or_value_as_json(spark: Any, tmp_path: Path) -> None:
    """The key or value is the JSON that the column has in the row's JSON. A null stays null."""
    at = datetime(2026, 1, 2, 3, 4, 5, 123456)
    columns = {
        "ms": [1, 2],
        "list": [[1, None], None],
        "struct": pa.array([{"at": at, "x": None}, None], pa.struct([("at", pa.timestamp("us")), ("x", pa.int64())])),
        "map": pa.array([[("a", True)], None], pa.map_(pa.string(), pa.bool_())),
    }
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text('[{"ms":1,\n"struct":{"at":"now","x":[{"n":1}]}},{"ms":2}]')
    parquet = {"files": str(tmp_path / "a.parquet")}
    of_json = {"files": str(tmp_path / "b.json"), "format": "json", "reader_options": {"multiLine": "true"}}
    struct = b'{"at":"2026-01-02T03:04:05.123456","x":null}'
    for files, column, expected in (
        (parquet, "list", b"[1,null]"),
        (parquet, "struct", struct),
        (parquet, "map", b'{"a":true}'),
        (of_json, "struct", b'{"at":"now","x":[{"n":1}]}'),
    ):
        named = NAMES | files | {"timestamp_column": "ms", "key_column": column, "value_column": column}
        rows = partitioned_rows(spark, BatchSettings.model_validate(named), 1).collect()
        assert [(row.key, row.value) for row in rows] == [(expected, expected), (None, None)]


def test_times_of_parquet_keep_their_microseconds(spark: Any, tmp_path: Path) -> None:
    """This includes times in nanoseconds, as pandas writes them, before and after 1970. Nanoseconds within a struct are
    rejected by name."""
    at = datetime(1969, 12, 31, 23, 59, 59, 123456)
    columns: dict[str, Any] = {"who": ["ann"]}
    for unit in ("us", "ns"):
        columns |= {unit: pa.array([at], pa.timestamp(unit)), f"{unit}z": pa.array([at], pa.timestamp(unit, "UTC"))}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    settings = BatchSettings.model_validate(NAMES | {"timestamp_column": "ns", "files": str(tmp_path)})
    (row,) = partitioned_rows(spark, settings, 1).collect()
    text = "1969-12-31T23:59:59.123456"
    assert json.loads(row.value) == {"who": "ann", "us": text, "usz": f"{text}Z", "ns": text, "nsz": f"{text}Z"}
    assert row.timestamp_ms == -877
    deep = pa.array([{"at": at}], pa.struct([("at", pa.timestamp("ns"))]))
    pyarrow.parquet.write_table(pa.table({"deep": deep}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"column deep.*b\.parquet.*nanoseconds"):
        file_rows(spark, settings)


def test_csv_files_with_different_headers_are_rejected(spark: Any, tmp_path: Path) -> None:
    """The error names both headers, because CSV columns are read by position. Quotes and empty files make no
    difference."""
    for name, text in (("a", "who,ms,x\nann,1,5\n"), ("b", '\n"who",ms,"x"\nbob,2,6\n'), ("c", "")):
        (tmp_path / f"{name}.csv").write_text(text)
    names = NAMES | {"timestamp_column": "ms", "format": "csv"}
    settings = BatchSettings.model_validate(names | {"files": str(tmp_path)})
    assert file_rows(spark, settings).rows.count() == 2
    (tmp_path / "d.csv").write_text("who,x,ms\nann,5,1\n")
    with pytest.raises(ConfigError, match=r"a\.csv.*who, ms, x.*d\.csv.*who, x, ms"):
        file_rows(spark, settings)


@pytest.mark.parametrize("header", ["true", "false"])
def test_csv_lines_of_another_width_are_rejected(spark: Any, tmp_path: Path, header: str) -> None:
    """Spark would cut `x, y` at its comma, and leave out the rest of a wider file without headers: not unasked."""
    (tmp_path / "day=1").mkdir()
    (tmp_path / "day=1" / "a.csv").write_text('who,ms,x\nann,1,"x, y"\n')
    key, at = ("who", "ms") if header == "true" else ("_c0", "_c1")
    names = NAMES | {"format": "csv", "files": str(tmp_path)}

    def read(**options: str) -> list[dict[str, Any]]:
        named = {**names, "timestamp_column": at, "reader_options": {"header": header} | options}
        found = file_rows(spark, BatchSettings.model_validate(named))
        return [json.loads(row.value) for row in found.rows.select(found.whole.alias("value")).collect()]

    assert [[row[key], str(row[at]), *list(row.values())[2:]] for row in read()][-1] == ["ann", "1", "x, y", "1"]
    for wrong in ("bob,2,x, y", "bob,2"):
        (tmp_path / "day=1" / "b.csv").write_text(f"who,ms,x\n{wrong}\n")
        with pytest.raises(ConfigError, match=rf"b\.csv.*'{wrong}'"):
            read()
    if header == "false":
        return  # the options below have no more to do with the header
    (tmp_path / "day=1" / "c.csv").write_text("who,ms,x\nbob,2,x, y\n")
    assert [[row[key], str(row[at])] for row in read(mode="PERMISSIVE")].count(["bob", "2"]) == 2
    assert "bob" not in str(read(Mode="DROPMALFORMED"))
    assert [row[key] for row in read(RECURSIVEFILELOOKUP="true", PathGlobFilter="a*")][-1:] == ["ann"]
    assert [row[at] for row in read(InferSchema="FALSE", PathGlobFilter="a*")][-1:] == ["1"]


def test_changed_files_change_the_fingerprint(spark: Any, tmp_path: Path) -> None:
    """The fingerprint depends on the names, sizes and times of the files, and on how rows become records."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("who,ms\nann,1\n")

    def state(files: str, **more: Any) -> str:
        given = NAMES | {"files": str(tmp_path / files), "format": "csv", **more}
        return fingerprint_of(spark, BatchSettings.model_validate(given), "t", 2)

    before = {files: state(files) for files in (".", "*.csv", "a.csv")}
    assert before == {files: state(files) for files in before}
    assert state(".", key_column="who") != before["."]
    os.utime(tmp_path / "b.csv", (1, 1))
    after = {files: state(files) for files in before}
    assert [before[files] == after[files] for files in before] == [False, False, True]
    (tmp_path / "b.csv").rename(tmp_path / "c.csv")
    assert state(".") not in (before["."], after["."])


def test_rows_are_in_their_keys_partitions_by_time(spark: Any, tmp_path: Path) -> None:
    """The partition is the one that a producer chooses for the key. Rows of equal time keep the order of the files."""
    rows = [{"who": f"k{i % 13}", "ms": i * 7 % 40, "i": i} for i in range(200)]
    for nth in (0, 1):
        lines = (json.dumps(row) for row in rows[nth * 100 : nth * 100 + 100])
        (tmp_path / f"{nth}.json").write_text("\n".join(lines))
    given = {"files": str(tmp_path), "format": "json", "timestamp_column": "ms", "key_column": "who"}
    found = partitioned_rows(spark, BatchSettings.model_validate(NAMES | given), 5)
    parts = found.rdd.map(lambda row: json.loads(row.value)).glom().collect()
    own = [[row for row in rows if for_key(row["who"].encode(), 5) == p] for p in range(5)]
    assert parts == [sorted(of, key=lambda row: (row["ms"], row["i"])) for of in own]
