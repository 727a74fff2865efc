"""Reads the result of one query in batches, through a cursor that can outlive its transaction.

While the transaction is open, it keeps a snapshot of the table, and Postgres cannot remove dead rows. If no batch is
requested for `idle_ms` (the task is paused, or Kafka accepts no records), the transaction is committed. The cursor is
WITH HOLD: at the commit Postgres stores the remaining rows in its own files, and reading continues from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.connect.connectors.postgres.columns import Column, columns_of_query

log = get_logger(__name__)

CURSOR = "penstock_bulk"
HOLD_S = 3_600
"""The time limit for Postgres to store the remaining rows, all of which it writes to disk."""


class BulkRead:
    """A read of a query's result in progress, on a connection of the caller."""

    def __init__(self, connection: Any, fetch: Any, idle_ms: int) -> None:
        self._connection = connection
        self._fetch = fetch
        self._idle_ms = idle_ms
        self._holding: asyncio.Task[None] | None = None
        self._is_committing = False
        self.is_held = False

    def __repr__(self) -> str:
        return f"<BulkRead{', held' if self.is_held else ''}>"

    @classmethod
    async def begun(cls, connection: Any, statement: str, most: int, idle_ms: int) -> BulkRead:
        """Start a read of at most `most` rows at a time."""
        await connection.execute("BEGIN READ ONLY")
        await connection.execute(f"DECLARE {CURSOR} NO SCROLL CURSOR WITH HOLD FOR {statement}")
        return cls(connection, await connection.prepare(f"FETCH {most} FROM {CURSOR}"), idle_ms)

    @property
    def columns(self) -> list[Column]:
        """The columns of the result."""
        return columns_of_query(self._fetch)

    async def rows(self) -> Sequence[Any]:
        """Return the next rows. Fewer rows than requested are the last ones.

        If no rows are requested for `idle_ms`, the transaction is committed. If this commit fails, the next call raises
        its error.
        """
        await self._keep_transaction_open()
        found: Sequence[Any] = await self._fetch.fetch()
        if not self.is_held:
            self._holding = asyncio.create_task(self._hold_cursor_after_idle_time(), name="hold the cursor")
        return found

    async def end(self) -> None:
        """Close the cursor and end the transaction, if it is still open."""
        await self._keep_transaction_open()
        await self._connection.execute(f"CLOSE {CURSOR}")
        if not self.is_held:
            await self._connection.execute("COMMIT")

    async def abandon(self) -> None:
        """Stop reading. The caller must then close the connection."""
        holding = self._holding
        self._holding = None
        if holding is not None:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    async def hold(self) -> None:
        """Make Postgres store the unread rows, and leave no transaction open."""
        await self._connection.execute("COMMIT", timeout=HOLD_S)
        self.is_held = True

    async def _hold_cursor_after_idle_time(self) -> None:
        await asyncio.sleep(self._idle_ms / 1000)
        self._is_committing = True
        await self.hold()
        log.info("Postgres stores the unread rows of a query, since the task did not poll", idle_ms=self._idle_ms)

    async def _keep_transaction_open(self) -> None:
        """Prevent the commit after `idle_ms`. If the commit has begun, wait for its end."""
        holding = self._holding
        self._holding = None
        if holding is None:
            return
        if not self._is_committing:
            holding.cancel()
        await asyncio.wait([holding])
        if not holding.cancelled():
            holding.result()
