"""Sink tasks on the fake broker: the calls of a connector's task, and the group's offsets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog

from penstock.connect import RetriableError
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import OffsetAndMetadata
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.worker_task import TaskSpec
from tests.shared.connect.harness import TP, RecordingSink, RecordingSinkTask, Running, running

GROUP = "connect-c"


@contextmanager
def prepared(prepare: Any) -> Iterator[None]:
    """Call `prepare` with every task that is created."""
    RecordingSinkTask.prepare = staticmethod(prepare)
    try:
        yield
    finally:
        RecordingSinkTask.prepare = staticmethod(lambda _task: None)


async def produce(run: Running, *values: bytes, topic: str = "t", partition: int | None = None) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
        for value in values:
            await producer.send(topic, value, partition=partition)


def task() -> RecordingSinkTask:
    return RecordingSinkTask.made[-1]


async def test_records_are_put_and_their_offsets_committed() -> None:
    """Records are put in order, and offsets are committed once `pre_commit` returns them."""
    async with running() as run:
        await produce(run, b"a", b"b", b"c")
        id = await run.run(RecordingSink, topics="t")
        await run.until(lambda: run.cluster.committed(GROUP).get(TP) == OffsetAndMetadata(3))
        assert task().values == ["a", "b", "c"]
        assert [call for call in task().calls if call[0] != "pre_commit"] == ["start", ("open", [0]), ("put", 3)]
        assert run.listener.topics == {"t"}
        assert run.worker.state(id) is State.RUNNING


async def test_a_stop_commits_and_closes() -> None:
    """A stop commits, closes the partitions and stops the task, in this order."""
    async with running(offset_flush_interval_ms="600000") as run:
        await produce(run, b"a")
        id = await run.run(RecordingSink, topics="t")
        await run.until(lambda: RecordingSinkTask.made and task().values)
        await run.worker.stop_tasks([id])
        assert task().calls[-3:] == [("pre_commit", {0: 1}), ("close", [0]), "stop"]
        assert run.cluster.committed(GROUP)[TP].offset == 1
        assert run.listener.of(id) == ["startup", "shutdown"]


async def test_a_retriable_error_delivers_the_same_batch_again() -> None:
    """After a RetriableError the same batch is delivered again, and no other record before it."""

    def prepare(made: RecordingSinkTask) -> None:
        made.raising["put"] = [RetriableError("later"), RetriableError("later")]
        made.on_put = lambda _task, _records: None

    async with running() as run:
        with prepared(prepare):
            await produce(run, b"a", b"b")
            id = await run.run(RecordingSink, topics="t")
            await run.until(lambda: RecordingSinkTask.made and ("put", 2) in task().calls)
            task().context.timeout(10)
            await produce(run, b"c")
            await run.until(lambda: len(task().values) >= 2 or task().context.timeout(10))
            await run.until(lambda: len(task().values) == 3)
        assert task().values == ["a", "b", "c"]
        assert task().calls.count(("put", 2)) == 3
        assert run.listener.of(id) == ["startup"]


async def test_any_other_error_fails_the_task() -> None:
    """Any other error of `put` fails the task with its trace, and the records are not committed."""
    async with running() as run:
        with prepared(lambda made: made.raising.update(put=[ValueError("broken")])):
            await produce(run, b"a")
            id = await run.run(RecordingSink, topics="t")
            await run.until(lambda: "failure" in run.listener.of(id))
        assert "ValueError: broken" in run.listener.traces[0]
        assert "in put" in run.listener.traces[0]
        assert task().calls[-1] == "stop"
        assert run.cluster.committed(GROUP).get(TP, OffsetAndMetadata(0)).offset == 0
        assert run.worker.state(id) is State.FAILED


async def test_an_error_of_close_does_not_hide_the_error_of_put() -> None:
    """If `put` and then `close` fail, the task's error is that of `put`, with a note about the other one."""
    async with running() as run:
        with prepared(lambda made: made.raising.update(put=[ValueError("first")], close=[RuntimeError("then")])):
            await produce(run, b"a")
            id = await run.run(RecordingSink, topics="t")
            await run.until(lambda: "failure" in run.listener.of(id))
        error, note = run.listener.traces[0].strip().splitlines()[-2:]
        assert error == "ValueError: first"
        assert "RuntimeError: then" in note


@pytest.mark.parametrize("call", ["start", "open"])
async def test_errors_before_the_first_record_fail_the_task(call: str) -> None:
    """An error of `start` or `open` fails the task, although `open` runs in a rebalance."""
    async with running() as run:
        with prepared(lambda made: made.raising.update({call: [ValueError(f"no {call}")]})):
            id = await run.run(RecordingSink, topics="t")
            await run.until(lambda: "failure" in run.listener.of(id))
        assert f"no {call}" in run.listener.traces[0]
        assert task().calls[-1] == "stop"


