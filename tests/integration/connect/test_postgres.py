"""The Postgres sink and source connectors on a real Postgres, with the fake cluster as Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import RetriableError
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.connectors.postgres import sink
from penstock.shared.connect.connectors.postgres.database import transaction
from penstock.shared.connect.connectors.postgres.sink import PostgresSinkConnector, PostgresSinkTask
from penstock.shared.connect.connectors.postgres.sink_offsets import OffsetTable
from penstock.shared.connect.connectors.postgres.source import PostgresSourceConnector, PostgresSourceTask
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.runtime.states import ConnectorTaskId
from tests import virtual_time
from tests.integration.connect.postgres import is_installed, server
from tests.shared.connect.connectors import sink_context
from tests.shared.connect.connectors.sink_context import A, B
from tests.shared.connect.harness import TP, Running, running

asyncpg = pytest.importorskip("asyncpg")
pytestmark = pytest.mark.skipif(
    not is_installed(), reason="no Postgres: initdb, pg_ctl and postgres must be on the PATH"
)

JSON = "org.apache.kafka.connect.json.JsonConverter"
PLAIN = {
    "key_converter": JSON,
    "key_converter_schemas_enable": "false",
    "value_converter": JSON,
    "value_converter_schemas_enable": "false",
}
UPSERT = {**PLAIN, "topics": "t", "insert_mode": "upsert", "pk_mode": "record_key", "auto_create": "true"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as found_url:
        yield found_url


@pytest.fixture
async def db(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    for row in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        await connection.execute(f'DROP TABLE "{row["tablename"]}"')
    yield connection
    await connection.close()


class NoOffsets:
    """An offset reader without stored offsets."""

    async def offset(self, partition: Any) -> None:
        return None

    async def offsets(self, partitions: Any) -> list[None]:
        return [None for _ in partitions]


class Context:
    """The context of a source task, without a worker."""

    configs: Mapping[str, str] = {}
    offset_storage_reader = NoOffsets()
    transaction_context = None
    files = AllowedFiles()


async def produce(run: Running, *pairs: tuple[Any, Any]) -> None:
    """Send records with JSON keys and values to topic t; a value of None is a tombstone."""
    async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
        for key, value in pairs:
            data = None if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
            await producer.send("t", data, key=None if key is None else json.dumps(key).encode())


async def rows_of(db: Any, query: str) -> list[tuple[Any, ...]]:
    try:
        return [tuple(row) for row in await db.fetch(query)]
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError):
        return []


async def until_rows(run: Running, db: Any, query: str, expected: list[tuple[Any, ...]]) -> None:
    rows: list[tuple[Any, ...]] = []
    for _ in range(3000):
        rows = await rows_of(db, query)
        if rows == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError((rows, run.listener.events, run.listener.traces))


async def test_rows_are_upserted_and_deleted_by_key(url: str, db: Any) -> None:
    """The sink creates the table, keeps the last value of each key as its row, and deletes the row on a tombstone."""
    async with running() as run:
        await produce(
            run,
            ({"id": 1}, {"name": "ann", "n": 1, "tags": ["a"]}),
            ({"id": 2}, {"name": "bob", "n": 2, "tags": []}),
            ({"id": 1}, {"name": "ann", "n": 3, "tags": None}),
            ({"id": 2}, None),
        )
        await run.run(PostgresSinkConnector, connection_url=f"jdbc:{url}", delete_enabled="true", **UPSERT)
        await until_rows(run, db, "SELECT id, name, n, tags FROM t", [(1, "ann", 3, None)])
        types = await db.fetch("SELECT column_name, data_type FROM information_schema.columns WHERE table_name='t'")
        assert {row[0]: row[1] for row in types} == {"id": "bigint", "name": "text", "n": "bigint", "tags": "jsonb"}


async def test_auto_evolve_adds_missing_columns(url: str, db: Any) -> None:
    """`auto.evolve` adds missing columns; without it the task fails and the error names the column."""
    async with running() as run:
        await run.run(PostgresSinkConnector, connection_url=url, auto_evolve="true", **UPSERT)
        await produce(run, ({"id": 1}, {"a": 1}), ({"id": 2}, {"a": 2, "b": "x"}))
        await until_rows(run, db, "SELECT id, a, b FROM t ORDER BY id", [(1, 1, None), (2, 2, "x")])
    async with running() as run:
        id = await run.run(PostgresSinkConnector, connection_url=url, **UPSERT)
        await produce(run, ({"id": 3}, {"a": 1, "c": 1}))
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "column c, and auto.evolve is false (records from t-0@0 on)" in run.listener.traces[0]


@pytest.mark.parametrize("evolve", ["true", "false"])
async def test_a_tombstone_adds_no_column(url: str, db: Any, evolve: str) -> None:
    """A tombstone whose key names a column that the table lacks is an error of its record alone."""
    await db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    settings = {"insert.mode": "upsert", "pk.mode": "record_key", "delete.enabled": "true", "auto.evolve": evolve}
    await task.start({"name": "c", "connection.url": url, **settings})
    keys = [{"id": 1}, {"account_id": 2}, {"id": 2, "account_id": 2}, {"id": 2}]
    try:
        await task.put([SinkRecord("t", 0, None, key, None, None, kafka_offset=n) for n, key in enumerate(keys)])
        assert [offset for _, offset in reporter.reported] == [1, 2]
        assert "no column account_id" in reporter.errors[0]
        assert await db.fetch("SELECT * FROM t") == []
        assert await db.fetch("SELECT FROM pg_attribute WHERE attname = 'account_id'") == []
    finally:
        await task.stop()


async def test_rows_are_inserted_and_updated(url: str, db: Any) -> None:
    """`insert` appends rows with Kafka's coordinates as columns; `update` changes existing rows and adds none."""
    async with running() as run:
        settings = {**UPSERT, "insert_mode": "insert", "pk_mode": "kafka"}
        await produce(run, (None, {"v": "x"}), (None, {"v": "y"}))
        await run.run(PostgresSinkConnector, connection_url=url, **settings)
        query = "SELECT __connect_topic, __connect_partition, __connect_offset, v FROM t ORDER BY 3"
        await until_rows(run, db, query, [("t", 0, 0, "x"), ("t", 0, 1, "y")])
    await db.execute("DROP TABLE t; CREATE TABLE t (id integer PRIMARY KEY, v text, at timestamptz)")
    await db.execute("INSERT INTO t VALUES (1, 'old', NULL)")
    async with running() as run:
        settings = {**UPSERT, "insert_mode": "update", "pk_mode": "record_value", "pk_fields": "id"}
        at = "2024-01-02T03:04:05+00:00"
        await produce(run, (None, {"id": 1, "v": "new", "at": at}), (None, {"id": 2, "v": "none", "at": at}))
        await run.run(PostgresSinkConnector, connection_url=url, **settings)
        await until_rows(run, db, "SELECT id, v, extract(epoch from at)::int FROM t", [(1, "new", 1704164645)])


