"""Source tasks on the fake broker: the records that they send, and the offsets that they store.

With at-least-once delivery the offsets are stored after the records. With exactly-once delivery both are in one
transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import structlog.testing
from msgspec.structs import replace

from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import KafkaTimeout, RetriableError
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.runtime import abstract_source_task
from penstock.shared.connect.runtime.exactly_once_source_task import fence_producers
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.testing.fake_broker import Api, Close, ErrorCode, Fail, FakeCluster, Request
from penstock.shared.testing.manual_clock import ManualClock
from tests.shared.connect.harness import RecordingSource, RecordingSourceTask, Running, running, source_record

KEY = b'["c",{"file":"a"}]'

ENABLED = {"exactly_once_source_support": "enabled"}


def task() -> RecordingSourceTask:
    return RecordingSourceTask.made[-1]


async def started(run: Running, **settings: str) -> Any:
    """Start another task, and return its id once it has started."""
    made = len(RecordingSourceTask.made)
    id = await run.run(RecordingSource, **settings)
    await run.until(lambda: len(RecordingSourceTask.made) > made and task().calls)
    return id


def values(run: Running, topic: str = "t") -> list[bytes | None]:
    return [record.value for record in run.cluster.records(topic)]


async def test_records_are_sent_and_then_their_offsets_stored() -> None:
    """Records are sent in order, the last one's offset is stored, and the task's commit methods are called."""
    async with running() as run:
        await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2)])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":2}')
        assert values(run) == [b"a", b"b"]
        await run.until(lambda: task().commits)
        assert task().committed == [("a", True), ("b", True)]
        assert run.listener.topics == {"t"}


async def test_acknowledged_records_are_not_active() -> None:
    """While `poll` waits, no record is active once Kafka has all of them."""
    async with running() as run:
        await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2)])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":2}')
        assert run.worker.task_metrics()[0][2]["source_record_active_count"] == 0


async def test_a_records_timestamp() -> None:
    """A record without a timestamp, or with Kafka's -1 for none, has the time of sending. A lower one fails it."""
    async with running() as run:
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1, timestamp=-1), source_record("b", 2, timestamp=5)])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":2}')
        first, second = run.cluster.records("t")
        assert (first.timestamp > 1_700_000_000_000, second.timestamp) == (True, 5)
        task().batches.put_nowait([source_record("c", 3, timestamp=-2)])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "Invalid record timestamp -2" in run.listener.traces[0]


async def test_a_stop_waits_for_sent_records() -> None:
    """A stop stores the offsets of all sent records and then stops the task, even while `poll` waits."""
    async with running(offset_flush_interval_ms="600000") as run:
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: values(run))
        await run.worker.stop_tasks([id])
        assert run.store.data == {KEY: b'{"position":1}'}
        assert task().calls == ["start", "stop"]
        assert run.listener.of(id) == ["startup", "shutdown"]


async def test_a_retriable_error_of_poll_is_retried() -> None:
    """After a RetriableError of `poll` the task continues."""
    async with running() as run:
        id = await started(run)
        task().batches.put_nowait(RetriableError("later"))
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: values(run) == [b"a"])
        assert run.listener.of(id) == ["startup"]


async def test_an_error_of_poll_fails_the_task() -> None:
    """An error of `poll` fails the task with its trace, and earlier offsets are stored."""
    async with running(offset_flush_interval_ms="600000") as run:
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1)])
        task().batches.put_nowait(ValueError("broken"))
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "ValueError: broken" in run.listener.traces[0]
        assert run.store.data == {KEY: b'{"position":1}'}
        assert task().calls[-1] == "stop"


