"""A connector's converters and transforms as one step, with the error handling around it.

The quick way converts whole columns: where every value has one schema, no record fails and there are no transforms,
nothing is decided record by record. Whatever is not so goes the slow way, stage by stage, which finds out who failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.shared.common.clock import Clock
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord
from penstock.shared.connect.converter import Converter, HeaderConverter
from penstock.shared.connect.errors import DataError, MoreNeeded
from penstock.shared.connect.record import Header, SinkRecord, SourceRecord
from penstock.shared.connect.runtime.error_handling import (
    Failure,
    Interrupted,
    RetryWaits,
    RetryWithToleranceOperator,
    Stage,
)
from penstock.shared.connect.runtime.transformation_chain import TransformationChain, TransformationStage

log = get_logger(__name__)

T = TypeVar("T")
Report = Callable[[ConsumerRecord | SourceRecord, Failure], Awaitable[None]]
"""Logs a failure and makes it a dead letter, as the connector's settings say."""
FETCHES_MAX = 10
"""A converter that still needs more after so many fetches for one record has failed."""


class Failed(Exception):  # carries a failure up to the record's loop
    """One record's failure, within this module."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass
class Conversion:
    """What turns Kafka's records into a sink's, and a source's into Kafka's."""

    key: Converter
    value: Converter
    header: HeaderConverter
    chain: TransformationChain
    operator: RetryWithToleranceOperator
    clock: Clock
    report: Report
    waits: RetryWaits

    async def sink_records(self, columns: Columns) -> list[SinkRecord]:
        """The records of one partition for `put`; those that failed and are tolerated are left out.

        Raises ToleranceExceeded, after reporting, where they are not; Interrupted where a wait was given up.
        """
        if not self.chain and columns.headers is None and (records := self._quickly(columns)) is not None:
            return records
        found = []
        for record in columns.records():
            try:
                converted = await self._sink_record(record)
            except Failed as failed:
                await self.failed(record, failed.failure)
                continue
            if converted is not None:
                found.append(converted)
        return found

    def _quickly(self, columns: Columns) -> list[SinkRecord] | None:
        topic, partition = columns.topic, columns.partition
        try:
            keys = self.key.to_connect_values(topic, columns.keys)
            values = self.value.to_connect_values(topic, columns.values)
        except Exception:  # whoever failed is found on the slow way
            return None
        if keys is None or values is None:
            return None
        (key_schema, key_list), (value_schema, value_list) = keys, values
        rows = zip(key_list, value_list, columns.timestamps.tolist(), columns.offsets.tolist(), strict=True)
        return [
            SinkRecord(
                topic, partition, key_schema, key, value_schema, value,
                timestamp=timestamp, kafka_offset=offset,
            )
            for key, value, timestamp, offset in rows
        ]  # fmt: skip

    async def _sink_record(self, record: ConsumerRecord) -> SinkRecord | None:
        topic, headers = record.topic, record.headers
        key_schema, key = await self._stage(
            Stage.KEY_CONVERTER, self.key, lambda: self.key.to_connect_data(topic, record.key, headers)
        )
        value_schema, value = await self._stage(
            Stage.VALUE_CONVERTER, self.value, lambda: self.value.to_connect_data(topic, record.value, headers)
        )
        converted = []
        for name, data in headers:
            schema, one = await self._stage(
                Stage.HEADER_CONVERTER,
                self.header,
                lambda name=name, data=data: self.header.to_connect_header(topic, name, data),  # type: ignore[misc]
            )
            converted.append(Header(name, one, schema))
        made = SinkRecord(
            topic, record.partition, key_schema, key, value_schema, value,
            timestamp=record.timestamp if record.timestamp >= 0 else None, headers=tuple(converted),
            kafka_offset=record.offset, original_topic=topic, original_partition=record.partition,
        )  # fmt: skip
        transformed: SinkRecord | None = await self._transformed(made)
        return transformed

    async def producer_record(self, record: SourceRecord) -> ProducerRecord | None:
        """A source's record for Kafka; None: a transform dropped it, or it failed and that is tolerated.

        Raises as `sink_records` does.
        """
        try:
            made = await self._transformed(record)
            return None if made is None else await self._producer_record(made)
        except Failed as failed:
            await self.failed(record, failed.failure)
            return None

    async def _producer_record(self, record: SourceRecord) -> ProducerRecord:
        topic = record.topic
        headers = []
        for header in record.headers:
            data = await self._stage(
                Stage.HEADER_CONVERTER,
                self.header,
                lambda header=header: self.header.from_connect_header(  # type: ignore[misc]
                    topic, header.name, header.schema, header.value
                ),
            )
            headers.append((header.name, data))
        key = await self._stage(
            Stage.KEY_CONVERTER, self.key, lambda: self.key.from_connect_data(topic, record.key_schema, record.key)
        )
        value = await self._stage(
            Stage.VALUE_CONVERTER,
            self.value,
            lambda: self.value.from_connect_data(topic, record.value_schema, record.value),
        )
        timestamp = record.timestamp
        if timestamp is not None and timestamp < 0:
            raise DataError(f"Invalid record timestamp {timestamp}")
        return ProducerRecord(topic, value, key, tuple(headers), record.kafka_partition, timestamp)

    async def _transformed(self, record: Any) -> Any:
        current = record
        for stage in self.chain.stages:
            if current is None:
                return None
            current = await self._stage(Stage.TRANSFORMATION, stage.transformation, _applied(stage, current))
        return current

    async def _stage(self, stage: Stage, executing: object, operation: Callable[[], T]) -> T:
        """Run one operation, again after a while where its error is retriable, after a fetch where it needs more."""
        try:
            return operation()
        except Exception as e:  # whatever a user's converter or transform raises
            error: Exception = e
        self.waits.begin(started_ms := self.clock.monotonic_ms())
        try:
            attempt, fetches = 1, 0
            while True:
                try:
                    if isinstance(error, MoreNeeded) and fetches < FETCHES_MAX:
                        await self.waits.wait_for(error.fetch())
                        fetches += 1
                    else:
                        await self._wait(Failure(stage, type(executing), error, attempt), started_ms)
                        attempt += 1
                    return operation()
                except (Failed, Interrupted):
                    raise
                except Exception as e:  # of the registry's client, or again the operation's
                    error = e
        finally:
            self.waits.end()

    async def _wait(self, failure: Failure, started_ms: int) -> None:
        """Until the operation is tried again; raises Failed where it is not."""
        now_ms = self.clock.monotonic_ms()
        wait_ms = self.operator.retry_after(failure.error, failure.attempt, started_ms, now_ms)
        if wait_ms is None:
            raise Failed(failure) from failure.error
        self.waits.failed(failure.stage.name, failure.error, now_ms)
        await self.waits.wait_for(asyncio.sleep(wait_ms / 1000))

    async def failed(self, record: ConsumerRecord | SourceRecord, failure: Failure) -> None:
        """Report a failure, and raise ToleranceExceeded where it is not tolerated."""
        await self.report(record, failure)
        self.operator.failed(failure, self.clock.now_ms())


def _applied(stage: TransformationStage, record: Any) -> Callable[[], Any]:
    return lambda: stage.apply(record)
