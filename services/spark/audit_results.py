"""What an audit holds the results topic to: each closed window once, as far as it can be told whose a record is.

A result does not say which store it is of. Where several stores write to one topic, or windows are not what it has,
published results are left out and named; so are records that are no window, which another node wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import tables
from penstock.services.spark.audit_checks import sampled
from penstock.services.spark.audit_part import Part
from penstock.shared.streams.changelog.format import StoreSchema

OPERATORS_OWN = "latest"  # kept beside a window's aggregations, and no result
_JSON_TYPES = {"int64": "BIGINT", "float64": "DOUBLE"}


def why_not(store: StoreSchema, stores: Sequence[StoreSchema]) -> str | None:
    """Why the published results of a store of these cannot be compared; None where they can."""
    if store.results is None:
        return "no topic has them in the form that the engine gives them"
    if store.emit != "on_close":
        return "the topic has updates, not closed sessions"
    if others := [other.name for other in stores if other.name != store.name and other.results == store.results]:
        return f"{store.results} has those of {', '.join(others)} too, and a result does not say which store it is of"
    return None


def published_and_wanted(
    topic: DataFrame,
    store: StoreSchema,
    closed: DataFrame,
    later: Callable[[], DataFrame | None],
    part: Part | None,
    sample: float,
) -> tuple[DataFrame, DataFrame, list[str]]:
    """What a results topic (READ_SCHEMA) has and should have, as `audit_checks.Inputs` has it; what is left out.

    `closed` has the stream's sessions with `changelog_offset`, and `later` gives those that were closed since.
    """
    not_compared = []
    typed = [a for a in store.aggregations if a.result in _JSON_TYPES and a.function != OPERATORS_OWN]
    columns = "".join(f", {tables.quoted(a.name)} {_JSON_TYPES[a.result]}" for a in typed)
    value = F.from_json(F.col("value").cast("string"), f"key STRING, start BIGINT, end BIGINT{columns}")
    names = [tables.quoted(a.name) for a in typed]
    bounds = ("v.key", F.col("v.start").alias("start_ms"), F.col("v.end").alias("end_ms"))
    given = topic.select(value.alias("v")).select(*bounds, *(f"v.{n}" for n in names)).persist()
    is_window = F.col("key").isNotNull() & F.col("start_ms").isNotNull() & F.col("end_ms").isNotNull()
    if others := given.filter(~is_window).count():
        not_compared.append(f"{others} records of {store.results} that are no window: another node's")
    given = given.filter(is_window)
    key = F.col("key").cast("string") if store.key == "string" else F.base64("key")
    results = [r for r, a in zip(tables.results(store), store.aggregations, strict=True) if a in typed]
    closed = closed.withColumn("sure", F.col("changelog_offset") >= 0)
    if not closed.filter(~F.col("sure")).isEmpty():
        not_compared.append("whether windows that a backfill closed were published: it does that on demand alone")
    if (since := later()) is not None:
        closed = closed.unionByName(since.withColumn("sure", F.lit(False)))
    wanted = closed.select(key.alias("key"), "start_ms", "end_ms", "sure", *results)
    if part is not None:
        given, wanted = given.filter(part.holds()), wanted.filter(part.holds())
    raw = F.col("key").cast("binary") if store.key == "string" else F.unbase64("key")
    return sampled(given, sample, raw), sampled(wanted, sample, raw), not_compared
