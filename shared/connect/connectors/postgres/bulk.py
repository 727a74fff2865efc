"""One reading of everything, a part of it at a time: a cursor that can outlive its transaction.

The transaction keeps one view of the table, and keeps Postgres from removing dead rows for as long as it is open. Where
no part is asked for in `idle_ms` (the task is paused, or Kafka takes no records) it is committed: the cursor is WITH
HOLD, so Postgres then sets the rest of its rows aside, in files of its own, and the reading goes on from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.shared.common.log import get_logger

log = get_logger(__name__)

CURSOR = "penstock_bulk"
HOLD_S = 3_600
"""How long Postgres may take to set the rest aside: it writes all of it."""


class BulkRead:
    """A reading under way on a connection of its own."""

    def __init__(self, connection: Any, fetch: Any, idle_ms: int) -> None:
        self._connection, self._fetch, self._idle_ms = connection, fetch, idle_ms
        self._holding: asyncio.Task[None] | None = None
        self._is_committing = self.is_held = False

    def __repr__(self) -> str:
        return f"<BulkRead{', held' if self.is_held else ''}>"

    @classmethod
    async def begun(cls, connection: Any, statement: str, most: int, idle_ms: int) -> BulkRead:
        """Begin, to read at most so many rows at a time."""
        await connection.execute("BEGIN READ ONLY")
        await connection.execute(f"DECLARE {CURSOR} NO SCROLL CURSOR WITH HOLD FOR {statement}")
        return cls(connection, await connection.prepare(f"FETCH {most} FROM {CURSOR}"), idle_ms)

    @property
    def attributes(self) -> Sequence[Any]:
        """The columns."""
        found: Sequence[Any] = self._fetch.get_attributes()
        return found

    async def rows(self) -> Sequence[Any]:
        """The next rows, fewer than asked for at the end; what setting aside has raised meanwhile."""
        await self._settle()
        found: Sequence[Any] = await self._fetch.fetch()
        if not self.is_held:
            self._holding = asyncio.create_task(self._hold_later(), name="hold the cursor")
        return found

    async def end(self) -> None:
        """Let go of the cursor."""
        await self._settle()
        await self._connection.execute(f"CLOSE {CURSOR}")
        if not self.is_held:
            await self._connection.execute("COMMIT")

    async def abandon(self) -> None:
        """There will be no more of it: the connection is to be closed."""
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

    async def hold(self) -> None:
        """Have Postgres set aside what was not read yet, and leave no transaction open."""
        await self._connection.execute("COMMIT", timeout=HOLD_S)
        self.is_held = True

    async def _hold_later(self) -> None:
        await asyncio.sleep(self._idle_ms / 1000)
        self._is_committing = True
        await self.hold()
        log.info("the rest of a reading was set aside, since nothing asked for it", idle_ms=self._idle_ms)

    async def _settle(self) -> None:
        """Have the transaction stay open; where it is being committed already, wait for that."""
        holding, self._holding = self._holding, None
        if holding is None:
            return
        if not self._is_committing:
            holding.cancel()
        await asyncio.wait([holding])
        if not holding.cancelled():
            holding.result()
