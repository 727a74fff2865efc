"""Queries to changelog and lake, from the command line or from HTTP."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.settings import KafkaSettings


class WindowQuery(Protocol):
    """A query. `SessionsSettings` describes each property."""

    @property
    def kafka(self) -> KafkaSettings: ...
    @property
    def application(self) -> str: ...
    @property
    def lake(self) -> str | None: ...
    @property
    def lake_options(self) -> dict[str, str]: ...
    @property
    def store(self) -> str | None: ...
    @property
    def keys(self) -> KeyRange: ...
    @property
    def from_(self) -> str: ...
    @property
    def to(self) -> str: ...
    @property
    def kafka_timeout_ms(self) -> int: ...
    @property
    def timeout_name(self) -> str: ...
    @property
    def lake_name(self) -> str: ...
    @property
    def rows_max(self) -> int: ...
    @property
    def status(self) -> Literal["open", "closed", "all"]: ...


class WindowQueryOptions(NamedTuple):
    """A query that does not come from a command line.

    `timeout_name` and `lake_name` are the settings that `kafka_timeout_ms` and `lake` come from.
    """

    kafka: KafkaSettings
    application: str
    lake: str | None
    lake_options: dict[str, str]
    store: str | None
    keys: KeyRange
    from_: str
    to: str
    kafka_timeout_ms: int
    rows_max: int
    status: Literal["open", "closed", "all"] = "all"
    timeout_name: str = "queries.changelog_timeout_ms"
    lake_name: str = "streams.lake"
