"""Shared by the tests of tasks: a recording status listener, connectors that record their calls, and a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from penstock.connect import (
    ConfigDef,
    SinkConnector,
    SinkRecord,
    SinkTask,
    SourceConnector,
    SourceRecord,
    SourceTask,
)
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, TargetState
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.runtime.worker_config import WorkerConfig
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.connect.storage.offset_store import MemoryOffsetStore
from penstock.shared.connect.task import Offsets
from penstock.shared.testing.fake_broker import FakeCluster
from tests.virtual_time import let_pass

STRING = "org.apache.kafka.connect.storage.StringConverter"
TP = TopicPartition("t", 0)


class Store(MemoryOffsetStore):
    """Offsets in memory that a test can inspect; `topic` is the reported offset topic."""

    topic: str | None = None

    @property
    def data(self) -> dict[bytes, bytes]:
        return self.cache.raw()


class StatusRecorder:
    """A status listener that records pairs of an id and an event."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.traces: list[str] = []
        self.topics: set[str] = set()

    def of(self, id: object) -> list[str]:
        return [what for whose, what in self.events if whose == str(id)]

    def on_event(self, id: object, event: Event, trace: str | None = None) -> None:
        self.events.append((str(id), event.value))
        if trace is not None:
            self.traces.append(trace)

    def on_topic_used(self, id: object, topic: str) -> None:
        self.topics.add(topic)


class Mute(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise KeyError("no text")


class PassesSettings:
    """A connector without settings of its own, whose tasks get its config."""

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()

    async def start(self, props: Mapping[str, str]) -> None:
        self._props = dict(props)

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        return [self._props] * max_tasks


class RecordingSinkTask(SinkTask):
    """Records each call, and raises the exceptions in `raising` for the call's name, once each."""

    made: ClassVar[list[RecordingSinkTask]] = []

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.values: list[Any] = []
        self.records: list[SinkRecord] = []
        self.raising: dict[str, list[Exception]] = {}
        self.committable: Callable[[Offsets], Offsets] = lambda offsets: offsets
        self.on_put: Callable[[RecordingSinkTask, list[SinkRecord]], None] = lambda _task, _records: None
        RecordingSinkTask.made.append(self)
        type(self).prepare(self)

    prepare: ClassVar[Callable[[RecordingSinkTask], None]] = staticmethod(lambda _task: None)

    def _record(self, what: str, *more: Any) -> None:
        self.calls.append((what, *more) if more else what)
        if self.raising.get(what):
            raise self.raising[what].pop(0)

    async def start(self, props: Mapping[str, str]) -> None:
        self._record("start")

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        self._record("open", sorted(tp.partition for tp in partitions))

    async def put(self, records: list[SinkRecord]) -> None:
        if records:
            self._record("put", len(records))
            self.on_put(self, records)
            self.records += records
            self.values += [record.value for record in records]

    async def pre_commit(self, offsets: Offsets) -> Offsets:
        self._record("pre_commit", {tp.partition: offset.offset for tp, offset in offsets.items()})
        return self.committable(offsets)

    async def close(self, partitions: frozenset[TopicPartition]) -> None:
        self._record("close", sorted(tp.partition for tp in partitions))

    async def stop(self) -> None:
        self._record("stop")


class RecordingSink(PassesSettings, SinkConnector):
    """A sink whose tasks record their calls."""

    task_class = RecordingSinkTask


class RecordingSourceTask(SourceTask):
    """Returns the batches that the test puts into `batches`, and then waits."""

    made: ClassVar[list[RecordingSourceTask]] = []
    prepare: ClassVar[Callable[[RecordingSourceTask], None]] = staticmethod(lambda _task: None)

    def __init__(self) -> None:
        self.batches: asyncio.Queue[Sequence[SourceRecord] | Exception | None] = asyncio.Queue()
        self.calls: list[Any] = []
        self.committed: list[tuple[Any, bool]] = []
        self.commits = 0
        self.polls = 0
        RecordingSourceTask.made.append(self)
        type(self).prepare(self)

    async def start(self, props: Mapping[str, str]) -> None:
        self.calls.append("start")

    async def poll(self) -> Sequence[SourceRecord] | None:
        self.polls += 1
        batch = await self.batches.get()
        if isinstance(batch, Exception):
            raise batch
        return batch

    async def commit(self) -> None:
        self.commits += 1

    async def commit_record(self, record: SourceRecord, metadata: object) -> None:
        self.committed.append((record.value, metadata is not None))

    async def stop(self) -> None:
        self.calls.append("stop")


class RecordingSource(PassesSettings, SourceConnector):
    """A source whose tasks return what the test puts into `batches`."""

    task_class = RecordingSourceTask


def source_record(value: Any, position: int, topic: str = "t", file: str = "a", **more: Any) -> SourceRecord:
    return SourceRecord(
        topic, None, None, None, None, value,
        source_partition={"file": file}, source_offset={"position": position}, **more,
    )  # fmt: skip


class Running:
    """A worker on a fake cluster, with its status listener and offsets."""

    def __init__(self, cluster: FakeCluster, worker: Worker, listener: StatusRecorder, store: Store) -> None:
        self.cluster, self.worker, self.listener, self.store = cluster, worker, listener, store

    async def run(self, connector: type, target: TargetState = TargetState.STARTED, **settings: str) -> ConnectorTaskId:
        """Start one task of a connector. In names of settings an underscore stands for a dot, two for an underscore."""
        given = {name.replace("__", " ").replace("_", ".").replace(" ", "_"): settings[name] for name in settings}
        props = {"name": "c", "connector.class": f"{connector.__module__}.{connector.__name__}", **given}
        self.worker.plugins.add(connector, props["connector.class"])
        id = ConnectorTaskId("c", 0)
        await self.worker.start_task(TaskSpec(id, props, props), target, self.listener)
        return id

    async def until(self, holds: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Run the event loop until a condition holds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not holds():
            assert loop.time() < deadline, (self.listener.events, self.listener.traces)
            await let_pass(0.005)


async def turns() -> None:
    """Runs what other tasks can do without waiting."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(clock: Clock = SYSTEM_CLOCK, **settings: str) -> AsyncIterator[Running]:
    """A worker on a fake cluster with the topic `t`. In names of settings underscores stand for dots."""
    RecordingSinkTask.made.clear()
    RecordingSourceTask.made.clear()
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        props = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "key.converter": STRING,
            "value.converter": STRING,
            "offset.flush.interval.ms": "50",
            "task.restart.enable": "false",
            "connect.files.allowed": "/",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        plugins, store = Plugins.installed(), Store()
        if props.get("exactly.once.source.support") == "enabled":
            cluster.create_topic("offsets")
            store.topic = "offsets"
        config = WorkerConfig(props, resolve=plugins.any_kind)
        worker = Worker(config, plugins, store, TaskFactory(config, plugins, store, clock=clock))
        await worker.startup()
        try:
            yield Running(cluster, worker, StatusRecorder(), store)
        finally:
            await worker.shutdown()
