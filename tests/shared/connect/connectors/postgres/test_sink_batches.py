"""How the Postgres sink writes a batch with records that cannot be rows, and creates tables, without a server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.shared.connect.connectors.postgres.database import driver
from penstock.shared.connect.connectors.postgres.sink import PostgresSinkTask
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord
from tests.shared.connect.connectors.sink_context import A, Context, Reporter, record


class FakeDatabase:
    """A connection to a database with one table, of columns that take any value. It has no constraints.

    `before_copy` is called with the rows of each COPY, which it may reject, and `before_create` before a CREATE TABLE.
    """

    def __init__(self, *columns: str) -> None:
        self.columns = list(columns)
        self.rows: list[dict[str, Any]] = []
        self.uncommitted: list[dict[str, Any]] = []
        self.before_copy: Callable[[list[Any]], None] = lambda _rows: None
        self.before_create: Callable[[], None] = lambda: None

    def is_closed(self) -> bool:
        return False

    def transaction(self) -> FakeDatabase:
        return self

    async def start(self) -> None:
        self.uncommitted = []

    async def commit(self) -> None:
        self.rows += self.uncommitted

    async def rollback(self) -> None:
        self.uncommitted = []

    async def fetch(self, statement: str, *args: Any) -> list[dict[str, Any]]:
        return [{"name": name, "type": "bigint", "generated": False} for name in self.columns]

    async def fetchval(self, statement: str, *args: Any) -> None:
        return None

    async def execute(self, statement: str) -> None:
        if statement.startswith("CREATE TABLE"):
            self.before_create()
            if self.columns:
                return
        if "TABLE" in statement:
            self.columns += re.findall(r'"(\w+)" bigint', statement)

    async def copy_records_to_table(self, name: str, *, records: list[Any], columns: Any, schema_name: Any) -> None:
        self.before_copy(records)
        self.uncommitted += [dict(zip(columns, row, strict=True)) for row in records]


async def started(database: FakeDatabase, monkeypatch: pytest.MonkeyPatch, **settings: str) -> PostgresSinkTask:
    """A task that writes to this database. In names of settings an underscore stands for a dot."""

    async def connect() -> FakeDatabase:
        return database

    task = PostgresSinkTask()
    monkeypatch.setattr(task, "_connect_if_needed", connect)
    task.context = Context(Reporter())
    given = {name.replace("_", "."): value for name, value in settings.items()}
    await task.start({"name": "c", "connection.url": "postgresql://db/shop", **given})
    return task


def reported(task: PostgresSinkTask) -> list[int]:
    reporter = task.context.errant_record_reporter
    assert isinstance(reporter, Reporter)
    return [offset for _, offset in reporter.reported]


def batch(*values: dict[str, int] | None) -> list[SinkRecord]:
    return [record(A, offset, value) for offset, value in enumerate(values)]


@pytest.mark.parametrize(("size", "errant", "failures"), [(2, 1, 1), (5, 0, 1), (8, 5, 2)])
async def test_no_record_is_rejected_for_an_error_that_is_over(
    size: int, errant: int, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records are written if another session removes an error's cause, such as the missing row of a foreign key,
    during the search for the rejected record.
    """
    database = FakeDatabase("id")
    left = failures

    def fail(rows: list[Any]) -> None:
        nonlocal left
        if (errant,) in rows and left:
            left -= 1
            raise driver().ForeignKeyViolationError("no row has this key")

    database.before_copy = fail
    task = await started(database, monkeypatch)
    await task.put(batch(*({"id": number} for number in range(size))))
    assert (reported(task), [row["id"] for row in database.rows]) == ([], list(range(size)))


@pytest.mark.parametrize("size", range(1, 10))
async def test_only_the_rejected_record_is_left_out(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other records of its batch are written, wherever it is."""
    for errant in range(size):
        database = FakeDatabase("id")

        def reject(rows: list[Any], errant: int = errant) -> None:
            if (errant,) in rows:
                raise driver().ForeignKeyViolationError("no row has this key")

        database.before_copy = reject
        task = await started(database, monkeypatch)
        await task.put(batch(*({"id": number} for number in range(size))))
        rest = [number for number in range(size) if number != errant]
        assert (reported(task), [row["id"] for row in database.rows]) == ([errant], rest)


async def test_tasks_that_create_a_table_together_add_their_own_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose CREATE TABLE comes second adds the columns that the other task's table lacks."""
    database = FakeDatabase()
    database.before_create = lambda: database.columns.append("id")
    task = await started(database, monkeypatch, auto_create="true", auto_evolve="true")
    await task.put(batch({"id": 1, "note": 2}))
    assert (reported(task), database.rows) == ([], [{"id": 1, "note": 2}])


async def test_a_second_create_table_needs_auto_evolve_for_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the missing column fails the task, and no record is rejected."""
    database = FakeDatabase()
    database.before_create = lambda: database.columns.append("id")
    task = await started(database, monkeypatch, auto_create="true")
    with pytest.raises(ConnectError, match=r"no column note, and auto\.evolve is false"):
        await task.put(batch({"id": 1, "note": 2}))
    assert reported(task) == []


@pytest.mark.parametrize("size", [1, 3])
async def test_a_new_table_has_all_columns_of_a_batch_with_a_tombstone(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is no row, such as a tombstone without delete.enabled, does not reduce a new table to the columns
    of the first record.
    """
    database = FakeDatabase()
    task = await started(database, monkeypatch, auto_create="true")
    tombstones: list[None] = [None] * size
    await task.put(batch(*tombstones, {"id": 1}, *tombstones, {"id": 2, "note": 3}, *tombstones))
    assert (database.columns, database.rows) == (["id", "note"], [{"id": 1}, {"id": 2, "note": 3}])
    assert reported(task) == [at for at in range(3 * size + 2) if at not in (size, 2 * size + 1)]
