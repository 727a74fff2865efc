"""Columns of files as times, by Spark's own casts."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.batch.file_rows import row_times
from penstock.shared.common.time_text import TimeUnit

MS = 1357002000000
NUMBERS = ("bigint", "double", "decimal(20,3)", "string")
TEXTS = {
    "2013-01-01T01:00:00Z": MS,
    "2013-01-01 02:00:00.5+01:00": MS + 500,
    "2013-01-01 01:00:00": MS,
    " 1357002000000 ": MS,
    "1357002000000.9": MS,
    "2013-13-01": -1,
    "99999999999999999999": -1,
    "1e400": -1,
    "NaN": -1,
    "soon": -1,
    "": -1,
    None: -1,
}


def in_ms(spark: Any, type_: str, values: list[str | None], unit: TimeUnit = "ms") -> list[int]:
    """The texts, cast to a type, as `times` has them."""
    rows = spark.createDataFrame([(i, value) for i, value in enumerate(values)], "i int, text string")
    typed = rows.select("i", F.col("text").cast(type_).alias("t"))
    column = row_times(typed.schema["t"].dataType, F.col("t"), unit)
    assert column is not None
    return [row.ms for row in typed.select("i", column.alias("ms")).orderBy("i").collect()]


@pytest.mark.parametrize("type_", NUMBERS)
def test_numbers_have_the_configured_unit(spark: Any, type_: str) -> None:
    """A number is in ms, however it is stored, unless a unit is given. A missing number is -1, not the epoch."""
    assert in_ms(spark, type_, [str(MS), None]) == [MS, -1]
    assert in_ms(spark, type_, [str(MS // 1000)], "s") == [MS]
    assert in_ms(spark, type_, [str(MS * 1000)], "us") == [MS]


def test_text_is_a_number_or_a_time_or_none(spark: Any) -> None:
    """Text that is no time does not end the job: its record has no time."""
    assert dict(zip(TEXTS, in_ms(spark, "string", list(TEXTS)), strict=True)) == TEXTS


def test_times_of_their_own_types(spark: Any) -> None:
    """Timestamps with and without a zone, and dates, are times in UTC. A double that is not a time has no time, and a
    boolean column has none."""
    for type_ in ("timestamp", "timestamp_ntz"):
        assert in_ms(spark, type_, ["2013-01-01 01:00:00.5", None], "s") == [MS + 500, -1]
    assert in_ms(spark, "date", ["2013-01-01"]) == [MS - 3_600_000]
    assert in_ms(spark, "double", ["NaN", "Infinity", "1e300"]) == [-1, -1, -1]
    boolean = spark.createDataFrame([(True,)], "t boolean")
    assert row_times(boolean.schema["t"].dataType, F.col("t"), "ms") is None