@pytest.mark.parametrize(
    ("polled", "error"),
    [
        (source_record("a", 1), "poll must return a list or None, and not SourceRecord"),
        ([{"n": 1}], "poll must return a list of SourceRecord, and not of dict"),
        ([source_record("a", 1, topic=None)], "Invalid record topic None"),  # type: ignore[arg-type]
        ([source_record("a", 1, headers=(("h", "v"),))], "Invalid record header: it is a tuple"),
    ],
)
async def test_an_invalid_result_of_poll_fails_the_task(polled: Any, error: str) -> None:
    """A result of `poll` that is not a list of records, and a record with an invalid topic or header, fail the task.
    The error names the mistake."""
    async with running() as run:
        id = await started(run, errors_tolerance="all")
        task().batches.put_nowait(polled)
        await run.until(lambda: "failure" in run.listener.of(id))
        assert error in run.listener.traces[0]


async def test_a_pause_holds_records_back() -> None:
    """Records of a poll during the pause request are sent before the pause, and then nothing is polled."""
    async with running() as run:
        id = await started(run)
        await run.until(lambda: task().polls)
        await run.worker.set_target_state("c", TargetState.PAUSED)
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: "paused" in run.listener.of(id))
        task().batches.put_nowait([source_record("b", 2)])
        await run.until(lambda: run.store.data)
        assert values(run) == [b"a"]
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: values(run) == [b"a", b"b"])
        assert run.listener.of(id) == ["startup", "paused", "running"]


async def test_a_task_may_start_paused() -> None:
    """A paused task polls only after it is resumed."""
    async with running() as run:
        id = await run.run(RecordingSource, TargetState.PAUSED)
        await run.until(lambda: "paused" in run.listener.of(id))
        task().batches.put_nowait([source_record("a", 1)])
        await asyncio.sleep(0)
        assert (task().batches.qsize(), task().calls) == (1, ["start"])
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: values(run) == [b"a"])


async def test_an_offset_waits_for_the_records_before_it() -> None:
    """While the broker rejects a record, no later offset of its source partition is stored."""
    async with running() as run:
        run.cluster.create_topic("other")
        await started(run)
        with run.cluster.control(Api.PRODUCE, Fail(ErrorCode.REQUEST_TIMED_OUT)):  # retried
            task().batches.put_nowait([source_record("a", 1)])
            await run.until(lambda: run.worker.task_metrics()[0][2]["offset_commit_success_total"] > 2)
            assert run.store.data == {}
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":1}')


async def test_the_offset_of_a_dropped_record_is_stored() -> None:
    """The offset of a record that a transform drops is stored, also if no later record is sent."""
    async with running() as run:
        await started(run, transforms="f", transforms_f_type="org.apache.kafka.connect.transforms.Filter")
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":1}')
        await run.until(lambda: task().committed == [("a", False)])


async def test_a_partition_without_json_fails_the_task() -> None:
    """A source partition that has no JSON form fails the task even with `errors.tolerance=all`."""
    async with running() as run:
        id = await started(run, errors_tolerance="all")
        record = replace(source_record("a", 1), source_partition={"file": object()})
        task().batches.put_nowait([record])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "source partition" in run.listener.traces[0]
        assert values(run) == []


async def test_a_missing_topic_blocks_a_task_but_not_its_stop() -> None:
    """A record for a missing topic blocks the task, which reports for how long and can be paused and stopped.

    Earlier offsets are stored, and the record is sent once its topic exists.
    """
    async with running(offset_flush_interval_ms="600000") as run:
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2, topic="missing")])
        blocked = lambda: run.worker.task_metrics()[0][2]["source_send_blocked_ms"]  # noqa: E731
        await run.until(lambda: blocked() >= 200)
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: "paused" in run.listener.of(id))
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: blocked() >= 200)
        await run.worker.stop_tasks([id])
        assert run.store.data == {KEY: b'{"position":1}'}
        assert run.listener.of(id) == ["startup", "paused", "running", "shutdown"]
    async with running() as run:
        await started(run)
        task().batches.put_nowait([source_record("b", 2, topic="late")])
        await run.until(lambda: blocked() >= 200)
        run.cluster.create_topic("late")
        await run.until(lambda: values(run, "late") == [b"b"])


