"""Logical decoding on a real Postgres, with the fake cluster as Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from penstock.shared.common.errors import RetriableError
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.connectors.postgres import logical
from penstock.shared.connect.connectors.postgres.source import PostgresSourceConnector, PostgresSourceTask
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SourceRecord
from tests.integration.connect.postgres import is_installed, server
from tests.integration.connect.test_postgres import PLAIN
from tests.shared.connect.harness import Running, running

asyncpg = pytest.importorskip("asyncpg")
pytestmark = pytest.mark.skipif(
    not is_installed(), reason="no Postgres: initdb, pg_ctl and postgres must be on the PATH"
)

LARGE = "x" * 100_000
"""A value larger than Postgres keeps in a row if it may not compress it."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server(wal_level="logical") as found_url:
        yield found_url


@pytest.fixture
async def db(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE src (id int PRIMARY KEY, v text)")
    await connection.execute("ALTER TABLE src ALTER v SET STORAGE EXTERNAL")
    yield connection
    await connection.execute("DROP TABLE IF EXISTS src, moved; DROP PUBLICATION IF EXISTS s")
    await connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT temporary")
    await connection.close()


class Offsets:
    """An offset reader that returns the offset that the test sets."""

    def __init__(self) -> None:
        self.stored: Mapping[str, Any] | None = None

    async def offset(self, partition: Any) -> Mapping[str, Any] | None:
        return self.stored


class Context:
    """The context of a source task, without a worker."""

    configs: Mapping[str, str] = {}
    transaction_context = None
    files = AllowedFiles()

    def __init__(self) -> None:
        self.offset_storage_reader: Any = Offsets()


async def started(url: str, context: Context, **more: str) -> PostgresSourceTask:
    task = PostgresSourceTask()
    task.initialize(context)
    settings = {"connection.url": url, "mode": "logical", "table.whitelist": "src", "topic.prefix": ""}
    given = {name.replace("_", "."): value for name, value in more.items()}
    await task.start({**settings, "slot.name": "s", "poll.interval.ms": "1", **given})
    return task


async def polled(task: PostgresSourceTask) -> list[SourceRecord]:
    """Poll until there are records, and return them."""
    async with asyncio.timeout(30):
        while not (records := await task.poll()):
            pass
    return records


def ids(records: list[SourceRecord]) -> list[tuple[str, int]]:
    return [(str(record.headers[0].value), record.key["id"]) for record in records]


async def until(db: Any, query: str, *arguments: Any) -> None:
    async with asyncio.timeout(30):
        while not await db.fetchval(query, *arguments):  # noqa: ASYNC110 - a database has no event to wait for
            await asyncio.sleep(0.02)


async def test_every_change_is_a_record_and_none_is_lost_between_two_tasks(url: str, db: Any) -> None:
    """Inserts, updates and deletes are records, also if they happen while no task runs or leave a large value
    unchanged. The slot and the publication are created and kept, and the slot advances to the stored offset.
    """
    settings = {**PLAIN, "connection_url": url, "mode": "logical", "slot_name": "s", "table_whitelist": "src"}
    settings |= {"topic_prefix": "", "poll_interval_ms": "5"}
    moved = "SELECT confirmed_flush_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 's'"

    def seen(run: Running) -> list[tuple[str, int, str | None]]:
        records = run.cluster.records("src")
        values = [None if record.value is None else json.loads(record.value)["v"] for record in records]
        ops = [(dict(record.headers)["__op"] or b"").decode() for record in records]
        return [(op, json.loads(r.key or b"")["id"], v) for op, r, v in zip(ops, records, values, strict=True)]

    async with running() as run:
        run.cluster.create_topic("src")
        id = await run.run(PostgresSourceConnector, **settings)
        await until(db, "SELECT 1 FROM pg_replication_slots WHERE slot_name = 's'")
        await db.execute("INSERT INTO src VALUES (1, 'one'), (2, $1)", LARGE)
        await db.execute("UPDATE src SET id = 3 WHERE id = 2")
        await db.execute("DELETE FROM src WHERE id = 1")
        first = [("c", 1, "one"), ("c", 2, LARGE), ("d", 2, None), ("u", 3, LARGE), ("d", 1, None)]
        await run.until(lambda: seen(run) == first)
        await until(db, moved, await db.fetchval("SELECT pg_current_wal_lsn()::text"))
        await run.worker.stop_tasks([id])
        await db.execute("INSERT INTO src VALUES (4, 'while nothing runs')")
        assert await db.fetchval("SELECT count(*) FROM pg_replication_slots") == 1
        await run.run(PostgresSourceConnector, **settings)
        await run.until(lambda: seen(run) == [*first, ("c", 4, "while nothing runs")])
        await until(db, moved, await db.fetchval("SELECT pg_current_wal_lsn()::text"))


async def test_the_slot_advances_only_to_stored_offsets(url: str, db: Any) -> None:
    """The next task reads again from the stored offset, even within a transaction.

    A lost connection repeats no record.
    """
    context = Context()
    task = await started(url, context, batch_max_rows="3")
    assert await task.poll() == []
    await db.execute("INSERT INTO src SELECT n, 'v' FROM generate_series(1, 10) n")
    records = await polled(task)
    assert ids(records) == [("c", 1)]  # the BEGIN message and the table's description count too
    await db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                     "AND backend_type = 'client backend'")  # fmt: skip
    while len(records) < 10:
        # The task may also find the connection closed, and open another one at once.
        with contextlib.suppress(RetriableError):
            records += await polled(task)
    assert ids(records) == [("c", n) for n in range(1, 11)]
    assert await task.poll() == []
    await task.commit()
    await task.stop()
    context.offset_storage_reader.stored = records[3].source_offset
    task = await started(url, context)
    assert ids(await polled(task)) == [("c", n) for n in range(5, 11)]
    context.offset_storage_reader.stored = records[-1].source_offset
    await task.commit()
    await task.stop()
    moved = "SELECT confirmed_flush_lsn > $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 's'"
    assert await db.fetchval(moved, records[-1].source_offset["lsn"])
    assert await db.fetchval("SELECT count(*) FROM pg_replication_slots") == 1