@pytest.mark.parametrize("mode", ["upsert", "update"])
async def test_keys_that_are_equal_in_their_column_are_one_row(url: str, db: Any, mode: str) -> None:
    """If keys differ in the records but become equal in their columns, the last record of a batch is written. A
    tombstone deletes the row of such a key. Rows of different sizes keep their order.
    """
    await db.execute("CREATE TABLE t (at timestamptz, price numeric(10,2), v text, PRIMARY KEY (at, price))")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    settings = {"insert.mode": mode, "pk.mode": "record_key", "delete.enabled": "true"}
    await task.start({"name": "c", "connection.url": url, **settings})
    noon = ["2024-01-01T12:00:00+00:00", "2024-01-01T13:00:00+01:00"]
    keys = [{"at": noon[n % 2], "price": n // 2 % 50 + n % 3 / 1000} for n in range(1000)]
    values = [f"{n} ".ljust(n * 37 % 1900) for n in range(1000)]
    try:
        if mode == "update":
            await db.execute("INSERT INTO t SELECT '2024-01-01 12:00Z', price FROM generate_series(0, 49) AS price")
        await task.put([SinkRecord("t", 0, None, keys[n], None, {"v": values[n]}, kafka_offset=n) for n in range(1000)])
        latest = [(price, values[901 + 2 * price]) for price in range(50)]
        assert await rows_of(db, "SELECT price::integer, v FROM t ORDER BY 1") == latest
        await task.put([SinkRecord("t", 0, None, keys[n], None, None, kafka_offset=1000 + n) for n in range(1, 1000)])
        assert await rows_of(db, "SELECT v FROM t") == []
        assert reporter.reported == []
    finally:
        await task.stop()


async def test_invalid_records_go_to_the_dlq(url: str, db: Any) -> None:
    """Under `errors.tolerance=all` invalid records go to the DLQ and all others are written."""
    await db.execute("CREATE TABLE t (id integer PRIMARY KEY, n integer CHECK (n < 100))")
    async with running() as run:
        settings = {**UPSERT, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": "dlq"}
        settings |= {"errors_deadletterqueue_topic_replication_factor": "1"}
        await produce(run, *[({"id": n}, {"n": n}) for n in range(98, 103)], ({"id": "x"}, {"n": 1}))
        await run.run(PostgresSinkConnector, connection_url=url, **settings)
        await until_rows(run, db, "SELECT id FROM t ORDER BY id", [(98,), (99,)])
        await run.until(lambda: len(run.cluster.records("dlq")) == 4)
        assert [record.key for record in run.cluster.records("dlq")][-1] == b'{"id": "x"}'
        await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(6))


async def test_fractions_are_not_truncated(url: str, db: Any) -> None:
    """A value that is not a whole number is reported if its column has integers, also in a domain or an array."""
    await db.execute("CREATE DOMAIN quantity AS integer")
    await db.execute("CREATE TABLE t (id integer, small smallint, large bigint, q quantity, list integer[])")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url})
    values: list[Any] = [{"small": 1.5}, {"large": 1.5}, {"q": 1.5}, {"list": [1, 1.5]}, {"small": 1 << 15}]
    values += [{"small": 2.0, "large": -2, "q": 2.0, "list": [2.0, 2]}, {"id": None, "list": None}]
    try:
        given = [
            SinkRecord("t", 0, None, None, None, {"id": n, **value}, kafka_offset=n) for n, value in enumerate(values)
        ]
        await task.put(given)
        assert await rows_of(db, "SELECT * FROM t") == [(5, 2, -2, 2, [2, 2]), (None, None, None, None, None)]
        assert [offset for _, offset in reporter.reported] == [0, 1, 2, 3, 4]
    finally:
        await task.stop()
        await db.execute("DROP TABLE t; DROP DOMAIN quantity")


@pytest.mark.parametrize("mode", ["insert", "upsert"])
async def test_a_domain_is_written_as_its_base_type(url: str, db: Any, mode: str) -> None:
    """Values of a domain have the form of its base type. A value that the domain's constraint rejects is reported."""
    await db.execute("CREATE DOMAIN amount AS numeric(9,2) CHECK (VALUE > 0); CREATE DOMAIN price AS amount")
    await db.execute(
        "CREATE DOMAIN doc AS jsonb; CREATE DOMAIN code AS varchar(3); CREATE DOMAIN moment AS timestamptz"
    )
    await db.execute("CREATE TABLE t (id amount PRIMARY KEY, p price, d doc, c code, at moment)")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url, "pk.mode": "record_key", "insert.mode": mode})
    good = {"p": 1.5, "d": {"a": 1}, "c": 7, "at": 0}
    values = [good, {**good, "p": -1}, {**good, "c": "long"}]
    try:
        given = [
            SinkRecord("t", 0, None, {"id": n + 1.251}, None, value, kafka_offset=n) for n, value in enumerate(values)
        ]
        await task.put(given)
        query = "SELECT id::text, p::text, d::text, c, extract(epoch from at)::int FROM t"
        assert await rows_of(db, query) == [("1.25", "1.50", '{"a": 1}', "7", 0)]
        assert reporter.reported == [(TP, 1), (TP, 2)]
    finally:
        await task.stop()
        await db.execute("DROP TABLE t; DROP DOMAIN price, amount, doc, code, moment")


async def test_keys_that_a_columns_collation_makes_equal_are_one_row(url: str, db: Any) -> None:
    """Records of one batch whose keys are equal in the collation of the column are one row, with the last values."""
    await db.execute("CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    await db.execute("CREATE DOMAIN word AS varchar(3) COLLATE ci; CREATE TABLE t (k text COLLATE ci, w word, n int)")
    await db.execute("ALTER TABLE t ADD PRIMARY KEY (k, w)")
    task = PostgresSinkTask()
    task.context = sink_context.Context()
    await task.start({"name": "c", "connection.url": url, "pk.mode": "record_key", "insert.mode": "upsert"})
    try:
        await task.put(
            [SinkRecord("t", 0, None, {"k": k, "w": k}, None, {"n": n}, kafka_offset=n) for n, k in enumerate("Aab")]
        )
        assert await rows_of(db, "SELECT lower(k), lower(w), n FROM t ORDER BY n") == [("a", "a", 1), ("b", "b", 2)]
    finally:
        await task.stop()
        await db.execute("DROP TABLE t; DROP DOMAIN word; DROP COLLATION ci")


async def test_a_value_that_its_column_cannot_have_is_reported(url: str, db: Any) -> None:
    """A value that the driver cannot convert to the type of its column is an error of its record alone."""
    await db.execute("CREATE TABLE t (id int, d date, c time, n numeric, i interval, p point, at timestamptz, j jsonb)")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url})
    values = [{"d": 5}, {"c": "noon"}, {"n": "many"}, {"i": "1 day"}, {"p": {}}, {"at": 1 << 62}, {"j": "no JSON"}, {}]
    try:
        given = [
            SinkRecord("t", 0, None, None, None, {"id": n, **value}, kafka_offset=n) for n, value in enumerate(values)
        ]
        await task.put(given)
        assert await rows_of(db, "SELECT id FROM t") == [(7,)]
        assert [offset for _, offset in reporter.reported] == list(range(7))
    finally:
        await task.stop()