async def test_a_record_that_cannot_be_sent_fails_the_task() -> None:
    """A record that is too large for the producer fails the task, unless errors are tolerated."""
    async with running() as run:
        id = await started(run, producer_override_max_request_size="100")
        task().batches.put_nowait([source_record("x" * 1000, 1)])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "RecordTooLarge" in run.listener.traces[0]
    async with running() as run:
        await started(run, producer_override_max_request_size="1000", errors_tolerance="all")
        task().batches.put_nowait([source_record("x" * 9000, 1), source_record("y", 2)])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":2}')
        assert values(run) == [b"y"]
        await run.until(lambda: len(task().committed) == 2)
        assert task().committed == [("x" * 9000, False), ("y", True)]


@pytest.mark.parametrize("when", ["in flight", "before the send"])
async def test_a_producer_that_has_ended_fails_the_task(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the producer's sender has ended, the task fails even with `errors.tolerance=all`, and no offset of a record
    that is not in Kafka is stored.
    """
    monkeypatch.setattr(abstract_source_task, "CLOSE_TIMEOUT_MS", 100)
    async with running() as run:
        id = await started(run, errors_tolerance="all")
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":1}')
        producer = run.worker._tasks[id].producer
        with run.cluster.control(Api.PRODUCE, Fail(ErrorCode.REQUEST_TIMED_OUT)) as failing:  # retried
            if when == "in flight":
                task().batches.put_nowait([source_record("b", 2)])
                await run.until(lambda: failing.acted)
            producer._sender_broke(ValueError("unexpected"))
            task().batches.put_nowait([source_record("c", 3)])
            await run.until(lambda: "failure" in run.listener.of(id))
        assert "the producer" in run.listener.traces[0]
        assert run.store.data == {KEY: b'{"position":1}'}


async def test_a_failed_offset_store_is_retried() -> None:
    """Offsets that could not be stored are stored with the next flush."""
    async with running() as run:
        original, failures = run.store.set, [RetriableError("down"), RetriableError("down")]

        async def failing(offsets: Any) -> None:
            if failures:
                raise failures.pop()
            await original(offsets)

        run.store.set = failing  # type: ignore[method-assign]
        await started(run)
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":1}')
        assert failures == []


async def test_an_abandoned_task_commits_nothing_more() -> None:
    """After the graceful timeout a task stores no more offsets, and its `commit` is not called again."""
    async with running(task_shutdown_graceful_timeout_ms="50") as run:
        id = await started(run)
        abandoned = task()

        async def slow_to_end() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()

        abandoned.poll = slow_to_end  # type: ignore[method-assign]
        abandoned.batches.put_nowait(None)
        await run.until(lambda: abandoned.commits)
        await run.worker.stop_tasks([id])
        commits = abandoned.commits
        await started(run)
        await run.until(lambda: task().commits > 2)
        assert abandoned.commits == commits


@pytest.mark.parametrize("groups", ["wide", "default,wide"])
async def test_topics_are_created_by_their_group(groups: str) -> None:
    """A missing topic is created with the settings of the first group that matches it. The group default applies only
    if no other group matches, even if it is listed first.
    """
    async with running() as run:
        await started(
            run,
            topic_creation_groups=groups,
            topic_creation_wide_include="w.*",
            topic_creation_wide_partitions="3",
            topic_creation_default_partitions="1",
            topic_creation_default_replication_factor="1",
        )
        task().batches.put_nowait([source_record("a", 1, topic="w1"), source_record("b", 2, topic="n1")])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":2}')
        assert [run.cluster.leader("w1", partition) for partition in range(3)] == [1, 1, 1]
        assert values(run, "n1") == [b"b"]


async def test_a_failed_topic_creation_fails_the_task() -> None:
    """A topic that cannot be created fails the task even with `errors.tolerance=all`, and the
    record's offset is not stored.
    """
    async with running() as run:
        id = await started(
            run,
            errors_tolerance="all",
            topic_creation_default_partitions="1",
            topic_creation_default_replication_factor="1",
        )
        with run.cluster.control(Api.CREATE_TOPICS, Fail(ErrorCode.POLICY_VIOLATION)):
            task().batches.put_nowait([source_record("a", 1), source_record("b", 2, topic="new")])
            await run.until(lambda: "failure" in run.listener.of(id))
        assert "cannot be created" in run.listener.traces[0]
        assert run.store.data == {KEY: b'{"position":1}'}
        assert task().committed == [("a", True)]


async def test_a_topic_that_stays_missing_fails_the_task() -> None:
    """After `topic.wait.timeout.ms` a missing topic fails the task with its name and the fix,
    and the record's offset is not stored.
    """
    async with running(topic_wait_timeout_ms="300") as run:
        id = await started(run, errors_tolerance="all")
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2, topic="missing")])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "topic missing" in run.listener.traces[0]
        assert "topic.wait.timeout.ms=300" in run.listener.traces[0]
        assert "topic.creation.default.partitions" in run.listener.traces[0]
        assert run.store.data == {KEY: b'{"position":1}'}


@pytest.mark.parametrize("creates", [False, True])
async def test_a_topic_that_is_deleted_fails_the_task(monkeypatch: pytest.MonkeyPatch, creates: bool) -> None:
    """A topic that is deleted after the task wrote to it fails the task. The error says what to do, also if the
    connector creates topics."""
    created = {"topic_creation_default_partitions": "1", "topic_creation_default_replication_factor": "1"}
    # The first record after the deletion is never sent.
    monkeypatch.setattr(abstract_source_task, "CLOSE_TIMEOUT_MS", 100)
    async with running(topic_wait_timeout_ms="300", offset_flush_timeout_ms="100") as run:
        run.cluster.create_topic("short")
        id = await started(run, producer_override_metadata_max_age_ms="100", **(created if creates else {}))
        task().batches.put_nowait([source_record("a", 1, topic="short")])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":1}')
        run.cluster.delete_topic("short")
        position = 1
        while "failure" not in run.listener.of(id):
            position += 1
            task().batches.put_nowait([source_record("b", position, topic="short")])
            await run.until(lambda: task().batches.empty() or "failure" in run.listener.of(id))
        assert "topic short" in run.listener.traces[0]
        assert ("it was deleted" if creates else "create it, or") in run.listener.traces[0]
        assert run.store.data == {KEY: b'{"position":1}'}


async def test_a_deleted_topic_fails_a_task_that_polls_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pending record of a deleted topic fails the task, even if `poll` returns nothing; its offset is not stored."""
    monkeypatch.setattr(abstract_source_task, "CLOSE_TIMEOUT_MS", 100)  # the pending record is never sent
    async with running(topic_wait_timeout_ms="300", offset_flush_timeout_ms="100") as run:
        run.cluster.create_topic("short")
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1, topic="short")])
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":1}')
        with run.cluster.control(Api.PRODUCE, Fail(ErrorCode.REQUEST_TIMED_OUT)):  # retried
            task().batches.put_nowait([source_record("b", 2, topic="short"), source_record("c", 3)])
            await run.until(lambda: run.worker.task_metrics()[0][2]["source_record_active_count"] == 2)
            run.cluster.delete_topic("short")
        await run.until(lambda: "failure" in run.listener.of(id), 20)
        assert "topic short" in run.listener.traces[0]
        assert "topic.wait.timeout.ms=300" in run.listener.traces[0]
        assert run.store.data == {KEY: b'{"position":1}'}


