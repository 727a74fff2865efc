"""The events of a demo: lines for the ingest endpoint in order of arrival, and the topology that processes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The configuration of the pipeline for a set of events.

    `key` and `time` are ingest's JSON pointers to the key and the event time. `topology` is a `module:function` that is
    called with `options`.
    """

    topic: str
    results: str
    application: str
    key: tuple[str, ...]
    time: str
    topology: str
    options: dict[str, str]
    handler: str
    unfit: str
    """The name of an event that must become a dead letter."""

    @property
    def late(self) -> str:
        return f"{self.topic}-late"

    @property
    def dead_letters(self) -> str:
        return f"{self.topic}-dlq"


class DemoEvents(Protocol):
    """A source of the demo's events."""

    plan: PipelinePlan
    unfit: int
    """The number of yielded lines that must become dead letters, counted without the topology."""

    def count(self) -> int:
        """Return the number of events."""
        ...

    def lines(self) -> Iterator[bytes]:
        """Yield each event as one line of JSON without its newline, in order of arrival."""
        ...

    def name_rejection(self, number: int, message: str) -> str:
        """Return ingest's error `message` with the event's name in its source. `number` counts events from 1."""
        ...
