"""What a demo replays: lines for the ingest endpoint in their order of arrival, and the topology that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Plan:
    """How a set of events goes through the chain.

    `key` and `time` are the JSON pointers that the ingest endpoint takes key and event time from; `topology` is
    `module:function` with its `options`.
    """

    topic: str
    results: str
    application: str
    key: tuple[str, ...]
    time: str
    topology: str
    options: dict[str, str]
    handler: str
    unfit: str = "event that cannot be taken"
    """What one of the events is called that must become a dead letter."""

    @property
    def late(self) -> str:
        return f"{self.topic}-late"

    @property
    def dead_letters(self) -> str:
        return f"{self.topic}-dlq"


class Events(Protocol):
    """A source of events."""

    plan: Plan
    unfit: int
    """How many of the lines given out so far must become dead letters, told without any topology."""

    def count(self) -> int:
        """How many there are."""
        ...

    def lines(self) -> Iterator[bytes]:
        """Each event as one line of JSON without its newline, in order of arrival."""
        ...

    def name_refusal(self, number: int, message: str) -> str:
        """What the ingest says of the event `number` (from 1), in the words of the events' own source."""
        ...