async def test_the_first_and_the_last_times_are_not_infinite(url: str, db: Any) -> None:
    """The first and the last date and time that Python holds are written as they are, also in an array."""
    await db.execute("CREATE TABLE t (d date, list date[], at timestamp, z timestamptz)")
    task = PostgresSinkTask()
    task.context = sink_context.Context()
    await task.start({"name": "c", "connection.url": url})
    first, last = dt.datetime.min, dt.datetime.max
    values = [
        {"d": one.date(), "list": [one.date()], "at": one.isoformat(), "z": one.replace(tzinfo=dt.UTC)}
        for one in (first, last)
    ]
    try:
        await task.put([sink_context.record(A, n, value) for n, value in enumerate(values)])
        found = await db.fetch("SELECT d::text, list::text, at::text, (z AT TIME ZONE 'UTC')::text AS z FROM t")
        assert [tuple(row) for row in found] == [
            ("0001-01-01", "{0001-01-01}", "0001-01-01 00:00:00", "0001-01-01 00:00:00"),
            ("9999-12-31", "{9999-12-31}", "9999-12-31 23:59:59.999999", "9999-12-31 23:59:59.999999"),
        ]
    finally:
        await task.stop()


@pytest.mark.parametrize("mode", ["insert", "upsert"])
async def test_a_value_for_a_generated_column_is_reported(url: str, db: Any, mode: str) -> None:
    """A value for a generated column is an error of its record alone. A null is none, and is left out. The lack of a
    primary key is an error of the task."""
    await db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id + 1) STORED, "
        "i int GENERATED ALWAYS AS IDENTITY)"
    )
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    settings = {"name": "c", "connection.url": url, "pk.mode": "record_value", "pk.fields": "id", "insert.mode": mode}
    await task.start(settings)
    try:
        values = [{"id": 0, "g": None, "i": None}, {"id": 1, "g": 2, "i": None}, {"id": 2}]
        await task.put([sink_context.record(A, n, value) for n, value in enumerate(values)])
        assert await rows_of(db, "SELECT id, g FROM t ORDER BY i") == [(0, 1), (2, 3)]
        assert [offset for _, offset in reporter.reported] == [1]
        await db.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
        if mode == "upsert":
            with pytest.raises(ConnectError, match="ON CONFLICT"):
                await task.put([sink_context.record(A, 3, {"id": 3})])
    finally:
        await task.stop()


async def test_texts_of_the_source_are_written(url: str, db: Any) -> None:
    """A text that the source reads from a column is written to a column of the same type, also an empty "char".
    An interval or a range, and a record without any of the columns, are errors that name the cause.
    """
    await db.execute(
        'CREATE TABLE t (c time, z timetz, b bit(3), v varbit, k "char", s bpchar, i interval, r int4range)'
    )
    texts = {"c": "12:00:00", "z": "12:00:00+01", "b": "101", "v": "01", "k": "a", "s": "b"}
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url})
    invalid = [{"i": "1 day"}, {"r": "[1,2)"}, {"c": "noon"}, {"b": "x"}, {}]
    values = [{**texts, "i": None, "r": None}, *invalid, {"s": 1, "k": ""}]
    try:
        await task.put([sink_context.record(A, n, value) for n, value in enumerate(values)])
        found = await db.fetch("SELECT c::text, z::text, b::text, v::text, k::text, s::text, i::text, r::text FROM t")
        rows = [{name: text for name, text in row.items() if text is not None} for row in found]
        assert rows == [texts, {"k": "", "s": "1"}]
        assert [offset for _, offset in reporter.reported] == [1, 2, 3, 4, 5]
        assert re.findall("type ([a-z0-9]+)", " ".join(reporter.errors)) == ["interval", "int4range"]
        assert reporter.errors[-1].endswith("the record has no column of table t")
    finally:
        await task.stop()


REJECTING = {
    "trigger": """
        CREATE TABLE t (id integer PRIMARY KEY, v text);
        CREATE FUNCTION reject() RETURNS trigger LANGUAGE plpgsql
            AS $$BEGIN IF length(new.v) > 9 THEN RAISE EXCEPTION 'too long'; END IF; RETURN new; END$$;
        CREATE TRIGGER rejecting BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION reject()""",
    "size of an index row": "CREATE TABLE t (id integer PRIMARY KEY, v text); CREATE INDEX ON t (v)",
    "check option": """
        CREATE TABLE base (id integer PRIMARY KEY, v text);
        CREATE VIEW t AS SELECT * FROM base WHERE length(v) < 10 WITH CHECK OPTION""",
}


@pytest.mark.parametrize("by", REJECTING)
async def test_a_record_that_the_database_rejects_is_reported(url: str, db: Any, by: str) -> None:
    """A row that a trigger, the limit of an index row or a view's check option rejects is an error of its record."""
    await db.execute(REJECTING[by])
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url, "pk.mode": "record_key", "insert.mode": "upsert"})
    # A text without repetition, since Postgres compresses a long text.
    values = ["a", "".join(map(chr, range(0x4E00, 0x6000))), "c"]
    try:
        await task.put(
            [SinkRecord("t", 0, None, {"id": n}, None, {"v": v}, kafka_offset=n) for n, v in enumerate(values)]
        )
        assert await rows_of(db, "SELECT v FROM t ORDER BY id") == [("a",), ("c",)]
        assert [offset for _, offset in reporter.reported] == [1]
    finally:
        await task.stop()
        await db.execute("DROP VIEW t" if by == "check option" else "DROP TABLE t; DROP FUNCTION IF EXISTS reject")


@pytest.mark.parametrize("mode", ["insert", "upsert"])
async def test_a_column_that_cannot_be_written_fails_the_task(url: str, db: Any, mode: str) -> None:
    """A column of a type that the driver cannot write fails the task without retries. The error names table and
    type.
    """
    await db.execute("CREATE TABLE t (id int PRIMARY KEY, v macaddr)")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url, "pk.mode": "record_key", "insert.mode": mode})
    try:
        with pytest.raises(ConnectError, match=r"table t .*macaddr"):
            await task.put([SinkRecord("t", 0, None, {"id": 1}, None, {"v": "08:00:2b:01:02:03"}, kafka_offset=0)])
        assert reporter.reported == []
        await task.put([SinkRecord("t", 0, None, {"id": 2}, None, {}, kafka_offset=1)])
        assert await rows_of(db, "SELECT id FROM t") == [(2,)]
    finally:
        await task.stop()