async def test_a_task_that_cannot_flush_reads_again() -> None:
    """An error of `pre_commit` rewinds to the last commit, and the task continues."""

    def fail_once(made: RecordingSinkTask, _records: object) -> None:
        if not made.values:
            made.raising["pre_commit"] = [ValueError("not yet")]

    async with running() as run:
        with prepared(lambda made: setattr(made, "on_put", fail_once)):
            await produce(run, b"a", b"b")
            id = await run.run(RecordingSink, topics="t")
            await run.until(lambda: run.cluster.committed(GROUP).get(TP) == OffsetAndMetadata(2))
        assert task().values == ["a", "b", "a", "b"]
        assert run.listener.of(id) == ["startup"]


async def test_a_task_that_cannot_flush_in_a_rebalance_reads_again_what_it_keeps() -> None:
    """The next owner of the revoked partition reads its record again, and the task that of the other partition."""
    cooperative = {"consumer.override.partition.assignment.strategy": "cooperative-sticky"}
    async with running(offset_flush_interval_ms="600000") as run:
        run.cluster.create_topic("two", 2)
        await produce(run, b"a", topic="two", partition=0)
        await produce(run, b"b", topic="two", partition=1)
        id = await run.run(RecordingSink, topics="two", **cooperative)
        await run.until(lambda: RecordingSinkTask.made and len(task().values) == 2)
        first = task()
        first.raising["pre_commit"] = [ValueError("not yet")]
        name = f"{RecordingSink.__module__}.RecordingSink"
        props = {"name": "c", "connector.class": name, "topics": "two", **cooperative}
        second = ConnectorTaskId("c", 1)
        await run.worker.start_task(TaskSpec(second, props, props), TargetState.STARTED, run.listener)
        await run.until(lambda: len(first.values) == 3 and len(task().values) == 1)
        (moved,) = [call[1] for call in first.calls if call[0] == "close"]
        assert [first.values[2], *task().values] == (["b", "a"] if moved == [0] else ["a", "b"])
        await run.worker.stop_tasks([id, second])
        assert {tp.partition: at.offset for tp, at in run.cluster.committed(GROUP).items()} == {0: 1, 1: 1}


async def test_an_error_of_close_in_a_rebalance_fails_the_task() -> None:
    """An error of `close` in a rebalance fails the task, and the other member gets its partitions."""
    async with running() as run:
        run.cluster.create_topic("two", 2)
        id = await run.run(RecordingSink, topics="two")
        await run.until(lambda: RecordingSinkTask.made and ("open", [0, 1]) in task().calls)
        first = task()
        first.raising["close"] = [ValueError("no close")]
        props = {"name": "c", "connector.class": f"{RecordingSink.__module__}.RecordingSink", "topics": "two"}
        spec = TaskSpec(ConnectorTaskId("c", 1), props, props)
        await run.worker.start_task(spec, TargetState.STARTED, run.listener)
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "no close" in run.listener.traces[0]
        assert first.calls[-1] == "stop"
        await run.until(lambda: {n for call in task().calls if call[0] == "open" for n in call[1]} == {0, 1})


async def test_revoked_records_are_not_active() -> None:
    """The records of a redelivery are not active any more once their partition is revoked."""

    def fail_always(made: RecordingSinkTask, _records: object) -> None:
        made.context.timeout(600_000)
        raise RetriableError("later")

    async with running() as run:
        with prepared(lambda made: setattr(made, "on_put", fail_always)):
            await produce(run, b"a")
            await run.run(RecordingSink, topics="t")
            metrics = lambda: run.worker.task_metrics()[0][2]  # noqa: E731
            await run.until(lambda: metrics()["sink_record_active_count"] == 1 == metrics()["sink_record_lag_max"])
            await run.worker._tasks[ConnectorTaskId("c", 0)].on_partitions_lost([TP])
            assert metrics()["sink_record_active_count"] == metrics()["sink_record_lag_max"] == 0


async def test_only_offsets_that_the_task_returns_are_committed() -> None:
    """Offsets that `pre_commit` withholds are not committed, nor offsets beyond the put records."""
    async with running() as run:
        limit = {"offset": 1}

        def prepare(made: RecordingSinkTask) -> None:
            made.committable = lambda _offsets: {TP: OffsetAndMetadata(limit["offset"])}

        with prepared(prepare):
            await produce(run, b"a", b"b", b"c")
            await run.run(RecordingSink, topics="t")
            await run.until(lambda: run.cluster.committed(GROUP).get(TP) == OffsetAndMetadata(1))
            limit["offset"] = 99
            calls = len(task().calls)
            await run.until(lambda: len(task().calls) > calls + 2)
        assert run.cluster.committed(GROUP)[TP].offset == 1


async def test_an_answered_commit_delays_no_other() -> None:
    """After an answered commit the next one follows by the interval, whatever the flush timeout is."""
    async with running(offset_flush_timeout_ms="600000") as run:
        await produce(run, b"a")
        await run.run(RecordingSink, topics="t")
        await run.until(lambda: RecordingSinkTask.made and [c[0] for c in task().calls].count("pre_commit") > 2)