async def test_a_poll_after_a_failed_poll_returns_all_records(url: str, db: Any) -> None:
    """If a poll fails after it has read changes, here because of a locked table, the next poll returns all of them."""
    task = await started(url, Context(), statement_timeout_ms="1000")
    try:
        assert await task.poll() == []
        await db.execute("INSERT INTO src VALUES (1, $1)", LARGE)
        await db.execute("UPDATE src SET id = 2")
        async with db.transaction():
            await db.execute("LOCK TABLE src")
            with pytest.raises(RetriableError):
                await polled(task)
        records = await polled(task)
        assert ids(records) == [("c", 1), ("d", 1), ("u", 2)]
        assert records[-1].value == {"id": 2, "v": LARGE}
    finally:
        await task.stop()


async def test_a_change_fails_after_all_before_it_are_stored(url: str, db: Any) -> None:
    """A change that cannot become a record fails the task when all records before it are stored, so that none is lost
    if the change is skipped. The error has the offset that skips the change.
    """
    context = Context()
    task = await started(url, context, key_columns="id,v")
    assert await task.poll() == []
    await db.execute("INSERT INTO src VALUES (1, 'a'); UPDATE src SET v = 'b'; INSERT INTO src VALUES (3, 'c')")
    records = await polled(task)
    assert ids(records) == [("c", 1)]
    await task.commit()
    assert not await task.poll()
    context.offset_storage_reader.stored = records[-1].source_offset
    await task.commit()
    with pytest.raises(ConnectError, match=r"the old v .* not in the log") as failed:
        await polled(task)
    await task.stop()
    skipping = {**records[-1].source_offset, "change": 2}
    assert json.dumps(skipping) in str(failed.value)
    task = await started(url, context, key_columns="id,v")
    with pytest.raises(ConnectError, match=r"the old v .* not in the log"):
        await polled(task)
    await task.stop()
    context.offset_storage_reader.stored = skipping
    task = await started(url, context)
    assert ids(await polled(task)) == [("c", 3)]
    await task.stop()


async def test_the_slot_may_move_for_longer_than_a_statement(url: str, db: Any) -> None:
    """`statement.timeout.ms` does not limit the move of the slot, which takes long if there is much log to decode."""
    context = Context()
    task = await started(url, context, statement_timeout_ms="1000")
    assert await task.poll() == []
    await db.execute("INSERT INTO src VALUES (1, 'one')")
    [record] = await polled(task)
    assert await task.poll() == []
    context.offset_storage_reader.stored = record.source_offset
    await task.commit()
    async with db.transaction():
        await db.execute("LOCK TABLE pg_replication_slots")
        stopping = asyncio.create_task(task.stop())
        await db.execute("SELECT pg_sleep(1.5)")
    await stopping
    moved = "SELECT confirmed_flush_lsn > $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 's'"
    assert await db.fetchval(moved, record.source_offset["lsn"])


