"""Exactly-once source tasks on the fake broker: records and offsets are in one transaction."""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing

from penstock.shared.common.errors import KafkaTimeout, RetriableError
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.runtime import abstract_source_task
from penstock.shared.connect.runtime.exactly_once_source_task import fence_producers
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from tests.shared.connect.harness import RecordingSource, RecordingSourceTask, Running, running, source_record

ENABLED = {"exactly_once_source_support": "enabled"}


def task() -> RecordingSourceTask:
    return RecordingSourceTask.made[-1]


async def started(run: Running, **settings: str) -> Any:
    made = len(RecordingSourceTask.made)
    id = await run.run(RecordingSource, **settings)
    await run.until(lambda: len(RecordingSourceTask.made) > made and task().calls)
    return id


def values(run: Running, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in run.cluster.records(topic)]


async def test_records_and_offsets_are_one_transaction() -> None:
    """Each poll's records become visible together with their offset."""
    async with running(**ENABLED) as run:
        await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2)])
        await run.until(lambda: task().commits == 1)
        assert values(run) == [b"a", b"b"]
        assert values(run, "offsets") == [b'{"position":2}']
        assert task().committed == [("a", True), ("b", True)]


async def test_offsets_have_the_key_that_is_in_the_topic() -> None:
    """A transaction's offset has its partition's key in the topic, so that a compaction keeps one of the two, and a
    reset removes both.
    """
    async with running(**ENABLED) as run:
        stored = b'["c",{"b":1,"a":2}]'  # in another order, as of a Java worker
        run.store.cache.apply(stored, b'{"position":1}')
        await started(run)
        task().batches.put_nowait(
            [SourceRecord("t", None, None, None, None, "x", source_partition={"a": 2, "b": 1}, source_offset={"n": 2})]
        )
        await run.until(lambda: task().commits == 1)
        assert [(record.key, record.value) for record in run.cluster.records("offsets")] == [(stored, b'{"n":2}')]


async def test_the_task_defines_transaction_boundaries() -> None:
    """With `transaction.boundary=connector` nothing is committed before the task commits;
    aborted records are not written and not read again.
    """
    async with running(**ENABLED) as run:
        id = await started(run, transaction_boundary="connector")
        context = task().context.transaction_context
        assert context is not None
        first = [source_record("a", 1), source_record("b", 2)]
        context.commit_transaction(first[0])
        task().batches.put_nowait(first)
        await run.until(lambda: task().commits == 1)
        assert values(run) == [b"a"]
        aborted, kept = source_record("c", 3), source_record("d", 4)
        context.abort_transaction(aborted)
        context.commit_transaction(kept)
        task().batches.put_nowait([aborted])
        task().batches.put_nowait([kept])
        await run.until(lambda: task().commits == 3)
        assert values(run) == [b"a", b"d"]
        assert values(run, "offsets") == [b'{"position":1}', b'{"position":3}', b'{"position":4}']
        assert task().committed == [("a", True), ("b", False), ("c", False), ("d", True)]
        context.abort_transaction()
        task().batches.put_nowait([source_record("e", 5)])
        await run.until(lambda: task().commits == 4)
        task().batches.put_nowait([source_record("f", 6)])
        await run.until(lambda: b"f" in [record.value for record in run.cluster.records("t", committed=False)])
        await run.worker.stop_tasks([id])
        assert values(run) == [b"a", b"d"]
        assert values(run, "offsets")[3:] == [b'{"position":5}']


@pytest.mark.parametrize("method", ["commit_record", "commit"])
async def test_an_error_after_a_commit_does_not_send_the_record_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the task's `commit_record` or `commit` is only logged, with the method: the records are in Kafka."""

    async def fail(*_args: object) -> None:
        raise RetriableError("the source is away")

    with structlog.testing.capture_logs() as logged:
        async with running(**ENABLED) as run:
            id = await started(run, transaction_boundary="connector")
            with monkeypatch.context() as patch:
                patch.setattr(task(), method, fail)
                records = [source_record("a", 1), source_record("b", 2)]
                task().context.transaction_context.commit_transaction(records[0])
                task().batches.put_nowait(records)
                await run.until(lambda: b"b" in [record.value for record in run.cluster.records("t", committed=False)])
            task().context.transaction_context.commit_transaction()
            task().batches.put_nowait([source_record("c", 3)])
            await run.until(lambda: b"c" in values(run))
            assert values(run) == [b"a", b"b", b"c"]
            assert "failure" not in run.listener.of(id)
    failed = [line for line in logged if line["event"] == "a commit method of the connector's task failed"]
    assert {(line["method"], line["error"]) for line in failed} == {(method, "RetriableError: the source is away")}


async def test_offsets_that_cannot_be_sent_fail_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retriable error of the offsets' send fails the task: the record is not sent twice in the transaction."""

    async def fail(*_args: object) -> None:
        raise KafkaTimeout("no room in the buffer")

    async with running(**ENABLED) as run:
        id = await started(run, transaction_boundary="connector")
        monkeypatch.setattr(run.worker._tasks[id]._store, "records", fail)
        record = source_record("a", 1)
        task().context.transaction_context.commit_transaction(record)
        task().batches.put_nowait([record])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert values(run) == values(run, "offsets") == []
        assert [sent.value for sent in run.cluster.records("t", committed=False)] in ([], [b"a"])