async def test_a_pause_commits_and_delivers_nothing() -> None:
    """A pause commits and delivers no records; after it the records that came meanwhile are delivered."""
    async with running(offset_flush_interval_ms="600000") as run:
        await produce(run, b"a")
        id = await run.run(RecordingSink, topics="t")
        await run.until(lambda: RecordingSinkTask.made and task().values)
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: run.cluster.committed(GROUP).get(TP) == OffsetAndMetadata(1))
        await produce(run, b"b")
        assert task().values == ["a"]
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: len(task().values) == 2)
        assert run.listener.of(id) == ["startup", "paused", "running"]


async def test_a_paused_task_keeps_committing() -> None:
    """A paused task keeps committing by the interval and gets no records."""
    async with running() as run:
        await produce(run, b"a")
        id = await run.run(RecordingSink, topics="t")
        await run.until(lambda: RecordingSinkTask.made and task().values)
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: "paused" in run.listener.of(id))
        await produce(run, b"b")
        calls = len(task().calls)
        await run.until(lambda: len(task().calls) > calls + 5)
        assert task().values == ["a"]


async def test_a_task_may_start_paused() -> None:
    """A task whose connector is paused starts paused."""
    async with running() as run:
        await produce(run, b"a")
        id = await run.run(RecordingSink, TargetState.PAUSED, topics="t")
        await run.until(lambda: RecordingSinkTask.made and ("open", [0]) in task().calls)
        assert run.listener.of(id) == ["paused"]
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: task().values == ["a"])


async def test_a_task_can_set_its_offsets() -> None:
    """`context.offset` overrides the group's offsets. A difference is logged: a reset of the group has no effect."""
    async with running() as run:
        await produce(run, b"a", b"b", b"c")

        def prepare(made: RecordingSinkTask) -> None:
            def rewind(opened: RecordingSinkTask, _partitions: object) -> None:
                opened.context.offset(TP, 2)

            original = made.open

            async def open_at(partitions: Any) -> None:
                await original(partitions)
                rewind(made, partitions)

            made.open = open_at  # type: ignore[method-assign]

        with prepared(prepare), structlog.testing.capture_logs() as logged:
            await run.run(RecordingSink, topics="t")
            await run.until(lambda: RecordingSinkTask.made and task().values)
        assert task().values == ["c"]
        assert [(line["offset"], line["group_offset"]) for line in logged if "group_offset" in line] == [(2, 0)]


async def test_partitions_that_the_task_paused_stay_paused() -> None:
    """After a redelivery partitions that the task paused stay paused."""
    async with running() as run:
        run.cluster.create_topic("two", 2)

        def prepare(made: RecordingSinkTask) -> None:
            made.raising["put"] = [RetriableError("later")]

        with prepared(prepare):
            await produce(run, b"a", topic="t")
            await run.run(RecordingSink, topics="t")
            await run.until(lambda: RecordingSinkTask.made and ("put", 1) in task().calls)
            task().context.pause(TP)
            task().context.timeout(5)
            await run.until(lambda: task().values == ["a"] or task().context.timeout(5))
            await produce(run, b"b")
            calls = len(task().calls)
            await run.until(lambda: len(task().calls) > calls + 3)
            assert task().values == ["a"]
            task().context.resume(TP)
            await run.until(lambda: task().values == ["a", "b"])


@pytest.mark.parametrize("pattern", ["clicks-..", "(?i)CLICKS-.."])
async def test_a_pattern_names_topics_by_their_whole_name(pattern: str) -> None:
    """`topics.regex` must match the whole name of a topic. It may begin with a flag."""
    async with running() as run:
        run.cluster.create_topic("clicks-eu")
        run.cluster.create_topic("clicks-eu-dlq")
        await produce(run, b"x", topic="clicks-eu")
        await produce(run, b"y", topic="clicks-eu-dlq")
        await run.run(RecordingSink, topics_regex=pattern)
        await run.until(lambda: RecordingSinkTask.made and task().values)
        await run.until(lambda: len([call for call in task().calls if call[0] == "pre_commit"]) > 2)
        assert task().values == ["x"]


async def test_a_requested_commit_does_not_wait_for_the_interval() -> None:
    """`request_commit` commits before the next poll."""
    async with running(offset_flush_interval_ms="600000") as run:
        with prepared(lambda made: setattr(made, "on_put", lambda t, _records: t.context.request_commit())):
            await produce(run, b"a")
            await run.run(RecordingSink, topics="t", consumer_override_fetch_max_wait_ms="20")
            await run.until(lambda: RecordingSinkTask.made and task().values)
            await produce(run, b"b")
            await run.until(lambda: run.cluster.committed(GROUP).get(TP) is not None)