@pytest.mark.parametrize(
    ("change", "v"),
    [
        ("ALTER TABLE src DROP w; ALTER TABLE src ALTER id TYPE text; ALTER TABLE src RENAME TO moved", LARGE),
        ("ALTER TABLE src DROP w; ALTER TABLE src ALTER v TYPE varchar", LARGE),
        ("ALTER TABLE src DROP w; ALTER TABLE src ALTER v TYPE bytea USING convert_to(v, 'UTF8')", None),
        ("ALTER TABLE src RENAME id TO key", None),
        ("DROP TABLE src", None),
    ],
)
async def test_unchanged_large_values_of_a_changed_table(url: str, db: Any, change: str, v: str | None) -> None:
    """If a table changes before an update is read, its unchanged large values are read from the columns that still
    exist. They are null if the row cannot be found, because the key or the table no longer exists, or if the column's
    type in records has changed.
    """
    await db.execute("ALTER TABLE src ADD w text; ALTER TABLE src ALTER w SET STORAGE EXTERNAL")
    await db.execute("CREATE PUBLICATION s FOR TABLE src")
    task = await started(url, Context(), table_whitelist="")
    try:
        assert await task.poll() == []
        await db.execute("INSERT INTO src VALUES (1, $1, $1)", LARGE)
        await db.execute("UPDATE src SET id = 1")
        await db.execute(change)
        records = await polled(task)
        assert ids(records) == [("c", 1), ("u", 1)]
        assert records[-1].value == {"id": 1, "v": v, "w": None}
    finally:
        await task.stop()


async def test_the_end_of_a_day_is_its_last_time(url: str, db: Any) -> None:
    """The time 24:00:00, also as the result of rounding, is read as the last time before it."""
    await db.execute("ALTER TABLE src ADD until time, ADD rounded time(0)")
    task = await started(url, Context())
    try:
        assert await task.poll() == []
        await db.execute("INSERT INTO src VALUES (1, 'a', '24:00:00', '23:59:59.9')")
        [record] = await polled(task)
        assert record.value == {"id": 1, "v": "a", "until": dt.time.max, "rounded": dt.time.max}
    finally:
        await task.stop()


async def test_unchanged_large_values_of_a_domain(url: str, db: Any) -> None:
    """An unchanged large value of a domain is read from the table in the form of the domain's base type."""
    await db.execute("CREATE DOMAIN image AS bytea; CREATE DOMAIN code AS varchar(3)")
    await db.execute("ALTER TABLE src ALTER id TYPE code, ADD w image; ALTER TABLE src ALTER w SET STORAGE EXTERNAL")
    task = await started(url, Context())
    try:
        assert await task.poll() == []
        await db.execute("INSERT INTO src VALUES ('one', 'v', $1)", LARGE.encode())
        await db.execute("UPDATE src SET v = 'new'")
        records = await polled(task)
        assert [record.value for record in records] == [
            {"id": "one", "v": "v", "w": LARGE.encode()},
            {"id": "one", "v": "new", "w": LARGE.encode()},
        ]
    finally:
        await task.stop()
        await db.execute("DROP TABLE src; DROP DOMAIN image; DROP DOMAIN code")


