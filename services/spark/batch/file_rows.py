"""Converts rows of files to the records that a producer would have sent.

Without `value_column`, a record's value is a whole row, as follows. Without reader options, a line of JSON is the
record's value, unchanged. With reader options, the value is new JSON, and each field has the type that Spark infers for
its column: if one value of a column is text, all are text. In the JSON made of a CSV row, a column is a number or a
boolean only if JSON writes each of its values as the file does, apart from trailing zeros and exponents (`1.10` becomes
1.1). If JSON writes one of its values differently (`007`, `+5`, `TRUE`), the whole column is text. Times and dates are
always text. For a record's time and for the order of rows, a column has the type that Spark infers. Hive's partition
folders (`carrier=UA`) add columns to those in the files. Such a column is always text: `01` for `month=01`.

The quotes of CSV are read as RFC 4180 defines them: a quote within quotes is doubled, and a backslash is a character
like any other. Files that escape quotes with backslashes, such as those of Spark's own writer, need the reader option
`escape=\\`.

A key or value column of a binary type is used unchanged. A column of any other type is written as text, and a struct,
an array or a map as JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, DataFrameReader, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    MapType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.spark_session import jvm, session_setting
from penstock.services.spark.spark_sql import quoted
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.time_text import TimeUnit

DIGEST_CHARACTERS = 16
# At least this many numbers are tried for each partition, to find one that Spark puts there.
DESTINATIONS_TRIED = 40
MS_OF = {"s": Decimal(1000), "ms": Decimal(1), "us": Decimal("0.001"), "ns": Decimal("0.000001")}
TEMPORAL = (DateType, TimestampType, TimestampNTZType)
DEFAULTS = {
    "csv": {"header": "true", "inferschema": "true"},
    "parquet": {"mergeschema": "true"},
}
PLAIN = (NumericType, BooleanType)
NESTED = (StructType, ArrayType, MapType)
MICROSECONDS = {
    "timestampFormat": f"yyyy-MM-dd'T'HH:mm:ss[.SSSSSS][{3 * 'X'}]",  # the zone: Z, or hours and minutes
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]",
}
"""The formats of times in a row's JSON. Spark's default format truncates times to ms."""
NANOSECONDS_ARE_NUMBERS = "spark.sql.legacy.parquet.nanosAsLong"
NANOSECONDS = "TIMESTAMP(NANOS"
UNMERGED = "CANNOT_MERGE_SCHEMAS"
TIME_OPTIONS = {"dateformat", "timestampformat", "timestampntzformat", "locale", "timezone"}
"""The reader options that define how a time is written."""
JSON_NUMBER = r"^(NaN|-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]+)?)$"
# Without the matches, a number consists of its significant digits.
NOT_SIGNIFICANT = r"^-?[0.]*|[0.]*([eE].*)?$|[.]"
LISTING_OPTIONS = {"pathglobfilter", "recursivefilelookup", "modifiedbefore", "modifiedafter"}
CHANGED_AT = "unix_micros(modificationTime) AS at"
LINE = "_penstock_line"
ROW = "_penstock_row"
METADATA = "_metadata"
# An error message shows at most this many characters of a line.
SHOWN_MAX = 200
FOLDERS_ARE_TYPED = "spark.sql.sources.partitionColumnTypeInference.enabled"


class FileRows(NamedTuple):
    """The rows of the files, with `_metadata`, and how to find in them the columns that the settings can name
    (`columns`).
    """

    rows: DataFrame
    columns: StructType
    prefix: str
    """Precedes the names of `columns` in `rows`, except for the names in `folders`."""
    whole: SparkColumn
    """A record's value if the settings name no value column."""
    found: StructType | None = None
    """The types that Spark infers for the columns; None if those in `columns` apply."""
    time_options: tuple[tuple[str, str], ...] = ()
    folders: frozenset[str] = frozenset()
    """The columns from the names of partition folders (`carrier=UA`)."""
    written: Mapping[str, SparkColumn] = {}
    """The text for a record's key or value, by column: the text in the file, or a nested column's JSON.

    Other columns are cast to text.
    """

    def column(self, name: str) -> SparkColumn:
        """Return one of `columns`."""
        return F.col(quoted(name) if name in self.folders else f"{self.prefix}{quoted(name)}")

    def typed(self, name: str) -> tuple[DataType, SparkColumn]:
        """Return a column's type and the column, for computing the records' times.

        If Spark infers another type for a text column, the column is converted to that type.
        """
        column = self.column(name)
        kind = self.columns[name].dataType
        found = kind if self.found is None else self.found[name].dataType
        if found == kind:
            return kind, column
        if isinstance(found, TEMPORAL):
            # Use the reader's own parser, with a separator and a quote that no time contains (`Jan 31, 2013`).
            options = {**dict(self.time_options), "sep": "\x01", "quote": ""}
            return found, F.from_csv(column, f"v {found.simpleString()}", options)["v"]
        return found, column.try_cast(found)

    def as_bytes(self, name: str | None) -> SparkColumn:
        """Return a column as a record's key or value: bytes unchanged, other types as text.

        If `name` is None, the column is null.
        """
        if name is None:
            return F.lit(None).cast("binary")
        column = self.written.get(name, self.column(name))
        is_bytes = isinstance(self.columns[name].dataType, BinaryType)
        return column if is_bytes else column.cast("string").cast("binary")