NUL_IN = {
    "text": ({"id": 2}, {"v": "a\0b"}),
    "document": ({"id": 2}, {"v": "ok", "doc": {"deep": ["a\0b"]}}),
    "name": ({"id": 2}, {"v": "ok", "doc": {"a\0b": 1}}),
    "key": ({"id": 2, "part": "a\0b"}, {"v": "ok"}),
    "column": ({"id": 2}, {"v": "ok", "a\0b": 1}),
}


@pytest.mark.parametrize("where", NUL_IN)
@pytest.mark.parametrize("mode", ["insert", "upsert", "update", "exactly once"])
async def test_a_record_with_nul_is_an_error(url: str, db: Any, mode: str, where: str) -> None:
    """Postgres's text cannot hold U+0000: a record with it goes to the DLQ and the others are written.

    Without tolerance the task fails, names the record and writes nothing.
    """
    table = "CREATE TABLE t (id integer, part text NOT NULL DEFAULT '-', v text, doc jsonb, PRIMARY KEY (id, part))"
    settings = {**UPSERT, "insert_mode": "upsert" if mode == "exactly once" else mode, "connection_url": url}
    settings |= {"exactly_once": "true"} if mode == "exactly once" else {}
    rest = {"v": "x", "doc": {}}
    good = [({"id": n, "part": "-"}, rest) for n in (1, 3, 4)]
    bad_key, bad_value = NUL_IN[where]
    bad = ({"part": "-", **bad_key}, {**rest, **bad_value})
    expected = [(1, "x"), (3, "x"), (4, "x")]
    await db.execute(table)
    if mode == "update":
        await db.execute("INSERT INTO t (id) VALUES (1), (2), (3), (4)")
        expected.insert(1, (2, None))  # type: ignore[arg-type]
    async with running() as run:
        tolerant = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": "dlq"}
        tolerant |= {"errors_deadletterqueue_topic_replication_factor": "1"}
        await produce(run, good[0], bad, *good[1:])
        id = await run.run(PostgresSinkConnector, **settings, **tolerant)
        await until_rows(run, db, "SELECT id, v FROM t ORDER BY id", expected)
        await run.until(lambda: len(run.cluster.records("dlq")) == 1)
        assert run.cluster.records("dlq")[0].key == json.dumps(bad[0]).encode()
        await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(4))
        assert run.listener.of(id) == ["startup"]
    await db.execute("DROP TABLE t;" + table)
    await db.execute("DROP TABLE IF EXISTS penstock_connect_offsets")
    async with running() as run:
        await produce(run, good[0], bad, *good[1:])
        reporting = {} if where == "text" else {"errors_log_enable": "true"}
        id = await run.run(PostgresSinkConnector, **settings, **reporting)
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "t-0@1" in run.listener.traces[0]
        # otherwise each restart would write them again
        assert await rows_of(db, "SELECT v FROM t WHERE v IS NOT NULL") == []


async def test_exactly_once_writes_each_record_once(url: str, db: Any) -> None:
    """Offsets are stored with the rows: a restart without Kafka's commits repeats no row, and a zombie task writes
    none.
    """
    settings = {**UPSERT, "insert_mode": "insert", "pk_mode": "none", "exactly_once": "true", "connection_url": url}
    never = {"offset_flush_interval_ms": "600000"}
    async with running(**never) as run:
        await produce(run, *[(None, {"n": n}) for n in range(100)])
        id = await run.run(PostgresSinkConnector, **settings)
        await until_rows(run, db, "SELECT count(*)::int, sum(n)::int FROM t", [(100, 4950)])
        await run.worker.stop_tasks([id])
        lost = {"consumer_override_group_id": "another"}  # as if Kafka had lost the group's commits
        await run.run(PostgresSinkConnector, **settings, **lost)
        await produce(run, (None, {"n": 1000}))
        await until_rows(run, db, "SELECT count(*)::int, sum(n)::int FROM t", [(101, 5950)])
        assert await rows_of(db, "SELECT next_offset FROM penstock_connect_offsets") == [(101,)]
        await db.execute("UPDATE penstock_connect_offsets SET next_offset = 500")  # another task has continued
        await produce(run, (None, {"n": 7}))
        await run.until(lambda: "failure" in run.listener.of(ConnectorTaskId("c", 0)))
        assert "was written by another task" in run.listener.traces[0]
        assert await rows_of(db, "SELECT count(*)::int FROM t") == [(101,)]


@contextlib.asynccontextmanager
async def commit_without_response(connection: Any, *, keep: bool = True) -> AsyncIterator[None]:
    """A transaction that is committed, or rolled back if `keep` is False. The connection breaks if it is committed."""
    async with transaction(connection, keep=keep):
        yield
    if keep:
        connection.terminate()
        raise ConnectionResetError


async def test_a_commit_without_a_response_is_not_of_another_task(
    url: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the connection breaks after Postgres has committed, the retry skips the rows of this transaction."""
    await db.execute("CREATE TABLE t (n int)")
    task = PostgresSinkTask()
    task.context = sink_context.Context()
    await task.start({"name": "c", "connection.url": url, "exactly.once": "true", "batch.size": "2"})
    await task.open(frozenset({TP}))
    given = [SinkRecord("t", 0, None, None, None, {"n": n}, kafka_offset=n) for n in range(4)]

    with monkeypatch.context() as patch:
        patch.setattr(sink, "transaction", commit_without_response)
        with pytest.raises(RetriableError):
            await task.put(given)
    assert await rows_of(db, "SELECT n FROM t ORDER BY n") == [(0,), (1,)]
    await task.put(given)
    assert await rows_of(db, "SELECT n FROM t ORDER BY n") == [(n,) for n in range(4)]
    await task.stop()


async def test_an_invalid_record_keeps_the_ends_of_a_commit_without_a_response(
    url: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the connection breaks after Postgres has committed, the retry may try the rows of some partitions alone, to
    find an invalid record. The commit's rows of the other partitions are skipped too.
    """
    await db.execute("CREATE TABLE t (p int, n int)")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url, "exactly.once": "true"})
    await task.open(frozenset({A, B}))
    given = [sink_context.record(A, 0), sink_context.record(B, 0), sink_context.record(B, 1, None)]
    with monkeypatch.context() as patch:
        patch.setattr(sink, "transaction", commit_without_response)
        with pytest.raises(RetriableError):
            await task.put(given)
    assert await rows_of(db, "SELECT p, n FROM t ORDER BY p") == [(0, 0), (1, 0)]
    await task.put([*given, sink_context.record(B, 2)])
    assert await rows_of(db, "SELECT p, n FROM t ORDER BY p, n") == [(0, 0), (1, 0), (1, 2)]
    assert reporter.reported == [(B, 1)]
    await task.stop()


