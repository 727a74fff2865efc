"""A connector's converters and transforms as one operation, with error handling.

The fast path converts whole columns. It is used for a sink's records if there are no transforms and no headers, both
converters can convert the column at once, and no record fails. Otherwise the slow path converts record by record and
stage by stage, and so finds the record that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import NO_TIMESTAMP, Columns, ConsumerRecord, ProducerRecord
from penstock.shared.connect.converter import Converter, HeaderConverter
from penstock.shared.connect.errors import MoreNeeded
from penstock.shared.connect.record import Header, SinkRecord, SourceRecord
from penstock.shared.connect.runtime.error_handling import (
    Failure,
    Interrupted,
    RetryWaits,
    RetryWithToleranceOperator,
    Stage,
)
from penstock.shared.connect.runtime.transformation_chain import TransformationChain

T = TypeVar("T")
Report = Callable[[ConsumerRecord | SourceRecord, Failure], Awaitable[None]]
"""Logs a failure and sends a dead letter, as the connector's settings require."""
FETCHES_MAX = 10
"""The maximum number of fetches for one key, value or header. If the converter then needs another, it has failed."""


class Failed(Exception):
    """One record's failure. `sink_records` and `producer_record` handle it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass
class Conversion:
    """Converts records of Kafka for a sink, and records of a source for Kafka."""

    key: Converter
    value: Converter
    header: HeaderConverter
    chain: TransformationChain
    operator: RetryWithToleranceOperator
    clock: Clock
    report: Report
    waits: RetryWaits

    async def sink_records(self, columns: Columns) -> list[SinkRecord]:
        """Return the records of one partition for `put`, without those that a transform dropped or whose errors are
        tolerated.

        Raises ToleranceExceeded if an error is not tolerated, after the error was reported. Raises Interrupted if a
        stop or pause of the task ends a wait.
        """
        if (
            not self.chain
            and columns.headers is None
            and (records := self._convert_columns_at_once(columns)) is not None
        ):
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

    def _convert_columns_at_once(self, columns: Columns) -> list[SinkRecord] | None:
        topic = columns.topic
        partition = columns.partition
        try:
            keys = self.key.to_connect_values(topic, columns.keys)
            values = self.value.to_connect_values(topic, columns.values)
        except Exception:
            # The caller then converts each record alone, and handles those that fail.
            return None
        if keys is None or values is None:
            return None
        key_schema, key_list = keys
        value_schema, value_list = values
        rows = zip(key_list, value_list, columns.timestamps.tolist(), columns.offsets.tolist(), strict=True)
        return [
            SinkRecord(
                topic, partition, key_schema, key, value_schema, value,
                timestamp=timestamp if timestamp >= 0 else None,
                kafka_offset=offset, original_topic=topic, original_partition=partition,
            )
            for key, value, timestamp, offset in rows
        ]  # fmt: skip

    async def _sink_record(self, record: ConsumerRecord) -> SinkRecord | None:
        topic = record.topic
        headers = record.headers
        key_schema, key = await self._run_stage(
            Stage.KEY_CONVERTER, self.key, lambda: self.key.to_connect_data(topic, record.key, headers)
        )
        value_schema, value = await self._run_stage(
            Stage.VALUE_CONVERTER, self.value, lambda: self.value.to_connect_data(topic, record.value, headers)
        )
        converted = []
        for name, data in headers:
            schema, one = await self._run_stage(
                Stage.HEADER_CONVERTER,
                self.header,
                partial(self.header.to_connect_header, topic, name, data),
            )
            converted.append(Header(name, one, schema))
        made = SinkRecord(
            topic, record.partition, key_schema, key, value_schema, value,
            timestamp=record.timestamp if record.timestamp >= 0 else None, headers=tuple(converted),
            kafka_offset=record.offset, original_topic=topic, original_partition=record.partition,
        )  # fmt: skip
        transformed: SinkRecord | None = await self._apply_transforms(made)
        return transformed

    async def producer_record(self, record: SourceRecord) -> ProducerRecord | None:
        """Return a source's record for Kafka. Returns None if a transform dropped it, or if its error is tolerated.

        Raises as `sink_records` does, and DataError for an invalid topic, header or timestamp: these errors are never
        tolerated.
        """
        try:
            made = await self._apply_transforms(record)
            return None if made is None else await self._producer_record(made)
        except Failed as failed:
            await self.failed(record, failed.failure)
            return None

    async def _producer_record(self, record: SourceRecord) -> ProducerRecord:
        topic = record.topic
        # Raised outside the stages: as for an invalid time below, the task fails, and not only the record.
        if not isinstance(topic, str):
            raise DataError(f"Invalid record topic {topic!r}: it must be a text")
        headers = []
        for header in record.headers:
            if not isinstance(header, Header):
                raise DataError(f"Invalid record header: it is a {type(header).__name__}, and must be a Header")
            data = await self._run_stage(
                Stage.HEADER_CONVERTER,
                self.header,
                partial(self.header.from_connect_header, topic, header.name, header.schema, header.value),
            )
            headers.append((header.name, data))
        key = await self._run_stage(
            Stage.KEY_CONVERTER, self.key, lambda: self.key.from_connect_data(topic, record.key_schema, record.key)
        )
        value = await self._run_stage(
            Stage.VALUE_CONVERTER,
            self.value,
            lambda: self.value.from_connect_data(topic, record.value_schema, record.value),
        )
        # Raised outside the stages: as in Kafka Connect, an invalid time fails the task, not only the record.
        timestamp = record.timestamp
        # As in ConnectUtils.checkAndConvertTimestamp.
        if timestamp == NO_TIMESTAMP:
            timestamp = None
        elif timestamp is not None and timestamp < 0:
            raise DataError(f"Invalid record timestamp {timestamp}")
        return ProducerRecord(topic, value, key, tuple(headers), record.kafka_partition, timestamp)

    async def _apply_transforms(self, record: Any) -> Any:
        current = record
        for stage in self.chain.stages:
            if current is None:
                return None
            current = await self._run_stage(Stage.TRANSFORMATION, stage.transformation, partial(stage.apply, current))
        return current

    async def _run_stage(self, stage: Stage, executing: object, operation: Callable[[], T]) -> T:
        """Run one operation and return its result. After MoreNeeded it is repeated when the data is fetched. After a
        retriable error it is repeated after a wait, until `errors.retry.timeout` has passed: by default not at all.

        Raises Failed if there is no further attempt, and Interrupted if a stop or pause of the task ends a wait.
        """
        try:
            return operation()
        except Exception as e:
            # A user's converter or transform may raise any error.
            error: Exception = e
        self.waits.begin(started_ms := self.clock.monotonic_ms())
        try:
            attempt = 1
            fetches = 0
            while True:
                try:
                    # 1. The converter needs a schema of the registry. Fetching it is not a retry of `errors.retry.*`.
                    # 2. Any other error: `_wait_before_retry` waits for the next attempt, or raises Failed.
                    if isinstance(error, MoreNeeded) and fetches < FETCHES_MAX:
                        await self.waits.wait_for(error.fetch())
                        fetches += 1
                    else:
                        await self._wait_before_retry(Failure(stage, type(executing), error, attempt), started_ms)
                        attempt += 1
                    return operation()
                except (Failed, Interrupted):
                    raise
                except Exception as e:
                    # The fetch failed, or the operation failed again.
                    error = e
        finally:
            self.waits.end()

    async def _wait_before_retry(self, failure: Failure, started_ms: int) -> None:
        """Wait before the next attempt of the operation. Raises Failed if there is none."""
        now_ms = self.clock.monotonic_ms()
        wait_ms = self.operator.retry_after(failure.error, failure.attempt, started_ms, now_ms)
        if wait_ms is None:
            raise Failed(failure) from failure.error
        self.waits.failed(failure.stage.name, failure.error, now_ms)
        await self.waits.wait_for(asyncio.sleep(wait_ms / 1000))

    async def failed(self, record: ConsumerRecord | SourceRecord, failure: Failure) -> None:
        """Report a failure, and raise ToleranceExceeded if it is not tolerated."""
        await self.report(record, failure)
        self.operator.failed(failure, self.clock.now_ms())
