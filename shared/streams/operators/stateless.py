"""The DSL's processors without a store: functions of a record, branches, and the check that keys are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.processor import PROCESSOR_METHODS, Processor, ProcessorContext
from penstock.shared.streams.record import Record
from penstock.shared.streams.user_code import plain, require_plain_methods

EachFunction = Callable[[Record, Callable[[Record], None]], None]
"""Takes a record and the function that forwards records."""

_ANY_KEY = object()


class Each(Processor):
    """A processor without state: calls a function with the record and `forward`.

    `at_most_once` means that the function forwards at most one record for each record, with the same key and timestamp.
    """

    sees_time = False

    def __init__(self, each: EachFunction, *, at_most_once: bool = False) -> None:
        self._each = each
        self.at_most_once = at_most_once

    def process(self, record: Record) -> None:
        self._each(record, self.context.forward)


def forward_unchanged(record: Record, forward: Callable[[Record], None]) -> None:
    """Forward a record unchanged."""
    forward(record)


class Split(Processor):
    """Forwards a record to the child of the first predicate that is true; later predicates are not called."""

    sees_time = False

    def __init__(self, branches: tuple[tuple[Callable[[Record], bool], str], ...]) -> None:
        self._branches = branches

    def process(self, record: Record) -> None:
        for predicate, child in self._branches:
            if predicate(record):
                self.context.forward(record, to=child)
                return


class DropDeletions(Processor):
    """Drops records without a value: retracted windows and deleted rows, which no aggregation may count."""

    sees_time = False

    def process(self, record: Record) -> None:
        if record.value is None:
            self.context.count_skipped("null value")
        else:
            self.context.forward(record)


class _SameKeyContext:
    """A context whose `forward` raises ConfigError, during `process`, for a key other than that of the given record."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self.key: Any = _ANY_KEY

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def forward(self, record: Record, to: str | None = None) -> None:
        # A changed key would need another partition, and its state would be in the wrong task. FixedKeyRecord (KIP-820)
        # prevents this in Kafka Streams.
        # The forward of anything but a Record raises TypeError.
        if self.key is not _ANY_KEY and getattr(record, "key", self.key) != self.key:
            raise ConfigError(
                f"process_values: the processor forwards the key {record.key!r} for a record with the key "
                f"{self.key!r}; process() is for processors that change keys: it sends their records to the right task"
            )
        self._context.forward(record, to)


class SameKey(Processor):
    """Runs a processor that must not change keys."""

    def __init__(self, processor: Processor) -> None:
        name = type(processor).__name__
        require_plain_methods(name, processor, PROCESSOR_METHODS)
        self._init = plain(f"{name}.init()", processor.init)
        self._process = plain(f"{name}.process()", processor.process)
        self._commit = plain(f"{name}.commit()", processor.commit)
        self._close = plain(f"{name}.close()", processor.close)
        self._own: _SameKeyContext

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._own = _SameKeyContext(context)
        self._init(cast("ProcessorContext", self._own))

    def process(self, record: Record) -> None:
        self._own.key = record.key
        try:
            self._process(record)
        finally:
            self._own.key = _ANY_KEY

    def commit(self) -> None:
        self._commit()

    def close(self) -> None:
        self._close()