async def test_a_slow_broker_fails_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record for an existing topic may wait longer than `topic.wait.timeout.ms`."""
    monkeypatch.setattr(abstract_source_task, "TOPIC_LOOKUP_AGAIN_MS", 100)
    lookups: list[Request] = []

    def noted(request: Request) -> None:
        if request.client_id.startswith("connector-admin"):
            lookups.append(request)

    async with running(topic_wait_timeout_ms="100") as run:
        id = await started(run)
        with (
            run.cluster.control(Api.PRODUCE, Fail(ErrorCode.REQUEST_TIMED_OUT)),
            run.cluster.control(Api.METADATA, noted),
        ):
            task().batches.put_nowait([source_record("a", 1)])
            await run.until(lambda: len(lookups) >= 3)
        await run.until(lambda: run.store.data.get(KEY) == b'{"position":1}')
        assert run.listener.of(id) == ["startup"]


async def test_topic_creation_is_retried_until_its_timeout() -> None:
    """Retriable failures of topic creation are retried for `topic.wait.timeout.ms`."""
    async with running(topic_wait_timeout_ms="300") as run:
        id = await started(
            run, topic_creation_default_partitions="1", topic_creation_default_replication_factor="1",
            admin_override_request_timeout_ms="100",
        )  # fmt: skip
        with run.cluster.control(Api.CREATE_TOPICS, Fail(ErrorCode.REQUEST_TIMED_OUT)):
            task().batches.put_nowait([source_record("a", 1, topic="new")])
            await run.until(lambda: "failure" in run.listener.of(id))
        assert "topic new" in run.listener.traces[0]


async def test_the_producers_own_limit_fails_the_task_too() -> None:
    """A producer's max.block.ms also limits the wait for a topic."""
    async with running() as run:
        id = await started(run, producer_override_max_block_ms="200")
        task().batches.put_nowait([source_record("a", 1, topic="missing")])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "topic missing" in run.listener.traces[0]
        assert "max.block.ms" in run.listener.traces[0]