async def test_an_interval_of_0_commits_each_batch() -> None:
    """`transaction.boundary.interval.ms=0` ends a transaction after each batch; the worker's interval has no effect."""
    async with running(**ENABLED, offset_flush_interval_ms="600000") as run:
        await started(run, transaction_boundary="interval", transaction_boundary_interval_ms="0")
        for commits in (1, 2):
            task().batches.put_nowait([source_record("a", commits)])
            await run.until(lambda commits=commits: task().commits == commits)


async def test_a_pause_leaves_no_transaction_open() -> None:
    """A pause commits the open transaction, which Kafka would abort after its timeout."""
    async with running(**ENABLED) as run:
        id = await started(run, transaction_boundary="interval", transaction_boundary_interval_ms="600000")
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.cluster.records("t", committed=False))
        await run.worker.set_target_state("c", TargetState.PAUSED)
        task().batches.put_nowait([])  # a poll in progress ends before the pause begins
        await run.until(lambda: "paused" in run.listener.of(id))
        assert (values(run), values(run, "offsets")) == ([b"a"], [b'{"position":1}'])


async def test_a_newer_instance_fences_the_older() -> None:
    """A newer instance fences the older one, whose next write fails it."""
    async with running(**ENABLED) as run:
        id = await started(run)
        older = task()
        older.batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: older.commits == 1)
        zombie = run.worker._tasks.pop(id)  # a worker that has left the group without knowing it
        run.worker._watchers.pop(id).cancel()
        newer_id = await started(run)
        assert newer_id == id
        older.batches.put_nowait([source_record("zombie", 2)])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "ProducerFenced" in run.listener.traces[0] or "InvalidTxnState" in run.listener.traces[0]
        task().batches.put_nowait([source_record("b", 2)])
        await run.until(lambda: task().commits == 1)
        assert values(run) == [b"a", b"b"]
        zombie.cancel()


async def test_producers_that_cannot_be_fenced_are_one_error() -> None:
    """If producers cannot be fenced, one ConnectError has the reason."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        denied = Fail(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        with cluster.control(Api.INIT_PRODUCER_ID, denied), pytest.raises(ConnectError, match="AuthorizationFailed"):
            await fence_producers(kafka, ["g-c-0", "g-c-1"])
        await fence_producers(kafka, ["g-c-0", "g-c-1"])


async def test_a_failed_task_aborts_its_transaction() -> None:
    """A task that fails aborts its open transaction."""
    async with running(**ENABLED) as run:
        id = await started(run, transaction_boundary="interval", transaction_boundary_interval_ms="600000")
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.cluster.records("t", committed=False))
        task().batches.put_nowait(ValueError("broken"))
        await run.until(lambda: "failure" in run.listener.of(id))
        assert values(run) == values(run, "offsets") == []


async def test_a_stop_commits_the_open_transaction() -> None:
    """With `transaction.boundary=interval` a stop commits the last transaction."""
    async with running(**ENABLED) as run:
        id = await started(run, transaction_boundary="interval", transaction_boundary_interval_ms="600000")
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.cluster.records("t", committed=False))
        await run.worker.stop_tasks([id])
        assert (values(run), values(run, "offsets")) == ([b"a"], [b'{"position":1}'])


async def test_exactly_once_requires_an_offset_topic() -> None:
    """Without an offset topic an exactly-once task fails with the reason."""
    async with running(**ENABLED) as run:
        run.store.topic = None
        id = ConnectorTaskId("c", 0)
        props = {"connector.class": "FileStreamSource", "file": "f", "topic": "t", "name": "c"}
        assert not await run.worker.start_task(TaskSpec(id, props, props), TargetState.STARTED, run.listener)
        assert "exactly-once sources" in run.listener.traces[0]


async def test_a_topic_that_stays_missing_fails_the_task_and_its_transaction() -> None:
    """A missing topic fails the task, and its transaction is aborted."""
    async with running(**ENABLED, topic_wait_timeout_ms="300") as run:
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2, topic="missing")])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "topic missing" in run.listener.traces[0]
        assert values(run) == values(run, "offsets") == []


async def test_a_topic_that_is_deleted_during_a_commit_fails_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is deleted during a commit fails the task, and nothing is written."""
    monkeypatch.setattr(abstract_source_task, "CLOSE_TIMEOUT_MS", 100)
    async with running(**ENABLED, topic_wait_timeout_ms="300") as run:
        run.cluster.create_topic("short")
        id = await started(run, producer_override_max_block_ms="1000")
        with run.cluster.control(Api.PRODUCE, Fail(ErrorCode.REQUEST_TIMED_OUT)) as failing:  # retried
            task().batches.put_nowait([source_record("a", 1, topic="short")])
            await run.until(lambda: failing.acted)
            run.cluster.delete_topic("short")
        await run.until(lambda: "failure" in run.listener.of(id), 20)
        assert "topic short" in run.listener.traces[0]
        assert values(run, "offsets") == []
