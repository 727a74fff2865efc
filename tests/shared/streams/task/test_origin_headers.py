"""Origins: the source record's coordinates that records behind a repartition topic carry."""

from __future__ import annotations

import msgspec
import pytest

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.common.records import ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.task import late_records
from penstock.shared.streams.task.late_records import OFFSET, PARTITION, TOPIC
from penstock.shared.streams.task.origin_headers import (
    KEY,
    KEY_BYTES_MAX,
    origin_headers,
    original_record,
    without_origin_headers,
)
from penstock.shared.streams.task.origin_headers import OFFSET as ORIGIN_OFFSET
from penstock.shared.streams.task.origin_headers import TOPIC as ORIGIN_TOPIC
from penstock.shared.testing.topology_test_driver import APPLICATION, TopologyTestDriver
from tests.consumed import as_consumed

TRACE = (("trace", b"a1"),)


def driver_of(times: int, columns_min: int = 100) -> TopologyTestDriver:
    """Sessions by a key that was changed so many times."""
    builder = StreamsBuilder()
    stream = builder.stream("orders")
    for i in range(times):
        stream = stream.key_by(lambda record: record.value["user"], name=f"by-{i}").repartition()
    stream.to("seen")
    stream.group_by_key().session_window(10).aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    return TopologyTestDriver(builder.build(), partition=3, columns_min=columns_min, errors=ErrorHandlers())


def pipe(driver: TopologyTestDriver, *times: int) -> None:
    for at in times:
        value = msgspec.json.encode({"user": "ann", "x": at})
        driver.pipe("orders", key=b"order-%d" % at, value=value, timestamp=at, headers=TRACE)


@pytest.mark.parametrize("times", [1, 2])
def test_a_late_record_names_its_source_record(times: int) -> None:
    """Behind one repartition topic or more it has the source's topic, partition, offset, raw key and headers."""
    driver = driver_of(times)
    pipe(driver, 100, 5)
    (late,) = driver.read("orders-late")
    headers = dict(late.headers)
    assert (headers[TOPIC], headers[PARTITION], headers[OFFSET]) == (b"orders", b"3", b"1")
    assert (late.key, late.headers[:1], without_origin_headers(late.headers)) == (b"order-5", TRACE, late.headers)
    assert driver.task.metrics.rejected_at["late"] == "orders-3@1"


@pytest.mark.parametrize("late_min", [1, 100])
def test_in_columns_too(late_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a repartition topic reports late records with the same origin, in columns or not."""
    monkeypatch.setattr(late_records, "COLUMNS_MIN", late_min)
    builder = StreamsBuilder()
    stream = builder.stream("orders").key_by(lambda record: record.value["user"], name="by-user")
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), partition=3, columns_min=1, commit_each=False, errors=ErrorHandlers())
    pipe(driver, 100, 5, 101, 6)
    driver.commit()
    driver.commit()
    late = driver.read("orders-late")
    coordinates = [[dict(record.headers)[name] for name in (TOPIC, PARTITION, OFFSET)] for record in late]
    assert coordinates == [[b"orders", b"3", b"1"], [b"orders", b"3", b"3"]]
    assert [record.key for record in late] == [b"order-5", b"order-6"]
    assert all(
        record.headers[:1] == TRACE and without_origin_headers(record.headers) == record.headers for record in late
    )
    assert driver.task.metrics.rejected_at["late"] == "orders-3@3"


def test_what_goes_on_has_the_users_headers_alone() -> None:
    """The headers of the repartition topic are of the application's own, and in no result."""
    driver = driver_of(2)
    pipe(driver, 5)
    assert [record.headers for record in driver.read("seen")] == [TRACE]


def test_a_dead_letter_can_be_replayed_and_found() -> None:
    """It names the repartition topic, to which it may be sent again, and in headers its source record."""
    driver = driver_of(1)
    driver.pipe("orders", key=b"order-1", value=b'{"user":"ann","x":"bad"}', timestamp=5, headers=TRACE)
    (dead,) = driver.read("orders-dlq")
    dead_letter = parse_dead_letter(as_consumed(dead))
    origin = dict(dead_letter.record.headers)
    assert (dead_letter.record.topic, dead_letter.record.key) == (f"{APPLICATION}-by-0-repartition", b"ann")
    assert (origin[ORIGIN_TOPIC], origin[ORIGIN_OFFSET], origin[KEY]) == (b"orders", b"0", b"order-1")


def test_a_users_topic_is_not_believed() -> None:
    """Headers of these names in a topic that is not the application's own are headers like any other."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    forged = origin_headers(ConsumerRecord("other", 9, 9, 0, b"x", None))
    for at in (100, 5):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at, headers=forged)
    (late,) = driver.read("in-late")
    assert (dict(late.headers)[TOPIC], dict(late.headers)[OFFSET], late.key) == (b"in", b"1", b"k")


@pytest.mark.parametrize(("key", "shown"), [(None, None), (b"k", b"k"), (b"k" * (KEY_BYTES_MAX + 1), b"new")])
def test_a_key_that_is_too_long_is_not_carried(key: bytes | None, shown: bytes | None) -> None:
    """The raw source key is restored, also a null key. If it is too long, the record keeps its new key."""
    source = ConsumerRecord("in", 1, 2, 5, key, b"v")
    again = ConsumerRecord("app-repartition", 0, 0, 5, b"new", b"v", origin_headers(source))
    assert original_record(again) == ConsumerRecord("in", 1, 2, 5, shown, b"v")
    plain = ConsumerRecord("app-repartition", 0, 0, 5, b"new", b"v", TRACE)
    assert original_record(plain) is plain