async def test_a_commit_advances_only_the_partitions_of_its_transaction(db: Any) -> None:
    """After a transaction of two partitions was rolled back, each partition can be written in its own transaction."""
    offsets = OffsetTable("offsets", "c")
    await offsets.open(db, [A, B])
    given = [sink_context.record(A, 0), sink_context.record(B, 0)]
    async with transaction(db, keep=False):
        assert await offsets.advance(db, given) == given
    for record in given:
        async with transaction(db):
            assert await offsets.advance(db, [record]) == [record]
        offsets.committed([record])
    assert await rows_of(db, "SELECT next_offset FROM offsets") == [(1,), (1,)]


async def test_offsets_in_the_database_are_altered_with_the_groups(url: str, db: Any) -> None:
    """Altering offsets moves the offsets in the database, and reading restarts there. A reset without offsets of the
    group resets all of them. Without exactly-once no table is created.
    """
    settings = {**UPSERT, "insert_mode": "insert", "pk_mode": "none", "exactly_once": "true", "connection_url": url}
    props = {"name": "c", "connection.url": url, "exactly.once": "true", "topics": "t"}
    connector, kept = PostgresSinkConnector(), "SELECT next_offset FROM penstock_connect_offsets"
    assert await connector.alter_offsets({**props, "exactly.once": "false"}, {TP: 5})
    assert await rows_of(db, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    async with running() as run:
        await produce(run, *[(None, {"n": n}) for n in range(20)])
        for number, (at, rows) in enumerate([(None, 20), (5, 35), (None, 55), ({}, 75)]):
            if number:
                assert await connector.alter_offsets(props, at if isinstance(at, dict) else {TP: at})
                assert await rows_of(db, kept) == [(at if isinstance(at, int) else -1,)]
            another = {"consumer_override_group_id": f"g{number}", "consumer_override_auto_offset_reset": "earliest"}
            id = await run.run(PostgresSinkConnector, **settings, **another)
            await until_rows(run, db, "SELECT count(*)::int FROM t", [(rows,)])
            await run.worker.stop_tasks([id])
            assert await rows_of(db, kept) == [(20,)]


async def test_offsets_in_the_database_do_not_outlast_exactly_once(url: str, db: Any) -> None:
    """A task without exactly-once resets them, so that they are not used when it is true again. Those of other
    connectors stay.
    """
    await db.execute("CREATE TABLE t (p int, n int)")
    for name, exactly_once, kept in (("c", "true", 7), ("d", "false", 7), ("c", "false", -1), ("c", "true", 7)):
        task = PostgresSinkTask()
        task.context = context = sink_context.Context()
        await task.start({"name": name, "connection.url": url, "exactly.once": exactly_once})
        await task.open(frozenset({A}))
        assert context.rewinds == {}
        await task.put([sink_context.record(A, 6)])
        await task.stop()
        assert await rows_of(db, "SELECT next_offset FROM penstock_connect_offsets") == [(kept,)]


async def test_a_recreated_topic_fails_the_task(url: str, db: Any) -> None:
    """The task fails if it reads a recreated topic from an offset below the one in the database."""
    settings = {**UPSERT, "insert_mode": "insert", "pk_mode": "none", "exactly_once": "true", "connection_url": url}
    async with running() as run:
        await produce(run, *[(None, {"n": n}) for n in range(20)])
        await run.run(PostgresSinkConnector, **settings)
        await until_rows(run, db, "SELECT count(*)::int FROM t", [(20,)])
    async with running() as run:  # another cluster with a topic of the same name
        await produce(run, *[(None, {"n": n}) for n in range(5)])
        await run.run(PostgresSinkConnector, consumer_override_auto_offset_reset="earliest", **settings)
        await run.until(lambda: "failure" in run.listener.of(ConnectorTaskId("c", 0)))
        assert "t-0 is read from offset 0" in run.listener.traces[0]
    await db.execute("DROP TABLE t; DROP TABLE penstock_connect_offsets")
    async with running() as run:  # the same, while the task runs
        await produce(run, *[(None, {"n": n}) for n in range(20)])
        await run.run(PostgresSinkConnector, **settings)
        await until_rows(run, db, "SELECT count(*)::int FROM t", [(20,)])
        await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(20))
        sink = run.worker._tasks[ConnectorTaskId("c", 0)].task  # type: ignore[attr-defined]
        with pytest.raises(ConnectError, match=r"t-0.*offset 0.*20"):
            await sink.put([SinkRecord("t", 0, None, None, None, {"n": 0}, kafka_offset=0)])


async def test_a_batch_may_have_many_sets_of_columns(url: str, db: Any) -> None:
    """A batch whose records have many sets of columns is written: it is split at the limit of temporary tables."""
    async with running() as run:
        settings = {**UPSERT, "pk_mode": "record_value", "pk_fields": "id", "auto_evolve": "true"}
        values = [{"id": n, **{f"f{bit}": n for bit in range(9) if n >> bit & 1}} for n in range(300)]
        await produce(run, *[(None, value) for value in values])
        await run.run(PostgresSinkConnector, connection_url=url, **settings)
        await until_rows(run, db, "SELECT count(*)::int, sum(f0)::int FROM t", [(300, sum(range(1, 300, 2)))])
        assert "failure" not in run.listener.of(ConnectorTaskId("c", 0))


async def test_a_new_table_has_the_columns_of_the_whole_batch(url: str, db: Any) -> None:
    """A new table's columns come from all records of the batch: nulls and tombstones determine no type."""
    async with running() as run:
        values = [{"a": None, "b": None, "c": 1}, {"a": 5, "b": None, "c": None}]
        await produce(run, ({"id": 1}, None), *[({"id": n}, value) for n, value in enumerate(values)])
        await run.run(PostgresSinkConnector, connection_url=url, delete_enabled="true", **UPSERT)
        await until_rows(run, db, "SELECT id, a, c FROM t ORDER BY id", [(0, None, 1), (1, 5, None)])
        query = "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 't'"
        assert sorted(await rows_of(db, query)) == [("a", "bigint"), ("c", "bigint"), ("id", "bigint")]
        await produce(run, ({"id": 2}, {"b": 1}))
        await run.until(lambda: run.listener.traces)
        assert "table t has no column b" in run.listener.traces[0]


async def test_a_lost_connection_is_reopened(url: str, db: Any) -> None:
    """A batch that failed with its connection is delivered again on a new one."""
    async with running() as run:
        await run.run(PostgresSinkConnector, connection_url=url, retry_backoff_ms="10", **UPSERT)
        await produce(run, ({"id": 1}, {"n": 1}))
        await until_rows(run, db, "SELECT id FROM t", [(1,)])
        await db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        await produce(run, ({"id": 2}, {"n": 2}))
        await until_rows(run, db, "SELECT id FROM t ORDER BY id", [(1,), (2,)])


