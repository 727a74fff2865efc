"""A restore shows its progress, yields to the event loop and discards invalid state on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.owned_task import OwnedTask
from penstock.shared.streams.runtime.partition_restore import RESTORE_RECORDS_MAX, PartitionRestore
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import Checkpoint
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.testing.manual_clock import ManualClock


class Steps:
    """A log whose reader advances by a hundred transaction markers and a second with each poll."""

    def __init__(self, clock: ManualClock, owned: OwnedTask) -> None:
        self.at, self.seen, self._clock, self._owned = 0, [], clock, owned  # type: ignore[var-annotated]

    async def position(self, at: TopicPartition) -> int:
        return self.at

    async def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, object]:
        self.seen.append(self._owned.describe())
        self.at += 100
        self._clock.advance(1_000)
        return {}


async def test_a_restore_shows_how_far_it_is() -> None:
    """During a restore the task's description has the remaining records, the rate and the remaining time."""
    builder, clock = StreamsBuilder(), ManualClock(0)
    builder.stream("in").to("out")
    kafka, settings = KafkaSettings(bootstrap_servers="localhost:1"), StreamsSettings(application_id="app")
    owned = OwnedTask(ChangelogPartition(kafka, settings, 2, "here", clock))
    restoring = PartitionRestore(kafka, settings, StreamTask(builder.build(), 2, application="app"), clock)
    owned.changelog.progress = restoring.progress
    steps = Steps(clock, owned)
    await restoring.read_until(300, steps)  # type: ignore[arg-type]
    assert [(s["state"], s["remaining_records"], s["records_per_second"], s["eta_ms"]) for s in steps.seen] == [
        ("restoring", 300, None, None),
        ("restoring", 200, 100, 2_000),
        ("restoring", 100, 100, 1_000),
    ]
    assert owned.describe()["remaining_records"] == 0


async def test_a_restore_yields_to_the_event_loop() -> None:
    """The changelog is processed in slices, so that other tasks of the event loop run in between."""
    turns: list[int] = []

    class AtHand:
        """A consumer that has everything, and so awaits nothing."""

        def __init__(self) -> None:
            self.at = 0

        async def position(self, at: TopicPartition) -> int:
            return self.at

        async def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, object]:
            self.at += max_records
            return {}

    consumer = AtHand()

    async def beside() -> None:
        while True:
            turns.append(consumer.at)
            await asyncio.sleep(0)

    builder = StreamsBuilder()
    builder.stream("in").to("out")
    task = StreamTask(builder.build(), 2, application="app")
    kafka = KafkaSettings(bootstrap_servers="localhost:1")
    restoring = PartitionRestore(kafka, StreamsSettings(application_id="app"), task, ManualClock(0))
    other = asyncio.create_task(beside())
    await restoring.read_until(10 * RESTORE_RECORDS_MAX, consumer)  # type: ignore[arg-type]
    other.cancel()
    assert turns == [step * RESTORE_RECORDS_MAX for step in range(10)]


class Whole:
    """A consumer of a changelog partition that has its first ten records."""

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 10)


async def test_discarded_state_on_disk_leaves_no_epoch_or_progress(tmp_path: Path) -> None:
    """After discarding a state on disk, a restore keeps neither its epoch nor its progress."""
    builder, consumer = StreamsBuilder(), Whole()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    local = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0).state_of(0)
    task = StreamTask(builder.build(), 0, application="app", local=local)
    task.initialize(0)
    kafka = KafkaSettings(bootstrap_servers="localhost:1")
    restoring = PartitionRestore(kafka, StreamsSettings(application_id="app"), task, ManualClock(0))
    local.write(Checkpoint("id", 3, covered_offset=5, verified_offset=5, progress=None))
    restoring.topic_id = "id"
    assert await restoring._take_up_local(consumer) == local.checkpoint  # type: ignore[arg-type]
    assert (restoring.reader.epoch, restoring.next_epoch()) == (3, 4)
    restoring.topic_id = "another"
    assert await restoring._take_up_local(consumer) is None  # type: ignore[arg-type]
    reader = restoring.reader
    assert (reader.epoch, reader.progress, restoring.next_epoch(), local.checkpoint) == (0, None, 1, None)
    local.close()
