"""Global tables: one copy an instance, looked up by any key."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError, KafkaTimeout, LogTruncation
from penstock.shared.common.records import Columns, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.runtime.global_tables import GlobalTableRows, GlobalTables
from penstock.shared.testing.manual_clock import ManualClock
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.shared.clients.consumer.filled import filled


def rows() -> GlobalTableRows:
    builder = StreamsBuilder()
    builder.global_table("airports", int, name="a")
    return GlobalTableRows(builder._topology.global_tables["a"])


def test_the_last_value_wins_and_a_tombstone_deletes() -> None:
    """A row is the last value of its key, and a record without a value deletes it."""
    table = rows()
    for key, value in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"b", None), (b"c", None)):
        assert table.apply(key, value) is None
    assert (table.get("a"), table.get("b"), len(table), dict(table.items())) == (3, None, 1, {"a": 3})


def test_invalid_records_are_skipped() -> None:
    """A record without a key, with no text as key or with an ill value changes nothing."""
    table = rows()
    table.apply(b"a", b"1")
    errors = [table.apply(key, value) for key, value in ((None, b"1"), (b"\xff", b"1"), (b"a", b"{"))]
    assert [error is not None and str(error).startswith("airports: ") for error in errors] == [True] * 3
    assert repr(table) == "GlobalTableRows('a', 1 rows)"
    assert table.get("a") == 1


def test_any_error_of_a_deserializer_is_that_of_its_record() -> None:
    """A deserializer that raises another error than DataError does not end the worker either."""
    builder = StreamsBuilder()
    builder.global_table("airports", lambda _topic, data: int(data), name="a")
    table = GlobalTableRows(builder._topology.global_tables["a"])
    error = table.apply(b"a", b"x")
    assert str(error).startswith("airports: ValueError: invalid literal")
    assert len(table) == 0


async def test_a_turn_applies_a_whole_batch() -> None:
    """A running instance applies more records in a turn than a consumer returns by default."""
    builder = StreamsBuilder()
    builder.global_table("t", int)
    async with filled(0) as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        tables = GlobalTables(kafka, builder._topology, SYSTEM_CLOCK)
        await tables.load()
        async with Producer(kafka) as producer:
            await (await producer.send_many([ProducerRecord("t", b"1", b"%d" % i) for i in range(1_000)]))
        most = 0
        async with asyncio.timeout(20):
            while len(tables.rows["t"]) < 1_000:
                before = len(tables.rows["t"])
                await tables.poll()
                most = max(most, len(tables.rows["t"]) - before)
                await asyncio.sleep(0)
        await tables.close()
    assert most > (ConsumerSettings().max_poll_records or 0)


async def test_a_running_instance_reads_added_partitions() -> None:
    """Rows of partitions that a topic gets after the load come into the table without a restart."""
    builder = StreamsBuilder()
    builder.global_table("t", int)
    async with filled(0) as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, metadata_max_age_ms=20)
        tables = GlobalTables(kafka, builder._topology, SYSTEM_CLOCK)
        await tables.load()
        async with Admin(kafka) as admin, Producer(kafka) as producer:
            await admin.create_partitions({"t": 3})
            records = [ProducerRecord("t", b"1", b"%d" % i, partition=i) for i in range(3)]
            assert await (await producer.send_many(records)).first_error() is None
        async with asyncio.timeout(20):
            while len(tables.rows["t"]) < 3:
                await tables.poll()
                await asyncio.sleep(0)
        await tables.close()
    assert tables.rows["t"].position == {0: 1, 1: 1, 2: 1}


async def test_the_load_times_out_if_one_partition_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions beyond the ends at the start of a load are no progress: the load fails if the others do not move."""
    clock = ManualClock(0)

    class Stuck(Consumer[bytes, bytes]):
        """A consumer that gets no record of partition 0, and always more of the others."""

        polls = 0

        async def poll(self, timeout_ms: float, max_records: int | None = None) -> dict[TopicPartition, Columns]:
            self.polls += 1
            assert self.polls < 100, "the load waits without end"
            clock.advance(10_000)
            return {}

        async def position(self, tp: TopicPartition) -> int:
            return self.polls if tp.partition else 0

    monkeypatch.setattr("penstock.shared.streams.runtime.global_tables.Consumer", Stuck)
    builder = StreamsBuilder()
    builder.global_table("t", int)
    async with filled(3, partitions=2) as cluster:
        tables = GlobalTables(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), builder._topology, clock)
        with pytest.raises(KafkaTimeout, match="70000 ms"):
            await tables.load()
        await tables.close()