async def test_a_retried_put_skips_committed_transactions(url: str, db: Any) -> None:
    """A put is several transactions.

    If the connection is lost, the error is retriable, and the retry continues after the committed transactions.
    """
    await db.execute("CREATE TABLE t (n int UNIQUE, at timestamptz DEFAULT clock_timestamp())")
    task = PostgresSinkTask()
    task.context = sink_context.Context()
    await task.start({"name": "c", "connection.url": url, "batch.size": "2", "retry.backoff.ms": "1"})
    given = [SinkRecord("t", 0, None, None, None, {"n": n}, kafka_offset=n) for n in range(6)]
    other = await asyncpg.connect(url)
    async with asyncio.timeout(30):
        held = other.transaction()
        await held.start()
        await other.execute("INSERT INTO t VALUES (3)")  # the second transaction waits for this one to end
        putting = asyncio.create_task(task.put(list(given)))
        terminate = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'transactionid'"
        while not await db.fetchval(terminate):  # noqa: ASYNC110  # a database has no event to wait for
            await asyncio.sleep(0.02)
        with pytest.raises(RetriableError, match=r"AdminShutdown|ConnectionDoesNotExist|ConnectionLost"):
            await putting
        await held.rollback()
        assert await rows_of(db, "SELECT n FROM t ORDER BY n") == [(0,), (1,)]
        await task.put(list(given))
    assert await rows_of(db, "SELECT n FROM t ORDER BY n") == [(n,) for n in range(6)]
    # a reset offset: the record is written
    await task.put([SinkRecord("t", 0, None, None, None, {"n": 9}, kafka_offset=0)])
    assert await rows_of(db, "SELECT count(*)::int FROM t") == [(7,)]
    await task.stop()
    await other.close()


