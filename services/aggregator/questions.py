"""What is asked of changelog and lake, from a command line or not."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from shared.common.key_range import KeyRange
from shared.common.settings import KafkaSettings


class Question(Protocol):
    """What is asked; `SessionsSettings` says what each means."""

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
    def skip_changelog_records(self) -> str: ...
    @property
    def kafka_timeout_ms(self) -> int: ...
    @property
    def rows_max(self) -> int: ...
    @property
    def status(self) -> Literal["open", "closed", "all"]: ...


class Asked(NamedTuple):
    """A question that does not come from a command line."""

    kafka: KafkaSettings
    application: str
    lake: str | None
    lake_options: dict[str, str]
    store: str | None
    keys: KeyRange
    from_: str
    to: str
    skip_changelog_records: str
    kafka_timeout_ms: int
    rows_max: int
    status: Literal["open", "closed", "all"] = "all"