async def test_a_topic_that_has_lost_records_ends_the_worker() -> None:
    """If a global table's topic has lost records that were read, the table would keep their rows. So a poll fails."""
    builder = StreamsBuilder()
    builder.global_table("t", int)
    async with filled(0) as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka) as producer:
            for key in (b"a", b"b"):
                await (await producer.send("t", b"1", key=key))
            tables = GlobalTables(kafka, builder._topology, SYSTEM_CLOCK)
            await tables.load()
            cluster.lose_records(TopicPartition("t", 0), 1)
            await (await producer.send_many([ProducerRecord("t", b"2", b"%d" % i) for i in range(10)]))

        async def poll_until_grown() -> None:
            async with asyncio.timeout(20):
                while len(tables.rows["t"]) < 10:
                    await tables.poll()
                    await asyncio.sleep(0)

        with pytest.raises(LogTruncation, match="t-0 at offset 2"):
            await poll_until_grown()
        await tables.close()


@pytest.mark.parametrize("left", [False, True])
def test_a_stream_looks_up_a_key_of_its_own(left: bool) -> None:
    """The key function returns the row's key. Without a key or a row, only a left join forwards the record."""
    builder = StreamsBuilder()
    flights, airports = builder.stream("flights"), builder.global_table("airports")
    method = flights.left_join if left else flights.join
    method(airports, lambda flight, airport: [flight["n"], airport], key=lambda r: r.value.get("to")).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("airports", key=b"OSL", value=b'"Oslo"')
    for value in (b'{"n":1,"to":"OSL"}', b'{"n":2,"to":"EWR"}', b'{"n":3}'):
        driver.pipe("flights", key=None, value=value)
        driver.crash()
        driver.restore()
    found = [msgspec.json.decode(record.value or b"") for record in driver.read("out")]
    assert found == [[1, "Oslo"], *([[2, None], [3, None]] if left else [])]
    assert driver.task.metrics.skipped_total == 0
    assert driver.topology.describe().splitlines()[0] == "Global table: airports (topic: airports)"


@pytest.mark.parametrize("key_type", ["string", "bytes"])
def test_a_text_and_its_bytes_are_one_key(key_type: Any) -> None:
    """A row is found by text and by its UTF-8 bytes. Bytes that are not UTF-8 are a key without a row."""
    builder = StreamsBuilder()
    builder.global_table("airports", int, key=key_type, name="a")
    table = GlobalTableRows(builder._topology.global_tables["a"])
    table.apply("Tromsø".encode(), b"1")
    assert [table.get(key) for key in ("Tromsø", "Tromsø".encode(), "Oslo", b"\xff")] == [1, 1, None, None]


@pytest.mark.parametrize("left", [False, True])
def test_a_key_that_is_neither_text_nor_bytes_is_a_dead_letter(left: bool) -> None:
    """A key function that returns a number finds no row of any topic, so its record is a dead letter."""
    builder = StreamsBuilder()
    orders, users = builder.stream("orders"), builder.global_table("users")
    (orders.left_join if left else orders.join)(users, lambda _, user: user, key=lambda r: r.value["user"]).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("users", key=b"17", value=b'"Ann"')
    for value in (b'{"user":17}', b'{"user":"17"}'):
        driver.pipe("orders", key=None, value=value)
    assert [record.value for record in driver.read("out")] == [b'"Ann"']
    (dead_letter,) = driver.read("orders-dlq")
    assert b"'users'" in dict(dead_letter.headers)["penstock.dlq.message"]


def test_a_processor_reads_it_by_name() -> None:
    """A processor can name a global table beside its stores. Each name and each topic can be used once."""
    builder = StreamsBuilder()
    builder.global_table("t")
    with pytest.raises(ConfigError, match="store 't'"):
        builder.global_table("other", name="t")
    with pytest.raises(ConfigError, match="'t'"):
        builder.global_table("t", name="u")
    with pytest.raises(ConfigError, match="store 't'"):
        builder.add_store("t")


def test_a_joiner_may_change_its_arguments() -> None:
    """User code gets its own copy of a row, nested values included: the next record gets the row unchanged."""

    def seen(click: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        row["seen"].append(row["n"])
        row["n"] += 1
        return row

    builder = StreamsBuilder()
    builder.stream("clicks").join(builder.global_table("g"), seen, key=lambda r: r.key).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("g", key=b"a", value=b'{"n":1,"seen":[]}')
    for _ in range(2):
        driver.pipe("clicks", key=b"a", value=b"{}")
    assert [record.value for record in driver.read("out")] == [b'{"n":2,"seen":[1]}'] * 2
    ((_, row),) = driver.store("g").items()
    row["n"] = 9
    assert driver.store("g").get("a") == {"n": 1, "seen": []}