def file_rows(spark: SparkSession, settings: BatchSettings) -> FileRows:
    """Return the rows of the configured files. Raises ConfigError if the files lack a configured column."""
    # Spark would otherwise read `month=01` as the number 1.
    with session_setting(spark, FOLDERS_ARE_TYPED, "false"):
        found = _read_json_files(spark, settings) if settings.format == "json" else _read_table_files(spark, settings)
    named = (settings.key_column, settings.timestamp_column, settings.value_column)
    if missing := [name for name in named if name is not None and name not in found.columns.fieldNames()]:
        names = ", ".join(found.columns.fieldNames())
        raise ConfigError(f"{settings.files} has no column {', '.join(missing)}; it has {names}")
    return found


def fingerprint_of(spark: SparkSession, settings: BatchSettings, topic: str, partitions: int) -> str:
    """Return a digest of a batch's input.

    It changes with the files' paths, lengths and modification times, and with `topic`, `partitions`, `live_from` and
    the settings for reading the files.
    """
    # A task skips committed rows by their number. That is correct only if the same files yield the same rows in the
    # same order.
    found = _list_files(spark, settings, settings.reader_options).selectExpr("path", "length", CHANGED_AT).collect()
    files = sorted((row.path, row.length, row.at) for row in found)
    names = ("format", "reader_options", "key_column", "timestamp_column", "time_unit", "value_column", "live_from")
    read = {name: getattr(settings, name) for name in names} | {"topic": topic, "partitions": partitions}
    return hashlib.sha256(msgspec.json.encode([files, read], order="sorted")).hexdigest()[:DIGEST_CHARACTERS]


def partitioned_rows(spark: SparkSession, settings: BatchSettings, partitions: int) -> DataFrame:
    """Return the files' rows as (timestamp_ms, key, value), each in the partition that a producer would choose for its
    key. Rows without a key are in partition 0.

    A partition is ordered by time, path and position in the file. Raises ConfigError if the files lack a configured
    column or cannot be read as one table, or if `timestamp_column` cannot be a time.
    """
    found = file_rows(spark, settings)
    metadata = F.col(METADATA)
    kind, at = found.typed(settings.timestamp_column)
    at_ms = row_times(kind, at, settings.time_unit)
    if at_ms is None:
        column = f"{settings.timestamp_column!r} of {settings.files} is of type {kind.simpleString()}"
        raise ConfigError(f"timestamp_column: {column}, which is neither a time nor a number nor text")
    records = found.rows.select(
        at_ms.alias("timestamp_ms"),
        found.as_bytes(settings.key_column).alias("key"),
        (found.whole if settings.value_column is None else found.as_bytes(settings.value_column)).alias("value"),
        # Rows of the same time need an order, too: another attempt must number the rows alike.
        metadata["file_path"].alias("_path"),
        metadata["file_block_start"].alias("_block"),
        F.monotonically_increasing_id().alias("_row"),
    )
    schema = "timestamp_ms bigint, key binary, value binary, _path string, _block bigint, _row bigint, _to int"
    chosen = records.mapInArrow(with_row_destination(row_destinations(spark, partitions)), schema)
    ordered = chosen.repartition(partitions, "_to").sortWithinPartitions("timestamp_ms", "_path", "_block", "_row")
    return ordered.select("timestamp_ms", "key", "value")