async def test_a_missing_partition_fails_the_task() -> None:
    """A record for a missing partition fails the task after the same timeout."""
    async with running(topic_wait_timeout_ms="300") as run:
        id = await started(run)
        task().batches.put_nowait([replace(source_record("a", 1), kafka_partition=7)])
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "partition 7 of topic t" in run.listener.traces[0]


async def test_brokers_that_do_not_answer_fail_no_task() -> None:
    """While brokers do not answer, a record waits, and it is sent when they answer again."""
    async with running(topic_wait_timeout_ms="100") as run:
        id = await started(run)
        with run.cluster.control(Api.METADATA, Close()):
            run.cluster.create_topic("new")
            task().batches.put_nowait([source_record("a", 1, topic="new")])
            await run.until(lambda: run.worker.task_metrics()[0][2]["source_send_blocked_ms"] >= 300)
        await run.until(lambda: values(run, "new") == [b"a"])
        assert run.listener.of(id) == ["startup"]


async def test_records_and_offsets_are_one_transaction() -> None:
    """Each poll's records become visible together with their offset."""
    async with running(**ENABLED) as run:
        await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2)])
        await run.until(lambda: task().commits == 1)
        assert values(run) == [b"a", b"b"]
        assert values(run, "offsets") == [b'{"position":2}']
        assert task().committed == [("a", True), ("b", True)]


async def test_records_of_an_open_transaction_are_active() -> None:
    """A record counts as active from its send until its transaction ends."""
    async with running(**ENABLED) as run:
        await started(run, transaction_boundary="connector")
        metrics = lambda: run.worker.task_metrics()[0][2]  # noqa: E731
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2)])
        await run.until(lambda: metrics()["source_record_active_count"] == 2)
        task().context.transaction_context.commit_transaction()
        task().batches.put_nowait(None)
        await run.until(lambda: metrics()["source_record_active_count"] == 0)
        assert metrics()["source_record_active_count_max"] == 2


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


@pytest.mark.parametrize("nothing", [[], None, RetriableError("later")], ids=["empty", "none", "retriable error"])
async def test_an_interval_ends_while_the_source_is_quiet(nothing: Any) -> None:
    """A transaction ends after its interval even if no poll returns records any more."""
    clock = ManualClock()
    async with running(clock, **ENABLED) as run:
        await started(run, transaction_boundary="interval", transaction_boundary_interval_ms="1000")
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.cluster.records("t", committed=False))
        clock.advance(999)
        task().batches.put_nowait(nothing)
        await run.until(task().batches.empty)
        assert values(run) == []
        clock.advance(1)
        task().batches.put_nowait(nothing)
        await run.until(lambda: task().commits == 1, timeout_s=10)
        assert (values(run), values(run, "offsets")) == ([b"a"], [b'{"position":1}'])