async def test_an_invalid_row_repeats_no_committed_transaction(
    url: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with too many sets of columns is several transactions.

    If a later one has an invalid record, only that record is reported and earlier ones are not written again.
    """
    monkeypatch.setattr(sink, "STAGINGS_MAX", 1)
    for table in ("t", "u"):
        await db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, n int)")
    task = PostgresSinkTask()
    reporter = sink_context.Reporter()
    task.context = sink_context.Context(reporter)
    settings = {"connection.url": url, "pk.mode": "record_key", "delete.enabled": "true"}
    await task.start({"name": "c", **settings})
    pairs: list[tuple[str, int, Any]] = [
        ("t", 1, {"n": 1}), ("t", 9, None), ("u", 2, {"n": 2}), ("u", 9, None), ("u", 3, {"n": "no number"}),
        ("u", 4, {"n": 4}),
    ]  # fmt: skip
    given = [
        SinkRecord(topic, 0, None, {"id": key}, None, value, kafka_offset=at)
        for at, (topic, key, value) in enumerate(pairs)
    ]
    await task.put(given)
    assert await rows_of(db, "SELECT id, n FROM t UNION SELECT id, n FROM u ORDER BY id") == [(1, 1), (2, 2), (4, 4)]
    assert reporter.reported == [(TopicPartition("u", 0), 4)]
    await task.stop()


@pytest.mark.parametrize("mode", ["insert", "upsert"])
async def test_a_column_may_change_its_type(url: str, db: Any, mode: str) -> None:
    """Values have the new type of their column, also if the task or the driver knows the old type."""
    await db.execute("CREATE TABLE t (id int PRIMARY KEY, v varchar(2), n int, x bigint)")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url, "pk.mode": "record_key", "insert.mode": mode})

    async def put(offset: int, value: Any) -> None:
        await task.put([SinkRecord("t", 0, None, {"id": offset}, None, value, kafka_offset=offset)])

    try:
        await put(0, {"v": "ab", "n": 1, "x": 1})
        await put(1, {"v": "abc", "n": 1, "x": 1})
        assert reporter.reported == [(TP, 1)]
        await db.execute("ALTER TABLE t ALTER x TYPE double precision")
        await put(2, {"v": "ab", "n": 2, "x": 2})
        await db.execute("ALTER TABLE t ALTER v TYPE varchar(3), ALTER n TYPE text")
        await put(3, {"v": "abc", "n": 3, "x": 3.5})
        assert reporter.reported == [(TP, 1)]
        assert await rows_of(db, "SELECT * FROM t") == [(0, "ab", "1", 1), (2, "ab", "2", 2), (3, "abc", "3", 3.5)]
    finally:
        await task.stop()


async def test_an_invalid_record_repeats_no_write(url: str, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that fails is written again only if a column's type has changed."""
    await db.execute("CREATE TABLE t (id int PRIMARY KEY, v varchar(2))")
    task = PostgresSinkTask()
    task.context = sink_context.Context(reporter := sink_context.Reporter())
    await task.start({"name": "c", "connection.url": url, "pk.mode": "record_key", "insert.mode": "upsert"})
    attempts: list[int] = []
    write = task._try_to_write_rows

    async def count_attempt(records: list[SinkRecord], *, keep: bool = True) -> Exception | None:
        attempts.append(len(records))
        return await write(records, keep=keep)

    monkeypatch.setattr(task, "_try_to_write_rows", count_attempt)

    async def put(value: str) -> list[int]:
        attempts.clear()
        await task.put([SinkRecord("t", 0, None, {"id": 1}, None, {"v": value}, kafka_offset=0)])
        return list(attempts)

    try:
        assert await put("abc") == [1, 0]
        await db.execute("ALTER TABLE t ALTER v TYPE varchar(3)")
        assert await put("abc") == [1, 1]
        assert await put("abcd") == [1, 0]
        assert len(reporter.reported) == 2
    finally:
        await task.stop()


async def test_tasks_that_start_together_create_one_offset_table(url: str, db: Any) -> None:
    """Tasks that start at the same time on an empty database create the table of offsets without an error."""
    partitions = [TopicPartition("t", number) for number in range(8)]
    connections = [await asyncpg.connect(url) for _ in partitions]
    for _ in range(5):
        await db.execute("DROP TABLE IF EXISTS offsets")
        opening = [OffsetTable("offsets", "c").open(c, [tp]) for c, tp in zip(connections, partitions, strict=True)]
        assert await asyncio.gather(*opening) == [{}] * 8
        assert await rows_of(db, "SELECT count(*)::int FROM offsets") == [(8,)]
    for connection in connections:
        await connection.close()


async def test_an_existing_offset_table_needs_no_privilege_to_create_one(url: str, db: Any) -> None:
    """A user who may not create tables uses an offset table that exists, also in another schema. Without exactly-once
    the user needs no privilege on it.
    """
    await OffsetTable("offsets", "c").open(db, [])
    await db.execute("CREATE ROLE writer LOGIN; REVOKE CREATE ON SCHEMA public FROM public")
    connection = await asyncpg.connect(url, user="writer")
    try:
        await OffsetTable("offsets", "c").forget(connection)
        await db.execute("GRANT SELECT, INSERT, UPDATE ON offsets TO writer")
        assert await OffsetTable("offsets", "c").open(connection, [TP]) == {}
        assert await OffsetTable("public.offsets", "c").open(connection, [TP]) == {}
    finally:
        await connection.close()
        await db.execute("DROP OWNED BY writer; DROP ROLE writer")


@pytest.mark.parametrize("tables", ["", "src"])
def test_a_source_waits_at_most_a_second_in_a_poll(tables: str) -> None:
    """The wait for the next read, or for the next retry, is divided: each poll returns after a second at most.

    So a pause, or the end of a transaction, does not wait for the whole interval.
    """

    async def poll_times() -> list[float]:
        task = PostgresSourceTask()
        task.initialize(Context())
        settings = {"connection.url": "postgresql://127.0.0.1:1/x", "mode": "bulk", "topic.prefix": ""}
        waits = {"poll.interval.ms": "2500", "retry.backoff.ms": "2500"}
        await task.start({**settings, **waits, "table.whitelist": tables})
        loop = asyncio.get_running_loop()
        times = []
        for _ in range(3):
            before_s = loop.time()
            with contextlib.suppress(RetriableError):  # nothing listens there
                assert await task.poll() is None
            times.append(loop.time() - before_s)
        await task.stop()
        return times

    assert virtual_time.run(poll_times())[1:] == [1, 1]


async def test_new_and_changed_rows_are_read(url: str, db: Any) -> None:
    """`timestamp+incrementing` reads new and changed rows, each once and in order, also after a restart."""
    await db.execute("CREATE TABLE src (id serial PRIMARY KEY, v text, price numeric, at timestamptz DEFAULT now())")
    await db.execute("INSERT INTO src (v, price) VALUES ('a', 1.5), ('b', NULL)")
    settings = {
        **PLAIN,
        "connection_url": url,
        "mode": "timestamp+incrementing",
        "incrementing_column_name": "id",
        "timestamp_column_name": "at",
        "table_whitelist": "src",
        "topic_prefix": "",
        "key_columns": "id",
        "poll_interval_ms": "20",
    }
    async with running() as run:
        run.cluster.create_topic("src")
        id = await run.run(PostgresSourceConnector, **settings)

        def read() -> list[tuple[int, str]]:
            records = run.cluster.records("src")
            assert all(json.loads(r.key or b"")["id"] == json.loads(r.value or b"")["id"] for r in records)
            return [(json.loads(r.value or b"")["id"], json.loads(r.value or b"")["v"]) for r in records]

        await run.until(lambda: read() == [(1, "a"), (2, "b")])
        await db.execute("UPDATE src SET v = 'a2', at = clock_timestamp() WHERE id = 1")
        await run.until(lambda: read()[2:] == [(1, "a2")])
        await run.worker.stop_tasks([id])
        await db.execute("INSERT INTO src (v) VALUES ('c')")
        await run.run(PostgresSourceConnector, **settings)
        await run.until(lambda: read()[3:] == [(3, "c")])


async def test_incrementing_mode_reads_a_query(url: str, db: Any) -> None:
    """`incrementing` reads the rows of a query in batches and stores the last number."""
    await db.execute("CREATE TABLE src (id int PRIMARY KEY, v int)")
    await db.execute("INSERT INTO src SELECT n, n * 2 FROM generate_series(1, 25) n")
    settings = {**PLAIN, "connection_url": url, "mode": "incrementing", "incrementing_column_name": "id"}
    async with running() as run:
        query = {"query": "SELECT id, v FROM src WHERE v % 4 = 0", "topic_prefix": "t", "batch_max_rows": "5"}
        await run.run(PostgresSourceConnector, **settings, **query, poll_interval_ms="20")
        await run.until(lambda: len(run.cluster.records("t")) == 12)
        assert [json.loads(record.value or b"")["id"] for record in run.cluster.records("t")] == list(range(2, 26, 2))
        stored = {b'["c",{"protocol":"1","query":"query"}]': b'{"incrementing":24}'}
        await run.until(lambda: run.store.data == stored)


BY_TIME = {**PLAIN, "mode": "timestamp", "timestamp_column_name": "at", "table_whitelist": "src", "topic_prefix": ""}


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin"])
async def test_timestamps_without_a_zone_are_utc(url: str, db: Any, zone: str) -> None:
    """Timestamps without a zone are UTC in any database time zone: no row is read twice or skipped."""
    await db.execute(f"ALTER DATABASE postgres SET timezone = '{zone}'")
    try:
        await db.execute("CREATE TABLE src (id int, at timestamp); INSERT INTO src VALUES (1, '2024-01-01 12:00')")
        async with running() as run:
            run.cluster.create_topic("src")
            await run.run(PostgresSourceConnector, connection_url=url, poll_interval_ms="5", **BY_TIME)

            def read() -> list[int]:
                return [json.loads(record.value or b"")["id"] for record in run.cluster.records("src")]

            await run.until(lambda: read() == [1])
            await db.execute("INSERT INTO src VALUES (2, '2024-01-01 12:30')")
            await run.until(lambda: 2 in read())
            await db.execute("INSERT INTO src VALUES (3, '2024-01-01 13:00')")
            await run.until(lambda: 3 in read())
            assert read() == [1, 2, 3]
    finally:
        await db.execute("ALTER DATABASE postgres RESET timezone")


async def test_rows_of_one_timestamp_are_read_together(url: str, db: Any) -> None:
    """`timestamp` mode limits a poll, but skips no row that has the same timestamp as the last one."""
    await db.execute("CREATE TABLE src (id int, at timestamptz)")
    await db.execute("INSERT INTO src SELECT n, to_timestamp(n / 4) FROM generate_series(0, 19) n")
    async with running() as run:
        run.cluster.create_topic("src")
        settings = {"connection_url": url, "batch_max_rows": "2", "poll_interval_ms": "5"}
        await run.run(PostgresSourceConnector, **BY_TIME, **settings)
        await run.until(lambda: len(run.cluster.records("src")) >= 20)
        assert sorted(json.loads(record.value or b"")["id"] for record in run.cluster.records("src")) == list(range(20))
        await run.until(lambda: b'"timestamp":4000' in b"".join(run.store.data.values()))


async def test_an_initial_timestamp_of_minus_one_is_the_current_time(url: str, db: Any) -> None:
    """With `timestamp.initial=-1` rows with a time before the first read are skipped."""
    await db.execute("CREATE TABLE src (id int, at timestamptz); INSERT INTO src VALUES (1, '2024-01-01'), (2, now())")
    task = PostgresSourceTask()
    task.initialize(Context())
    settings = {"connection.url": url, "mode": "timestamp", "timestamp.column.name": "at", "topic.prefix": ""}
    await task.start({**settings, "timestamp.initial": "-1", "table.whitelist": "src", "poll.interval.ms": "1"})
    try:
        assert await task.poll() == []
        await db.execute("INSERT INTO src VALUES (3, '2024-01-01'), (4, clock_timestamp())")
        while not (records := await task.poll()):
            pass
        assert [record.value["id"] for record in records] == [4]
    finally:
        await task.stop()


async def test_bulk_mode_reads_tables_in_batches(url: str, db: Any) -> None:
    """`bulk` returns `batch.max.rows` rows a poll, and reads all rows of every table each time."""
    await db.execute("CREATE TABLE src AS SELECT n AS id FROM generate_series(1, 25) n; CREATE TABLE other (id int)")
    await db.execute("INSERT INTO other VALUES (100)")
    task = PostgresSourceTask()
    settings = {"connection.url": url, "mode": "bulk", "table.whitelist": "src,other", "topic.prefix": ""}
    task.initialize(Context())
    await task.start({**settings, "batch.max.rows": "10", "poll.interval.ms": "1"})
    try:
        polls = [[record.value["id"] for record in await task.poll() or []] for _ in range(8)]
        whole = [list(range(1, 11)), list(range(11, 21)), list(range(21, 26)), [100]]
        assert polls == whole * 2
    finally:
        await task.stop()


@pytest.mark.parametrize("mode", ["bulk", "incrementing"])
async def test_types_without_a_counterpart_are_text_of_postgres(url: str, db: Any, mode: str) -> None:
    """A column of a type that Connect lacks has the text that Postgres writes, also if two columns have one name."""
    await db.execute("CREATE TABLE src (id int, list text[], i interval, r daterange, b bit(3), p point, c char(3))")
    await db.execute(
        "INSERT INTO src VALUES (1, '{a,NULL}', '1 day 2h', '[2024-01-01,2024-01-02)', '101', '(1,2)', 'x')"
    )
    await db.execute("ALTER DATABASE postgres SET datestyle = 'SQL, DMY'")
    task = PostgresSourceTask()
    task.initialize(Context())
    settings = {"connection.url": url, "mode": mode, "incrementing.column.name": "id", "topic.prefix": "t"}
    await task.start({**settings, "query": 'SELECT *, i AS "a ""b", i AS "a ""b" FROM src'})
    try:
        [record] = await task.poll() or []
        expected = {"id": 1, "list": "{a,NULL}", "i": "1 day 02:00:00", "r": "[2024-01-01,2024-01-02)", "b": "101"}
        assert record.value == {**expected, "p": "(1,2)", "c": "x  ", 'a "b': "1 day 02:00:00"}
    finally:
        await db.execute("ALTER DATABASE postgres RESET datestyle")
        await task.stop()


@pytest.mark.parametrize("mode", ["bulk", "incrementing"])
async def test_times_beyond_pythons_range_are_the_nearest(url: str, db: Any, mode: str) -> None:
    """The time 24:00:00, also as the result of rounding, is read as the last time before it. A date or timestamp
    outside the years 1 to 9999 is read as the first or last one in this range. Other times are exact.
    """
    await db.execute("CREATE TABLE src (id int, since time, until time, rounded time(0), d date, b date, "
                     "z timestamptz, at timestamp)")  # fmt: skip
    await db.execute("INSERT INTO src VALUES (1, '07:30:00.000001', '24:00:00', '23:59:59.9', '20244-01-15', "
                     "'0044-03-15 BC', '10000-01-01', '0044-03-15 12:00 BC')")  # fmt: skip
    task = PostgresSourceTask()
    task.initialize(Context())
    settings = {"connection.url": url, "mode": mode, "incrementing.column.name": "id", "topic.prefix": ""}
    await task.start({**settings, "table.whitelist": "src"})
    try:
        [record] = await task.poll() or []
        assert record.value == {
            "id": 1, "since": dt.time(7, 30, 0, 1), "until": dt.time.max, "rounded": dt.time.max,
            "d": dt.date.max, "b": dt.date.min, "z": dt.datetime.max.replace(tzinfo=dt.UTC),
            "at": dt.datetime.min.replace(tzinfo=dt.UTC),
        }  # fmt: skip
        assert mode == "bulk" or await task.poll() == []
    finally:
        await task.stop()


async def test_a_paused_bulk_read_does_not_block_vacuum(url: str, db: Any) -> None:
    """After `bulk.idle.ms` without a poll the transaction ends, so that VACUUM removes dead rows.

    Later polls return the rest of the same snapshot. If the connection is lost meanwhile, the table is read again from
    the start.
    """
    await db.execute("CREATE TABLE src AS SELECT n AS id FROM generate_series(1, 25) n")
    task = PostgresSourceTask()
    settings = {"connection.url": url, "mode": "bulk", "table.whitelist": "src", "topic.prefix": ""}
    settings |= {"retry.backoff.ms": "1"}
    task.initialize(Context())
    await task.start({**settings, "batch.max.rows": "10", "poll.interval.ms": "1", "bulk.idle.ms": "50"})

    async def polled() -> list[int]:
        return [record.value["id"] for record in await task.poll() or []]

    async def held() -> int:
        """The process id of the reader's connection, once its transaction is committed."""
        async with asyncio.timeout(30):
            while True:
                query = "SELECT pid FROM pg_stat_activity WHERE query = 'COMMIT' AND state = 'idle'"
                if (pid := await db.fetchval(query)) is not None:
                    return int(pid)
                await asyncio.sleep(0.01)

    async def dead_rows() -> int:
        verbose: list[str] = []
        db.add_log_listener(lambda _connection, message: verbose.append(str(message)))
        await db.execute("VACUUM (VERBOSE) src")
        found = re.search(r"(\d+) are dead but not yet removable", "".join(verbose))
        assert found is not None, verbose
        return int(found[1])

    try:
        assert await polled() == list(range(1, 11))
        await db.execute("DELETE FROM src WHERE id > 5; INSERT INTO src VALUES (100)")
        await held()
        assert await dead_rows() == 0
        assert [await polled(), await polled()] == [list(range(11, 21)), list(range(21, 26))]
        assert await polled() == [1, 2, 3, 4, 5, 100]
        await db.execute("INSERT INTO src SELECT n FROM generate_series(101, 110) n")
        part = await polled()
        await db.fetch("SELECT pg_terminate_backend($1)", await held())
        with pytest.raises(RetriableError):
            await polled()
        assert await polled() == part
        assert sorted(part + await polled()) == [1, 2, 3, 4, 5, *range(100, 111)]
    finally:
        await task.stop()