def row_destinations(spark: SparkSession, partitions: int) -> list[int]:
    """Return, for each partition of the rows of files, a number that Spark's `repartition` puts into it."""
    found: dict[int, int] = {}
    tried = max(DESTINATIONS_TRIED * partitions, 1000)
    at = F.pmod(F.hash(F.col("id").cast("int")), F.lit(partitions)).alias("at")
    # `repartition` chooses a partition by Spark's hash of a column. So find, for each partition, a number whose hash
    # leads there.
    for row in spark.range(tried).select("id", at).groupBy("at").agg(F.min("id").alias("id")).collect():
        found[row["at"]] = row["id"]
    if missing := set(range(partitions)) - found.keys():
        raise ConfigError(f"files: no way to fill partitions {sorted(missing)} of {partitions} was found")
    return [found[p] for p in range(partitions)]


def with_row_destination(numbers: Sequence[int]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for mapInArrow that adds a column by which `repartition` moves each row to its partition.

    A producer's partitioner chooses the partition from the row's `key`; a row without a key belongs to partition 0.
    `numbers` is the result of `row_destinations`: the column's value for each partition.
    """

    def add_destination_column(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            # Compute the partition once for each distinct key.
            keys = batch.column("key").dictionary_encode()
            of = np.array([for_key(key, len(numbers)) for key in keys.dictionary.to_pylist()] or [0], np.int32)
            chosen = np.where(np.asarray(keys.is_valid()), of[np.asarray(keys.indices.fill_null(0))], 0)
            yield batch.append_column("_to", pa.array(np.array(numbers, np.int32)[chosen]))

    return add_destination_column


def _read_json_files(spark: SparkSession, settings: BatchSettings) -> FileRows:
    """Return the rows of JSON files: one object for each line, unless the reader's options define another layout."""
    options = settings.reader_options
    files = settings.files_read
    named = {settings.key_column, settings.value_column}
    # With options for the reader, a line is not always one object. Then a row's value is JSON made from its fields.
    if options:
        schema = spark.read.options(**options).json(files).schema
        is_exact = {f.name for f in schema.fields if f.name in named and isinstance(f.dataType, PLAIN)}
        read = StructType([StructField(f.name, StringType()) if f.name in is_exact else f for f in schema.fields])
        return _rows_as_json(spark.read.schema(read).options(**options).json(files), read, schema, keep_nulls=False)
    lines = spark.read.format("text").schema(f"{LINE} string").load(files).filter(F.trim(LINE) != "")
    schema = spark.read.json(files).schema
    folders = [name for name in lines.columns if name != LINE]
    in_lines = StructType([field for field in schema.fields if field.name not in folders])
    parsed = F.from_json(LINE, in_lines).alias(ROW)
    rows = lines.select(LINE, parsed, METADATA, *map(quoted, folders))
    texts = [StructField(f.name, StringType()) for f in in_lines if f.name in named and f.dataType != StringType()]
    # If a column has one fraction, Spark reads its whole numbers as fractions (`5.0`), which a producer would not send.
    written = {field.name: F.from_json(LINE, StructType([field]))[field.name] for field in texts}
    return FileRows(rows, schema, f"{ROW}.", F.col(LINE).cast("binary"), folders=frozenset(folders), written=written)


def _read_table_files(spark: SparkSession, settings: BatchSettings) -> FileRows:
    options = DEFAULTS.get(settings.format, {}) | settings.reader_options
    # By default, Spark's escape character is a backslash, and doubled quotes stay in the text.
    if settings.format == "csv":
        options.setdefault("escape", options.get("quote", '"'))
    # Spark reads CSV by position, under the names of one header. Files with another header would have their values in
    # the wrong columns.
    if settings.format == "csv" and options["header"].lower() == "true":
        require_one_header(spark, settings, options)
    reader = spark.read.format(settings.format).options(**options)
    rows = _load_rows(spark, settings, reader, options)
    if settings.format == "csv" and "mode" not in settings.reader_options:
        require_all_fields(spark, settings, options, rows.schema)
    found = _rows_as_json(rows, StructType([f for f in rows.schema if f.name != METADATA]), keep_nulls=True)
    if settings.format == "csv" and options["inferschema"].lower() == "true":
        written = as_written(spark, settings, options, rows.schema)
        if written != rows.schema:
            found = _rows_as_json(reader.schema(written).load(settings.files_read), written, keep_nulls=True)
            of_times = tuple((name, value) for name, value in options.items() if name in TIME_OPTIONS)
            return found._replace(found=rows.schema, time_options=of_times)
    return found


def _load_rows(
    spark: SparkSession, settings: BatchSettings, reader: DataFrameReader, options: dict[str, str]
) -> DataFrame:
    """Return the rows of the files.

    Spark does not read Parquet's nanosecond columns as times, so they are converted to microseconds.
    """
    try:
        # 1. Usually no column has nanoseconds, and no file's footer needs to be read.
        with session_setting(spark, NANOSECONDS_ARE_NUMBERS, "false"):
            return reader.load(settings.files_read)
    except (PySparkException, Py4JError) as e:
        if UNMERGED not in str(e) and NANOSECONDS not in str(e):
            raise
    # 2. Read such columns as numbers. The setting is not reset, since Spark evaluates it when the rows are read.
    spark.conf.set(NANOSECONDS_ARE_NUMBERS, "true")
    try:
        rows = reader.load(settings.files_read)
    except (PySparkException, Py4JError) as e:
        if UNMERGED not in str(e):
            raise
        raise ConfigError(f"{clash(spark, settings, options)}: write them with one type") from None
    of_nanoseconds = nanoseconds(spark, settings, options)
    columns = [_nanoseconds_as_timestamp(name, of_nanoseconds.get(name)).alias(name) for name in rows.columns]
    return rows.select(*columns, METADATA)


def _nanoseconds_as_timestamp(name: str, kind: str | None) -> SparkColumn:
    column = quoted(name)
    if kind is None:
        return F.col(column)
    # `pmod` is never negative, so times before 1970 are rounded down like all others.
    return F.timestamp_micros(F.expr(f"({column} - pmod({column}, 1000L)) div 1000")).cast(kind)


def nanoseconds(spark: SparkSession, settings: BatchSettings, options: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of Parquet files that are times in nanoseconds, with Spark's type for such a time.

    Raises ConfigError if a column has nanoseconds in one file and another type in another, or if it is nested in
    another column.
    """
    remedy = "write them in microseconds (pandas: coerce_timestamps='us')"
    java = jvm(spark)
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    seen: dict[str, tuple[str | None, str]] = {}
    for path in sorted(row.path for row in _list_files(spark, settings, options).select("path").collect()):
        footer = java.org.apache.parquet.hadoop.ParquetFileReader.readFooter(conf, java.org.apache.hadoop.fs.Path(path))
        for field in footer.getFileMetaData().getSchema().getFields():
            name = str(field.getName())
            is_nanoseconds = NANOSECONDS in str(field.toString())
            if is_nanoseconds and not field.isPrimitive():
                raise ConfigError(f"column {name} in {path} has times in nanoseconds within it: {remedy}")
            is_utc = is_nanoseconds and field.getLogicalTypeAnnotation().isAdjustedToUTC()
            kind = ("timestamp" if is_utc else "timestamp_ntz") if is_nanoseconds else None
            # A column of numbers is converted as a whole, so all files must have the same kind of time in it.
            before, where = seen.setdefault(name, (kind, path))
            if before != kind:
                files = f"{where} and {path}, and times in nanoseconds in one of them"
                raise ConfigError(f"column {name} has different types in {files}: {remedy}")
    return {name: kind for name, (kind, _) in seen.items() if kind is not None}


def _list_files(spark: SparkSession, settings: BatchSettings, options: Mapping[str, str]) -> DataFrame:
    """Return the list of the files: path, length and modificationTime. Their contents are not read."""
    listing = {name: value for name, value in options.items() if name in LISTING_OPTIONS}
    return spark.read.format("binaryFile").options(**listing).load(settings.files_read)


def require_one_header(spark: SparkSession, settings: BatchSettings, options: dict[str, str]) -> None:
    """Raises ConfigError if the headers of CSV files differ in their columns or in the columns' order.

    Compares only the first line of each header, read as UTF-8.
    """
    as_lines = {name: value for name, value in options.items() if name in {*LISTING_OPTIONS, "linesep"}}
    lines = spark.read.format("text").schema(f"{LINE} string").options(**as_lines).load(settings.files_read)
    is_line = (F.trim(LINE) != "") & (F.col(METADATA)["file_block_start"] == 0)
    if comment := options.get("comment"):
        is_line &= ~F.startswith(LINE, F.lit(comment))
    path = F.col(METADATA)["file_path"].alias("path")
    numbered = lines.filter(is_line).select(path, LINE, F.monotonically_increasing_id().alias("number"))
    heads = numbered.groupBy("path").agg(F.min_by(LINE, "number").alias("head"))
    reader = spark.read.options(**options | {"inferschema": "false"})
    first: Row | None = None
    for row in heads.groupBy("head").agg(F.min("path").alias("path")).orderBy("path").collect():
        columns = reader.csv(spark.sparkContext.parallelize([row.head], 1)).columns
        if first is None:
            first = row
            wanted = columns
        elif columns != wanted:
            raise ConfigError(
                f"{first.path} has the columns {', '.join(wanted)} and {row.path} has {', '.join(columns)}: CSV files "
                "are read by the positions of their columns; write them with one header, or as JSON or Parquet"
            )


def require_all_fields(
    spark: SparkSession, settings: BatchSettings, options: Mapping[str, str], columns: StructType
) -> None:
    """Raises ConfigError if a line of CSV has fewer fields than columns, or more, which Spark would drop."""
    texts = [StructField(field.name, StringType()) for field in columns if field.name != METADATA]
    read_options = {**options, "columnNameOfCorruptRecord": LINE, "mode": "PERMISSIVE"}
    reader = (
        spark.read.format("csv").options(**read_options).schema(StructType([*texts, StructField(LINE, StringType())]))
    )
    rows = reader.load(settings.files_read)
    # Select all columns: with fewer, Spark does not check the number of fields.
    wrong = rows.filter(F.col(LINE).isNotNull()).select("*", F.col(METADATA)["file_path"].alias("path")).first()
    if wrong is not None:
        raise ConfigError(
            f"{wrong.path} has a line with more or fewer fields than there are columns: {wrong[LINE][:SHOWN_MAX]!r}. "
            "A text with a comma must be quoted, and texts with line breaks need the reader option multiline=true. "
            "mode=PERMISSIVE cuts and fills such lines, mode=DROPMALFORMED leaves them out"
        )


def clash(spark: SparkSession, settings: BatchSettings, options: Mapping[str, str]) -> str:
    """Return a text for Parquet files whose columns cannot be merged.

    It names the first column that is found with two types, and a file of each type. Another column may be the one that
    cannot be merged. If no column is found, it names only the `files` setting.
    """
    seen: dict[str, tuple[DataType, str]] = {}
    for path in sorted(row.path for row in _list_files(spark, settings, options).select("path").collect()):
        for field in spark.read.parquet(path).schema.fields:
            kind, before = seen.setdefault(field.name, (field.dataType, path))
            if kind != field.dataType:
                types = kind.simpleString(), field.dataType.simpleString()
                return f"column {field.name} is {types[0]} in {before} and {types[1]} in {path}"
    return f"the columns of {settings.files} have types that cannot be merged"


def _rows_as_json(
    rows: DataFrame, columns: StructType, found: StructType | None = None, *, keep_nulls: bool
) -> FileRows:
    """Return rows whose value is the JSON of their fields.

    Spark reads a missing field of a JSON file as null. Without `keep_nulls`, nulls are left out of the JSON.

    `rows` were read with the types of `columns`. The JSON has the types of `found`, if it is given, otherwise those of
    `columns`.
    """
    fields = [
        F.col(quoted(a.name)) if a.dataType == b.dataType else F.col(quoted(a.name)).try_cast(b.dataType).alias(a.name)
        for a, b in zip(columns, found or columns, strict=True)
    ]
    # In JSON files a missing field is not a null. Tables have each field in each row.
    options = {"ignoreNullFields": str(not keep_nulls).lower(), **MICROSECONDS}
    nested = [field.name for field in columns if isinstance(field.dataType, NESTED)]
    written = {name: F.to_json(F.col(quoted(name)), options) for name in nested}
    return FileRows(rows, columns, "", F.to_json(F.struct(*fields), options).cast("binary"), found, written=written)


def as_written(
    spark: SparkSession, settings: BatchSettings, options: dict[str, str], inferred: StructType
) -> StructType:
    """Return the inferred schema, with text for times, dates and columns whose type would alter a value's text."""
    text = {field.name for field in inferred.fields if isinstance(field.dataType, TEMPORAL)}
    watched = [f for f in inferred.fields if f.name not in text and not isinstance(f.dataType, StringType)]
    if watched:
        # With a schema, Spark does not read the header once more.
        schema = StructType([StructField(field.name, StringType()) for field in inferred.fields])
        texts = spark.read.format("csv").options(**options).schema(schema).load(settings.files_read)
        named = {settings.key_column, settings.value_column}
        differs = (_type_alters_text(field, exactly=field.name in named) for field in watched)
        found = texts.agg(*(F.max(one) for one in differs)).first()
        assert found is not None
        text |= {field.name for field, differs in zip(watched, found, strict=True) if differs}
    fields = [StructField(f.name, StringType()) if f.name in text else f for f in inferred.fields]
    return StructType(fields)


def _type_alters_text(field: StructField, *, exactly: bool) -> SparkColumn:
    """Return a column that is true if the type inferred for the CSV column `field` alters the row's text.

    For a float or double, another JSON notation of the same number (`1.10` for 1.1) does not count, unless `exactly` is
    True.
    """
    written = F.col(quoted(field.name)).cast("string")
    kind = field.dataType
    if exactly or not isinstance(kind, FractionalType) or isinstance(kind, DecimalType):
        return ~written.eqNullSafe(written.try_cast(kind).cast("string"))
    # With the same digits, it is the same number in another notation. If the type rounds the number, or makes it
    # infinite or 0, the digits differ.
    digits, digits_of_type = (
        F.regexp_replace(text, NOT_SIGNIFICANT, "") for text in (written, written.try_cast(kind).cast("string"))
    )
    return ~written.rlike(JSON_NUMBER) | (digits != digits_of_type)


def row_times(kind: DataType, column: SparkColumn, unit: TimeUnit) -> SparkColumn | None:
    """Return a column as ms since the epoch, with -1 for a value that is not a time; None for a type that cannot be a
    time.

    A number, also as text, counts `unit`s since the epoch. Other text is an ISO 8601 time, by default in UTC. Fractions
    of a ms are rounded down.
    """
    if isinstance(kind, IntegralType) and unit == "ms":
        ms = column.cast("bigint")
    elif isinstance(kind, NumericType):
        ms = _number_as_ms(column, unit)
    elif isinstance(kind, StringType):
        ms = F.coalesce(_number_as_ms(F.trim(column), unit), F.unix_millis(F.try_to_timestamp(column)))
    elif isinstance(kind, DateType | TimestampType | TimestampNTZType):
        ms = F.unix_millis(column.cast("timestamp"))
    else:
        return None
    # A row without a time becomes a record without a time, which is sent to the DLQ.
    return F.coalesce(ms, F.lit(-1))


def _number_as_ms(column: SparkColumn, unit: TimeUnit) -> SparkColumn:
    return F.floor(column.try_cast("decimal(29,9)") * F.lit(MS_OF[unit])).try_cast("bigint")