@pytest.mark.parametrize("nothing", [[], None, RetriableError("later")], ids=["empty", "none", "retriable error"])
async def test_the_task_ends_a_transaction_with_a_poll_without_records(nothing: Any) -> None:
    """A commit or abort without a record takes effect after the next poll, even if it returns no records or raises
    RetriableError."""
    async with running(**ENABLED) as run:
        id = await started(run, transaction_boundary="connector")
        context = task().context.transaction_context
        assert context is not None
        task().batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.cluster.records("t", committed=False))
        context.commit_transaction()
        task().batches.put_nowait(nothing)
        await run.until(lambda: task().commits == 1, timeout_s=10)
        assert values(run) == [b"a"]
        task().batches.put_nowait([source_record("b", 2)])
        await run.until(lambda: len(run.cluster.records("t", committed=False)) > 1)
        context.abort_transaction()
        task().batches.put_nowait(nothing)
        await run.until(lambda: task().commits == 2, timeout_s=10)
        task().batches.put_nowait([source_record("c", 3)])
        await run.worker.stop_tasks([id])
        assert (values(run), values(run, "offsets")) == ([b"a"], [b'{"position":1}', b'{"position":2}'])


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


async def test_a_pause_waits_for_a_record_that_cannot_be_sent() -> None:
    """A pause does not break the transaction: it waits until Kafka takes the record, and then commits."""
    async with running(**ENABLED) as run:
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2, topic="late")])
        await run.until(lambda: run.worker.task_metrics()[0][2]["source_send_blocked_ms"] >= 200)
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: run.worker.task_metrics()[0][2]["source_send_blocked_ms"] >= 400)
        assert run.listener.of(id) == ["startup"]
        run.cluster.create_topic("late")
        await run.until(lambda: run.listener.of(id) == ["startup", "paused"])
        assert (values(run), values(run, "late")) == ([b"a"], [b"b"])
        assert values(run, "offsets") == [b'{"position":2}']


async def test_a_stop_aborts_a_transaction_with_a_record_that_cannot_be_sent() -> None:
    """A stop while a record cannot be sent aborts the transaction, and the task ends without an error."""
    async with running(**ENABLED) as run:
        id = await started(run)
        task().batches.put_nowait([source_record("a", 1), source_record("b", 2, topic="missing")])
        await run.until(lambda: run.worker.task_metrics()[0][2]["source_send_blocked_ms"] >= 200)
        await run.worker.stop_tasks([id])
        assert run.listener.of(id) == ["startup", "shutdown"]
        assert values(run) == values(run, "offsets") == []


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


async def test_producers_that_cannot_be_fenced_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """If producers cannot be fenced, one error has the reason. It is a RetriableError if the reason is one, and
    otherwise a ConnectError."""

    async def no_response(producer: Producer) -> None:
        raise KafkaTimeout("no response")

    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        denied = Fail(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        with cluster.control(Api.INIT_PRODUCER_ID, denied), pytest.raises(ConnectError, match="AuthorizationFailed"):
            await fence_producers(kafka, ["g-c-0", "g-c-1"])
        await fence_producers(kafka, ["g-c-0", "g-c-1"])
        monkeypatch.setattr(Producer, "init_transactions", no_response)
        with pytest.raises(RetriableError, match="earlier tasks cannot be fenced: KafkaTimeout: no response"):
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


async def test_the_delivery_timeout_of_a_transaction_may_be_set() -> None:
    """A connector's own delivery and request timeouts apply to the producer of an exactly-once source."""
    async with running(**ENABLED) as run:
        id = await started(run, producer_override_delivery_timeout_ms="300", producer_override_request_timeout_ms="100")
        with run.cluster.control(Api.PRODUCE, Fail(ErrorCode.REQUEST_TIMED_OUT)):  # retried
            task().batches.put_nowait([source_record("a", 1)])
            await run.until(lambda: "failure" in run.listener.of(id), 10)
    async with running(**ENABLED) as run:
        await started(run, producer_override_request_timeout_ms="120000")


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
