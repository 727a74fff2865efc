"""Tables, joins with tables, and stores of processors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.streams.changelog.store_schema import check_schema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.tables import RowValue
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.record import Record
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


class User(msgspec.Struct):
    """A row."""

    city: str


def pair(value: Any, row: Any) -> Any:
    return {"value": value, "city": None if row is None else row.city}


def driver_of(*, left: bool) -> TopologyTestDriver:
    builder = StreamsBuilder()
    clicks, users = builder.stream("clicks"), builder.table("users", User)
    (clicks.left_join(users, pair) if left else clicks.join(users, pair)).to("out")
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers())


def out(driver: TopologyTestDriver) -> list[Any]:
    return [msgspec.json.decode(record.value or b"null") for record in driver.read("out")]


@pytest.mark.parametrize("left", [False, True])
def test_a_stream_looks_up_the_row_of_its_key(left: bool) -> None:
    """A join uses the row as of its record. Without a row, a left join passes None and an inner join has no result."""
    driver = driver_of(left=left)
    driver.pipe("clicks", key=b"ann", value=b"1", timestamp=5)
    driver.pipe("users", key=b"ann", value=b'{"city":"Oslo"}', timestamp=6)
    driver.pipe("clicks", key=b"ann", value=b"2", timestamp=7)
    driver.crash()
    driver.restore()
    driver.pipe("clicks", key=b"ann", value=b"3", timestamp=8)
    driver.pipe("users", key=b"ann", value=None, timestamp=9)
    driver.pipe("clicks", key=b"ann", value=b"4", timestamp=10)
    found = [(row["value"], row["city"]) for row in out(driver)]
    lone = [(1, None)] if left else []
    assert found == [*lone, (2, "Oslo"), (3, "Oslo"), *([(4, None)] if left else [])]


def test_what_is_neither_key_nor_value_is_skipped() -> None:
    """A stream record without a key or value, and a table record without a key, are skipped and counted."""
    driver = driver_of(left=False)
    driver.pipe("clicks", key=None, value=b"1")
    driver.pipe("clicks", key=b"k", value=None)
    driver.pipe("users", key=None, value=b'{"city":"Oslo"}')
    assert (out(driver), driver.task.metrics.skipped_total, len(driver.task.stores["users"])) == ([], 3, 0)


def test_a_left_join_keeps_what_has_no_key() -> None:
    """A left join passes None for a record without a key. A record without a value is skipped."""
    driver = driver_of(left=True)
    driver.pipe("clicks", key=None, value=b"1")
    driver.pipe("clicks", key=None, value=None)
    assert (out(driver), driver.task.metrics.skipped_total) == ([{"value": 1, "city": None}], 1)


def test_a_row_that_cannot_be_read_is_a_dead_letter() -> None:
    """A table record that cannot be decoded becomes a dead letter, and the old row stays."""
    driver = driver_of(left=False)
    driver.pipe("users", key=b"k", value=b'{"city":"Oslo"}')
    driver.pipe("users", key=b"k", value=b'{"city":7}')
    driver.pipe("clicks", key=b"k", value=b"1", timestamp=1)
    assert (len(driver.read("users-dlq")), out(driver)) == (1, [{"value": 1, "city": "Oslo"}])


def test_changes_of_a_table_are_a_stream() -> None:
    """A table's stream has a record for each new row and each deletion."""
    builder = StreamsBuilder()
    builder.table("users", bytes, name="people").to_stream().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value in (b"a", b"b", None):
        driver.pipe("users", key=b"k", value=value)
    assert [record.value for record in driver.read("out")] == [b"a", b"b", None]
    assert driver.topology.output_topics() == ["out", "users-dlq"]


def test_a_table_rejects_state_of_another_topic() -> None:
    """A table rejects state that was written for another source topic."""

    def schemas(topic: str) -> Any:
        builder = StreamsBuilder()
        builder.table(topic, name="t")
        return builder.build().schemas()

    check_schema(schemas("a"), schemas("a"))
    with pytest.raises(SchemaMismatch, match=r"'a'.*'b'"):
        check_schema(schemas("a"), schemas("b"))


def test_a_processors_own_store() -> None:
    """A processor reads and writes its own store by key, also after a crash. A second store of the same name is
    rejected."""

    class Numbered(Processor):
        """Numbers each key's records."""

        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            self.store = context.store("numbers")

        def process(self, record: Record) -> None:
            number = (self.store.get(record.key) or 0) + 1
            self.store.put(record.key, number if number < 3 else None)
            self.context.forward(record._replace(value=number))

    builder = StreamsBuilder()
    builder.stream("in").process(Numbered, builder.add_store("numbers", int)).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for _ in range(5):
        driver.pipe("in", key=b"k", value=b"{}")
        driver.crash()
        driver.restore()
    assert out(driver) == [1, 2, 3, 1, 2]
    with pytest.raises(ConfigError, match="'numbers' is there already"):
        builder.add_store("numbers")


def test_a_rows_value_is_read_back_as_its_type() -> None:
    """A value is restored as its declared type, and bytes stay unchanged. The last value replaces earlier ones."""
    typed, raw = RowValue(User), RowValue(bytes)
    assert typed.from_columns(typed.to_columns(User("Oslo"))) == User("Oslo")
    assert raw.from_columns(raw.to_columns(b"\xff")) == b"\xff"
    assert typed.result(typed.merge(typed.initial(), typed.add(None, 1))) == typed.merge(1, None) == 1
