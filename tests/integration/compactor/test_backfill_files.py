"""Rows of files keep what the files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.compactor.backfill_files import file_rows
from services.compactor.settings import BackfillSettings


def records(spark: Any, file: Path, text: str, **more: Any) -> list[tuple[str | None, str]]:
    """Keys and values of a file with this text."""
    file.write_text(text)
    settings = BackfillSettings(
        application="visits", lake="lake", topology="t:t", files=str(file), timestamp_column="ms", **more
    )
    found = file_rows(spark, settings)
    rows = found.rows.select(found.as_bytes(settings.key_column).alias("key"), found.whole.alias("value")).collect()
    return [(None if row.key is None else row.key.decode(), row.value.decode()) for row in rows]


def test_a_line_of_json_is_the_value(spark: Any, tmp_path: Path) -> None:
    """What a line does not say its value does not either, and nothing of it is written anew."""
    lines = ['{"who":"ann","ms":1}', '{"ms": 2, "x": 1.50, "who": "bob", "deep": {"a": null}}', "no JSON"]
    found = records(spark, tmp_path / "f.json", "\n".join([*lines, "", ""]), format="json", key_column="who")
    assert found == list(zip(["ann", "bob", None], lines, strict=True))


def test_lines_that_the_readers_options_change_are_rows(spark: Any, tmp_path: Path) -> None:
    """Objects of several lines have no line: their value is their fields."""
    text = '[{"who": "ann",\n "ms": 1}, {"who": "bob", "ms": 2, "x": 5}]'
    options = {"multiLine": "true"}
    found = records(spark, tmp_path / "f.json", text, format="json", key_column="who", reader_options=options)
    assert found == [("ann", '{"ms":1,"who":"ann"}'), ("bob", '{"ms":2,"who":"bob","x":5}')]


def test_text_of_digits_stays_what_it_is(spark: Any, tmp_path: Path) -> None:
    """A key of `007` is no 7, a zip code no number; numbers that are written as such are numbers."""
    text = "who,ms,zip,n,x\n007,1,01234,5,0.50\n8,2,56789,6,1.25\n"
    found = records(spark, tmp_path / "f.csv", text, format="csv", key_column="who")
    assert found == [
        ("007", '{"who":"007","ms":1,"zip":"01234","n":5,"x":0.5}'),
        ("8", '{"who":"8","ms":2,"zip":"56789","n":6,"x":1.25}'),
    ]


def test_a_key_that_is_written_as_a_number_is_one(spark: Any, tmp_path: Path) -> None:
    """A column of whole numbers keeps its type in the value, as key or not; a key of another form does not."""
    assert records(spark, tmp_path / "a.csv", "who,ms\n7,1\n-8,2\n", format="csv", key_column="who") == [
        ("7", '{"who":7,"ms":1}'),
        ("-8", '{"who":-8,"ms":2}'),
    ]
    assert records(spark, tmp_path / "b.csv", "who,ms\n1.50,1\n", format="csv", key_column="who") == [
        ("1.50", '{"who":"1.50","ms":1}')
    ]
