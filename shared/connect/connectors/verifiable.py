"""VerifiableSource/Sink and MockSource/Sink: connectors for tests, under the names of Kafka's tools.

Each task of the verifiable source writes rising numbers, on average at most `throughput` a second if that is positive.
It prints one JSON line for each record, unless `quiet` is set. The sink prints a line for each record that it receives,
and another one when it flushes the record. The mocks run until `mock_mode` makes them fail.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.shared.connect.config_def import NO_DEFAULT, ConfigDef, Importance, Type
from penstock.shared.connect.connector import Connector, ExactlyOnceSupport, Props, SinkConnector, SourceConnector
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord, SourceRecord
from penstock.shared.connect.schema import INT32, INT64
from penstock.shared.connect.task import Offsets, SinkTask, SourceTask

TOOLS = "org.apache.kafka.connect.tools."
BATCH_MAX = 500


def print_json_line(**fields: Any) -> None:
    """Print one JSON line on standard output, as Kafka's verifiable source and sink do."""
    sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")


class VerifiableSourceTask(SourceTask):
    kafka_class = TOOLS + "VerifiableSourceTask"

    async def start(self, props: Mapping[str, str]) -> None:
        self._name = props["name"]
        self._id = int(props.get("id", "0"))
        self._topic = props["topic"]
        self._per_second = int(props.get("throughput", "-1"))
        self._quiet = props.get("quiet", "false").lower() == "true"
        self._partition = {"id": self._id}
        stored = await self.context.offset_storage_reader.offset(self._partition)
        self._next = int(stored["seqno"]) + 1 if stored is not None else 0
        self._first = self._next
        self._started = time.monotonic()

    async def poll(self) -> list[SourceRecord]:
        count = BATCH_MAX
        if self._per_second > 0:
            due = int((time.monotonic() - self._started) * self._per_second) + 1 - (self._next - self._first)
            if due <= 0:
                await asyncio.sleep(1 / self._per_second)
                return []
            count = min(BATCH_MAX, due)
        numbers = range(self._next, self._next + count)
        self._next += count
        return [
            SourceRecord(
                self._topic, None, INT32, self._id, INT64, number,
                source_partition=self._partition, source_offset={"seqno": number},
            )
            for number in numbers
        ]  # fmt: skip

    async def commit_record(self, record: SourceRecord, metadata: object) -> None:
        if not self._quiet:
            print_json_line(
                name=self._name, task=self._id, topic=self._topic, time_ms=_now_ms(), seqno=record.value, committed=True
            )

    async def stop(self) -> None:
        """There is nothing to release."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class _PropsConnector(Connector):
    """A connector whose tasks get the connector's configuration, each with the task's number as `id`."""

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        return [{**self.props, "id": str(number)} for number in range(max_tasks)]


class VerifiableSourceConnector(_PropsConnector, SourceConnector):
    """Writes rising numbers."""

    kafka_class = TOOLS + "VerifiableSourceConnector"
    task_class = VerifiableSourceTask

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("topic", Type.STRING, NO_DEFAULT, Importance.HIGH, "Topic to write to.")
            .define(
                "throughput",
                Type.LONG,
                -1,
                Importance.MEDIUM,
                "Maximum number of records a second. 0 or -1: no limit.",
            )
            .define("quiet", Type.BOOLEAN, False, Importance.LOW, "Whether the output to standard output is disabled.")
        )

    def exactly_once_support(self, props: Props) -> ExactlyOnceSupport:
        return ExactlyOnceSupport.SUPPORTED


class VerifiableSinkTask(SinkTask):
    kafka_class = TOOLS + "VerifiableSinkTask"

    async def start(self, props: Mapping[str, str]) -> None:
        self._name = props["name"]
        self._id = int(props.get("id", "0"))
        self._unflushed: list[SinkRecord] = []

    async def put(self, records: list[SinkRecord]) -> None:
        self._print_sink_records(records, flushed=False)
        self._unflushed += records

    async def flush(self, offsets: Offsets) -> None:
        self._print_sink_records(self._unflushed, flushed=True)
        self._unflushed = []

    def _print_sink_records(self, records: list[SinkRecord], *, flushed: bool) -> None:
        for record in records:
            print_json_line(
                name=self._name, task=self._id, topic=record.topic, time_ms=_now_ms(),
                seqno=record.value, offset=record.kafka_offset, flushed=flushed,
            )  # fmt: skip

    async def stop(self) -> None:
        """There is nothing to release."""


class VerifiableSinkConnector(_PropsConnector, SinkConnector):
    """Prints the records that it receives."""

    kafka_class = TOOLS + "VerifiableSinkConnector"
    task_class = VerifiableSinkTask

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()


MODES = ("none", "connector-failure", "task-failure")


def mock_config() -> ConfigDef:
    """The settings of both mocks."""
    return (
        ConfigDef()
        .define("mock_mode", Type.STRING, "none", Importance.LOW, f"Failure to simulate: {', '.join(MODES)}.")
        .define("delay_ms", Type.LONG, 15_000, Importance.LOW, "Delay between the start and the failure.")
    )


class _MockConnector(_PropsConnector):
    """Fails if `mock_mode` is connector-failure."""

    _failing: asyncio.Task[None] | None = None

    async def start(self, props: Props) -> None:
        super().start(props)
        if props.get("mock_mode") == "connector-failure":
            self._failing = asyncio.create_task(self._fail_after_delay(int(props.get("delay_ms", "15000"))))

    async def _fail_after_delay(self, delay_ms: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        self.context.raise_error(ConnectError("mock_mode=connector-failure"))

    async def stop(self) -> None:
        if self._failing is not None:
            self._failing.cancel()


class _Failing:
    """With `mock_mode=task-failure`, `check` raises an error once `delay_ms` has passed."""

    def __init__(self, props: Mapping[str, str]) -> None:
        fails = props.get("mock_mode") == "task-failure"
        self._at = time.monotonic() + int(props.get("delay_ms", "15000")) / 1000 if fails else None

    def check(self) -> None:
        if self._at is not None and time.monotonic() >= self._at:
            raise ConnectError("mock_mode=task-failure")


class MockSinkTask(SinkTask):
    kafka_class = TOOLS + "MockSinkTask"

    async def start(self, props: Mapping[str, str]) -> None:
        self._failing = _Failing(props)

    async def put(self, records: list[SinkRecord]) -> None:
        self._failing.check()

    async def stop(self) -> None:
        """There is nothing to release."""


class MockSinkConnector(_MockConnector, SinkConnector):
    """Takes records and writes nothing."""

    kafka_class = TOOLS + "MockSinkConnector"
    task_class = MockSinkTask

    @classmethod
    def config(cls) -> ConfigDef:
        return mock_config()


class MockSourceTask(SourceTask):
    kafka_class = TOOLS + "MockSourceTask"

    async def start(self, props: Mapping[str, str]) -> None:
        self._failing = _Failing(props)

    async def poll(self) -> None:
        self._failing.check()
        await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """There is nothing to release."""


class MockSourceConnector(_MockConnector, SourceConnector):
    """Returns no records."""

    kafka_class = TOOLS + "MockSourceConnector"
    task_class = MockSourceTask

    @classmethod
    def config(cls) -> ConfigDef:
        return mock_config()