async def test_changes_of_partitions_are_records_of_the_partitioned_table(url: str, db: Any) -> None:
    """A change in a partition is a record of the partitioned table in `table.whitelist`. A publication that names
    partitions is an error that names the fix.
    """
    await db.execute("CREATE TABLE whole (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    await db.execute("CREATE TABLE low PARTITION OF whole FOR VALUES FROM (0) TO (10)")
    await db.execute("CREATE TABLE high (v text, id int PRIMARY KEY)")
    await db.execute("ALTER TABLE whole ATTACH PARTITION high FOR VALUES FROM (10) TO (20)")
    task = await started(url, context := Context(), table_whitelist="whole")
    try:
        assert await task.poll() == []
        await db.execute("INSERT INTO whole VALUES (1, 'low'), (11, 'high')")
        await db.execute("UPDATE whole SET v = 'new' WHERE id = 11")
        await db.execute("DELETE FROM whole WHERE id = 1")
        records = await polled(task)
        assert {record.topic for record in records} == {"whole"}
        assert ids(records) == [("c", 1), ("c", 11), ("u", 11), ("d", 1)]
        assert records[2].value == {"id": 11, "v": "new"}
        await task.stop()
        await db.execute("ALTER PUBLICATION s SET (publish_via_partition_root = false)")
        context.offset_storage_reader.stored = records[-1].source_offset
        task = await started(url, context, table_whitelist="whole")
        with pytest.raises(ConnectError, match=r'ALTER PUBLICATION "s" SET \(publish_via_partition_root = true\)'):
            await polled(task)
    finally:
        await task.stop()
        await db.execute("DROP TABLE whole")


async def test_errors_of_slots_and_publications_name_the_fix(url: str, db: Any) -> None:
    """A lost slot, a missing publication, a table without a primary key and a missing privilege are errors that name
    the fix.
    """
    context = Context()

    async def expect_error(message: str, **more: str) -> None:
        task = await started(url, context, **more)
        try:
            with pytest.raises(ConnectError, match=message):
                await task.poll()
        finally:
            await task.stop()

    await expect_error('create it: CREATE PUBLICATION "s" FOR TABLE "src"', slot_autocreate="false")
    await db.execute("CREATE TABLE bare (v int); CREATE ROLE reader LOGIN; GRANT ALL ON SCHEMA public TO reader")
    try:
        await expect_error("bare has no primary key", table_whitelist="src,bare")
        await expect_error("the publication cannot be created: .*CREATE PUBLICATION", connection_user="reader")
        await db.execute("CREATE PUBLICATION s FOR TABLE src")
        await expect_error('ADD TABLE "bare"', table_whitelist="src,bare")
        await expect_error("the replication slot cannot be created: .*pg_create_logical", connection_user="reader")
    finally:
        await db.execute("DROP TABLE bare; DROP OWNED BY reader; DROP ROLE reader")
    context.offset_storage_reader.stored = {"lsn": "0/10", "change": 1}
    await expect_error("the replication slot s is gone")


@pytest.mark.parametrize("change", ["DROP TABLE src", "ALTER TABLE src RENAME TO moved"])
@pytest.mark.parametrize("is_running", [True, False])
async def test_a_table_that_leaves_the_publication_fails_the_task(
    url: str, db: Any, change: str, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is dropped, or created again, or that takes another table's name, is not in the publication. The
    task fails after all changes before that are stored, and the error names the fix. After it, the changes of the
    table are read.
    """
    # One transaction for each read of the slot.
    monkeypatch.setattr(logical, "CHANGES_MAX", 1)
    task = await started(url, context := Context())
    try:
        assert await task.poll() == []
        if not is_running:
            await task.stop()
        await db.execute("INSERT INTO src VALUES (1, 'one')")
        await db.execute("INSERT INTO src VALUES (2, 'two')")
        await db.execute(change)
        if not is_running:
            task = await started(url, context)
        records = await polled(task) + await polled(task)
        assert ids(records) == [("c", 1), ("c", 2)]
        assert not await task.poll()
        context.offset_storage_reader.stored = records[-1].source_offset
        with pytest.raises(ConnectError, match="there is no table src"):
            await polled(task)
        await task.stop()
        await db.execute("CREATE TABLE src (id int PRIMARY KEY, v text)")
        task = await started(url, context)
        with pytest.raises(ConnectError, match=r'no table src.*ADD TABLE "src"'):
            await polled(task)
        await task.stop()
        await db.execute("ALTER PUBLICATION s ADD TABLE src")
        await db.execute("INSERT INTO src VALUES (3, 'three')")
        task = await started(url, context)
        assert ids(await polled(task)) == [("c", 3)]
        await db.execute("DROP PUBLICATION s")
        with pytest.raises(ConnectError, match='no publication s; create it: CREATE PUBLICATION "s" FOR TABLE "src"'):
            await polled(task)
    finally:
        await task.stop()


async def test_an_offset_of_another_log_is_an_error(url: str, db: Any) -> None:
    """An offset beyond the end of the log is from another server. No change is skipped, and the slot stays."""
    context = Context()
    task = await started(url, context)
    assert await task.poll() == []
    await task.stop()
    await db.execute("INSERT INTO src VALUES (1, 'one')")
    context.offset_storage_reader.stored = {"lsn": "FF/0", "change": 1}
    task = await started(url, context)
    with pytest.raises(ConnectError, match=r"FF/0.*another log"):
        await task.poll()
    await task.stop()
    context.offset_storage_reader.stored = None
    task = await started(url, context)
    assert ids(await polled(task)) == [("c", 1)]
    await task.stop()


async def test_wal_level_must_be_logical() -> None:
    """A Postgres without `wal_level=logical` is an error that names the setting."""
    with server() as plain:
        task = await started(plain, Context())
        with pytest.raises(ConnectError, match="wal_level=replica"):
            await task.poll()
        await task.stop()
