"""Rows of files as they would have been streamed: what the files say is not lost to what Spark takes it for.

A line of JSON is the record's value as it stands. Columns of CSV have the types that Spark finds in them, but a number
that is written as no number is (`007`), in the key or in a whole number's column, makes the column text.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)
from pyspark.sql.types import BinaryType, IntegralType, StringType, StructField, StructType

from services.compactor.settings import BackfillSettings
from services.compactor.tables import quoted
from shared.common.errors import ConfigError

CSV_DEFAULTS = {"header": "true", "inferSchema": "true"}
LINE, ROW, METADATA = "_penstock_line", "_penstock_row", "_metadata"


class FileRows(NamedTuple):
    """Rows with `_metadata`; the columns that the settings can name, and a row's value where they name none."""

    rows: DataFrame
    columns: StructType
    prefix: str
    whole: SparkColumn

    def column(self, name: str) -> SparkColumn:
        """One of `columns`."""
        return F.col(f"{self.prefix}{quoted(name)}")

    def as_bytes(self, name: str | None) -> SparkColumn:
        """A column as a record's key or value: bytes as they are, anything else as its text; null without a name."""
        if name is None:
            return F.lit(None).cast("binary")
        column = self.column(name)
        is_bytes = isinstance(self.columns[name].dataType, BinaryType)
        return column if is_bytes else column.cast("string").cast("binary")


def file_rows(spark: SparkSession, settings: BackfillSettings) -> FileRows:
    """The files of the settings; ConfigError where they do not have a column that is named."""
    assert settings.files is not None
    found = _lines(spark, settings) if settings.format == "json" else _table(spark, settings)
    named = (settings.key_column, settings.timestamp_column, settings.value_column, settings.order_column)
    if missing := [name for name in named if name is not None and name not in found.columns.fieldNames()]:
        there = ", ".join(found.columns.fieldNames())
        raise ConfigError(f"{settings.files} has no column {', '.join(missing)}; it has {there}")
    return found


def _lines(spark: SparkSession, settings: BackfillSettings) -> FileRows:
    """JSON: an object a line, unless the reader's options say that lines are something else."""
    options, files = settings.reader_options, settings.files
    schema = spark.read.options(**options).json(files).schema
    if options:
        return _whole_rows(spark.read.schema(schema).options(**options).json(files), schema, keep_nulls=False)
    lines = spark.read.text(files).filter(F.trim("value") != "")
    rows = lines.select(F.col("value").alias(LINE), F.from_json("value", schema).alias(ROW), METADATA)
    return FileRows(rows, schema, f"{ROW}.", F.col(LINE).cast("binary"))


def _table(spark: SparkSession, settings: BackfillSettings) -> FileRows:
    defaults = CSV_DEFAULTS if settings.format == "csv" else {}
    options = defaults | settings.reader_options
    reader = spark.read.format(settings.format).options(**options)
    rows = reader.load(settings.files)
    if settings.format == "csv" and options["inferSchema"] == "true":
        written = as_written(spark, settings, options, rows.schema)
        if written != rows.schema:
            rows = reader.schema(written).load(settings.files)
    return _whole_rows(rows, rows.schema, keep_nulls=True)


def _whole_rows(rows: DataFrame, columns: StructType, *, keep_nulls: bool) -> FileRows:
    """A row's value is the JSON of its fields; those of JSON have nulls for what is missing, which are left out."""
    fields = F.struct(*(F.col(quoted(name)) for name in columns.fieldNames()))
    options = {"ignoreNullFields": str(not keep_nulls).lower()}
    return FileRows(rows, columns, "", F.to_json(fields, options).cast("binary"))


def as_written(
    spark: SparkSession, settings: BackfillSettings, options: dict[str, str], inferred: StructType
) -> StructType:
    """The inferred schema, with text for columns in which a value would be written otherwise than it is.

    Such columns are the key's, and those of whole numbers.
    """
    watched = [
        field
        for field in inferred.fields
        if not isinstance(field.dataType, StringType)
        and (field.name == settings.key_column or isinstance(field.dataType, IntegralType))
    ]
    if not watched:
        return inferred
    texts = spark.read.format("csv").options(**options | {"inferSchema": "false"}).load(settings.files)
    columns = [F.col(quoted(field.name)) for field in watched]
    anew = [column.try_cast(field.dataType).cast("string") for column, field in zip(columns, watched, strict=True)]
    differs = texts.agg(*(F.max(column != other) for column, other in zip(columns, anew, strict=True))).first()
    assert differs is not None
    changed = {field.name for field, is_other in zip(watched, differs, strict=True) if is_other}
    fields = [StructField(f.name, StringType()) if f.name in changed else f for f in inferred.fields]
    return StructType(fields)
