"""The status topic: its records, compared with those of a real Kafka Connect, and the latest statuses."""

from __future__ import annotations

import asyncio

import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import DeliveryTimeout, KafkaTimeout, SerializationError
from penstock.shared.common.records import RecordMetadata
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.errors import trace_of
from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage import status_store
from penstock.shared.connect.storage.kafka_based_log import KafkaBasedLog, LogTopic
from penstock.shared.connect.storage.status_cache import StatusCache
from penstock.shared.connect.storage.status_records import (
    Forgotten,
    Status,
    StatusRecord,
    TopicStatus,
    decode,
    encode,
)
from penstock.shared.connect.storage.status_store import KafkaStatusStore
from penstock.shared.testing.fake_broker import FakeCluster
from tests.shared.connect.recordings import recorded_records

TASK = ConnectorTaskId("c", 1)


def test_recorded_statuses_are_read_and_written_alike() -> None:
    """Every recorded status record is decoded and encoded to the same bytes."""
    rows = recorded_records("connect-status")
    assert len(rows) > 70
    for row in rows:
        key, value = row["key"].encode(), row["value"] and row["value"].encode()
        record = decode(key, value)
        assert record is not None
        assert encode(record) == (key, value)


@pytest.mark.parametrize(
    "record",
    [
        Status("a-b", State.FAILED, "w", 3, None, "Traceback"),
        Status(ConnectorTaskId("a-b", 2), State.RUNNING, "w", 3, "1.0"),
        TopicStatus("t:x", "c", 0, 17),
        Forgotten("a"),
        Forgotten(ConnectorTaskId("a", 1)),
        Forgotten(("t", "c")),
    ],
)
def test_statuses_round_trip(record: StatusRecord) -> None:
    """A status record is decoded unchanged."""
    assert decode(*encode(record)) == record


def test_a_trace_that_is_not_unicode_is_written_with_escapes() -> None:
    """A lone surrogate in an error's text, as Python makes of an invalid byte, is escaped in the trace."""
    line = b"caf\xe9".decode(errors="surrogateescape")
    written = Status(TASK, State.FAILED, "w", 1, trace=trace_of(ValueError(line)))
    status = decode(*encode(written))
    assert isinstance(status, Status)
    assert (status.state, status.trace) == (State.FAILED, r"ValueError: caf\udce9")


async def test_a_status_that_cannot_be_written_delays_no_other() -> None:
    """A status that cannot be encoded is logged, and the next one is written."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin, Producer(kafka) as producer:
            store = KafkaStatusStore(kafka, admin, producer, LogTopic("statuses", 1))
            await store.start()
            store.put(Status("a", State.RUNNING, "w", 1, version="\udcff"))
            store.put(Status("b", State.RUNNING, "w", 1))
            await store.flush()
            assert store.cache.connectors() == ["b"]
            await store.stop()


async def test_a_status_is_written_once_kafka_takes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status that Kafka does not acknowledge is sent again, unless there is a newer one of the same id. It delays no
    other.
    """
    send, failures = KafkaBasedLog.send, [DeliveryTimeout("not acknowledged"), KafkaTimeout("no response")]
    sent: list[bytes] = []

    async def flaky(topic: KafkaBasedLog, key: bytes, value: bytes | None) -> RecordMetadata:
        sent.append(key)
        if key == b"status-connector-a" and failures:
            raise failures.pop(0)
        return await send(topic, key, value)

    monkeypatch.setattr(KafkaBasedLog, "send", flaky)
    monkeypatch.setattr(status_store, "RETRY_MS", 1)
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin, Producer(kafka) as producer:
            store = KafkaStatusStore(kafka, admin, producer, LogTopic("statuses", 1))
            await store.start()
            store.put(Status("a", State.RUNNING, "w", 1))
            await asyncio.sleep(0)
            store.put(Status("b", State.RUNNING, "w", 1))
            store.put(Status("a", State.FAILED, "w", 1))
            await store.flush()
            await store.stop()
        assert sent == [b"status-connector-a", b"status-connector-b", b"status-connector-a", b"status-connector-a"]
        # The two are sent at the same time, in any order.
        written = sorted((decode(record.key, record.value) for record in cluster.records("statuses")), key=repr)
        assert written == [Status("a", State.FAILED, "w", 1), Status("b", State.RUNNING, "w", 1)]


def test_malformed_statuses_are_errors() -> None:
    """A malformed status is a SerializationError, and keys of other types are ignored."""
    for key, value in (
        (b"status-task-x", b"{}"),
        (b"status-connector-a", b"{}"),
        (b"status-connector-a", b'{"state":"ASLEEP","worker_id":"w","generation":1}'),
        (b"status-topic-no-connector", b"{}"),
        (b"status-connector-a", b"\xff"),
        (b"status-connector-a", b"[" * 100_000),
    ):
        with pytest.raises(SerializationError):
            decode(key, value)
    assert decode(b"else", b"{}") is None


def test_the_newest_counts() -> None:
    """The latest status of each connector, task and topic is kept."""
    cache = StatusCache()
    for record in (
        Status("c", State.RUNNING, "w", 1),
        Status("c", State.PAUSED, "w", 1),
        Status(TASK, State.RUNNING, "w", 1),
        Status(ConnectorTaskId("c", 0), State.FAILED, "v", 1, trace="why"),
        TopicStatus("t", "c", 0, 5),
    ):
        cache.apply(record)
    status = cache.get("c")
    assert status is not None
    assert status.state is State.PAUSED
    assert [task.task for task in cache.tasks("c")] == [0, 1]
    assert [t.topic for t in cache.topics("c")] == ["t"]
    assert cache.connectors() == ["c"]


def test_tombstones_delete_statuses() -> None:
    """A tombstone deletes a status; for an unknown one it does nothing."""
    cache = StatusCache()
    cache.apply(Status(TASK, State.RUNNING, "w", 1))
    cache.apply(Status("c", State.RUNNING, "w", 1))
    cache.apply(TopicStatus("t", "c", 0, 5))
    for record in (
        Forgotten("c"),
        Forgotten(("t", "c")),
        Forgotten(TASK),
        Forgotten("x"),
    ):
        cache.apply(record)
    assert (cache.get("c"), cache.get(TASK), cache.tasks("c"), cache.topics("c")) == (None, None, {}, [])


@pytest.mark.parametrize(
    ("worker", "generation", "may"), [("me", 1, True), ("other", 1, True), ("other", 2, True), ("other", 3, False)]
)
def test_a_safe_status_never_overwrites_a_later_owner(worker: str, generation: int, may: bool) -> None:
    """A status may overwrite the worker's own or one of no later generation."""
    cache = StatusCache()
    cache.apply(Status(TASK, State.RUNNING, worker, generation))
    assert cache.may_write(Status(TASK, State.UNASSIGNED, "me", 2)) is may
    assert cache.may_write(Status("c", State.UNASSIGNED, "me", 2))
