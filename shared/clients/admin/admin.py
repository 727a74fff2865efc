"""Administration of topics, configs, records, groups and offsets, over one connection of its own."""

from __future__ import annotations

from typing import Self

from penstock.shared.clients.admin.groups import GroupsAdmin
from penstock.shared.clients.connection import Connection
from penstock.shared.common.settings import KafkaSettings

DEFAULT_TIMEOUT_MS = 60_000
"""Kafka's `default.api.timeout.ms`: how long one call may take, retries included."""


class Admin(GroupsAdmin):
    """`async with Admin(kafka) as admin`: every call has a deadline and names what it failed on."""

    def __init__(self, kafka: KafkaSettings | str, *, timeout_ms: int = DEFAULT_TIMEOUT_MS) -> None:
        """`kafka` says where the brokers are: settings, or bootstrap servers as text."""
        self._connection = Connection(KafkaSettings.of(kafka))
        self._timeout_ms = timeout_ms
        self._open = False

    def __repr__(self) -> str:
        return f"<Admin {self._connection!r}>"

    async def __aenter__(self) -> Self:
        await self._connection.open()
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls after this raise IllegalState."""
        self._open = False
        await self._connection.close()
