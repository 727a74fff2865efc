"""Gives polled records to the tasks of a stream worker, and chooses the partitions to fetch from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.consumer.assignors import Assignor
from penstock.shared.common.clock import Clock
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.owned_task import OwnedTask
from penstock.shared.streams.runtime.worker_tasks import Ready
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.idleness import advance_idle_time
from penstock.shared.streams.task.inputs import log_blocking
from penstock.shared.streams.task.time_slices import TurnTime


def make_consumer(
    kafka: KafkaSettings, settings: StreamsSettings, registry: CollectorRegistry, assignor: Assignor
) -> Consumer:
    """Create the application's member of its group; it is not open yet."""
    own = ConsumerSettings(
        group_id=settings.application_id,
        group_instance_id=settings.group_instance_id,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=settings.heartbeat_interval_ms,
        max_poll_interval_ms=settings.max_poll_interval_ms,
        auto_offset_reset="none",
        isolation_level="read_committed",
        commit_strategy="none",
    )
    return Consumer(kafka, own, registry=registry, assignor=assignor)


def poll_ms(settings: StreamsSettings, owned: Ready, commit_due_ms: int) -> int:
    """Return how long to wait for records: at most until the next commit is due, if there is something to commit.

    Return 0 if records are left that the previous turn had no time for.
    """
    if any(one.inputs is not None and one.inputs.is_cut for one in owned.values()):
        return 0
    waits = any(one.task is not None and one.task.needs_commit for one in owned.values())
    return max(1, min(settings.poll_ms, commit_due_ms)) if waits else settings.poll_ms


def distribute(
    batches: Mapping[TopicPartition, Columns],
    ready: Ready,
    consumer: Consumer,
    now_ms: int,
    time: TurnTime,
    bytes_max: int,
) -> None:
    """Add each batch to its task's inputs, let the tasks process within the turn's time, and then call `regulate`."""
    for at, columns in batches.items():
        if (owned := ready.get(at.partition)) is not None and owned.inputs is not None:
            owned.inputs.add(columns)
    assignment = consumer.assignment()
    time.begin(sum(owned.inputs.waiting for owned in ready.values() if owned.inputs is not None))
    for partition, owned in ready.items():
        if owned.inputs is not None:
            own = [at for at in assignment if at.partition == partition]
            owned.inputs.process(now_ms, {at.topic: consumer.known_lag(at) for at in own}, time)
    regulate(ready, consumer, bytes_max)


def punctuate_all(running: Iterable[OwnedTask], now_ms: int, blocking_ms_max: int, clock: Clock) -> None:
    """Evaluate the WALL_CLOCK_TIME schedules of tasks that are not paused; log those that block heartbeats too long."""
    for owned in running:
        assert owned.task is not None
        assert owned.inputs is not None
        if not owned.inputs.is_paused:
            began_ms = clock.monotonic_ms()
            owned.task.punctuate_wall_clock(now_ms)
            if (ms := clock.monotonic_ms() - began_ms) > blocking_ms_max:
                log_blocking(f"the WALL_CLOCK_TIME punctuations of partition {owned.partition}", ms)
        # Otherwise the next commit reports them.
        if not owned.task.needs_commit:
            owned.rejection_log.report(owned.task.metrics, clock.monotonic_ms())


def regulate(ready: Ready, consumer: Consumer, bytes_max: int) -> None:
    """Fetch only from the partitions that have room.

    If all tasks together have more than `bytes_max` bytes of fetched records, only partitions without fetched records
    have room, because others may wait for their records.
    """
    paused = consumer.paused()
    is_over = sum(owned.inputs.bytes for owned in ready.values() if owned.inputs is not None) > bytes_max
    for at in consumer.assignment():
        owned = ready.get(at.partition)
        if owned is None or owned.inputs is None or owned.task is None:
            continue
        is_full = owned.inputs.is_full(at.topic) or (is_over and owned.inputs.holds(at.topic))
        if is_full and at not in paused:
            consumer.pause(at)
        elif at in paused and not is_full:
            consumer.resume(at)


def advance_all_idle(ready: Ready, consumer: Consumer, now_ms: int, tasks: int) -> None:
    """Advance the times of tasks that have read everything and are idle long enough; `tasks` is the number of tasks."""
    for partition, owned in ready.items():
        if owned.task is None or owned.inputs is None or owned.idle is None or owned.inputs.is_paused:
            continue
        internal = owned.task.topology.internal_topics()
        read = [at for at in consumer.assignment() if at.partition == partition and at.topic not in internal]
        at_end = all(consumer.is_at_end(at) and not owned.inputs.holds(at.topic) for at in read)
        advance_idle_time(owned.idle, owned.task, now_ms, at_end=at_end, tasks=tasks)


def advance(ready: Ready, consumer: Consumer) -> None:
    """Advance tasks to positions behind transaction markers, which no poll returns.

    Otherwise the markers would look like unread records once the topic's retention has deleted them.
    """
    for at in consumer.assignment():
        owned = ready.get(at.partition)
        if owned is None or owned.task is None or owned.inputs is None or owned.inputs.holds(at.topic):
            continue
        # Kafka Streams commits the consumer's position there too, so that the lag becomes 0 (KAFKA-6607).
        if (position := consumer.known_position(at)) is not None:
            owned.task.advance(at.topic, position)
