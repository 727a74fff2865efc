"""What a backfill that goes on after a crash finds in topics already, as Spark compares it."""

from __future__ import annotations

from typing import Any

from penstock.services.spark.backfill_outputs import not_there
from penstock.services.spark.replay import OUT_SQL
from penstock.shared.clients.consumer.dead_letters import MESSAGE

Output = tuple[str, int, bytes, bytes | None, str]
"""Topic, time, key, value, and what a header says."""


def test_what_a_topic_has_is_not_written_again(spark: Any) -> None:
    """Each record as often as it is missing, in its order; a dead letter is the same at another time with another
    message, a result is not."""
    given: list[Output] = [
        ("out", 5, b"k", b"v", ""),
        ("out", 5, b"k", b"v", ""),
        ("late", 5, b"k", b"v", "0:17"),
        ("out", 6, b"k", b"v", ""),
        ("late", 5, b"k", b"v", "0:18"),
        ("out", 5, b"k", None, ""),
        ("dlq", 1, b"k", b"v", "0:19"),
        ("out", 4, b"k", b"v", ""),
    ]

    def frame(outputs: list[Output], partition: int | None, message: bytes) -> Any:
        rows = [
            (
                partition,
                None,
                at,
                key,
                value,
                topic,
                [("place", place.encode()), (MESSAGE, message)] if place else [],
                None,
            )
            for topic, at, key, value, place in outputs
        ]
        return spark.createDataFrame(rows, OUT_SQL)

    def missing(there: list[Output]) -> list[Output]:
        rows = not_there(frame(given, None, b"1"), frame(there, 3, b"2"), ["late", "dlq"]).collect()
        places = (next((h.value.decode() for h in row.headers), "") for row in rows)
        return [
            (row.topic, row.timestamp_ms, bytes(row.key), None if row.value is None else bytes(row.value), place)
            for row, place in zip(rows, places, strict=True)
        ]

    assert missing([]) == given
    assert missing(given[::-1]) == []
    there = [given[0], given[2], ("dlq", 9, b"k", b"v", "0:19"), ("out", 7, b"k", b"v", ""), ("out", 5, b"x", b"v", "")]
    assert missing(there) == [given[1], *given[3:6], given[7]]
