"""The demo's steps, on real parts: replay, compact, kill the aggregator half-way, restore, finish, audit.

1. Half of the events are sent. The wall-clock punctuator requests a compaction, which writes a snapshot to the lake.
2. More events are sent and committed. That snapshot does not cover them.
3. The aggregator is killed (SIGKILL) while it processes still more. Started again, it restores from snapshot and
   changelog.
4. The remaining events are sent. The scenario waits until the aggregator has committed everything and the consumer has
   handled every result.
5. The same events go through `penstock batch`, which must produce the same windows. `penstock audit` compares the
   aggregator's windows with session windows that Spark computes. The number of dead letters must be that of the events
   that the topology cannot accept.

A Spark job takes about twenty seconds even for few events. With few events left, a compaction of the restarted
aggregator would start too early to cover everything. In that case the restarted aggregator runs without compactions,
and one compaction at the end covers the remaining records.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from penstock.services.local.broker_config import QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.demo.data_folder import KAFKA
from penstock.services.local.demo.display import Display, counted
from penstock.services.local.demo.events import DemoEvents
from penstock.services.local.demo.final_jobs import FinalJobs, run_in_child
from penstock.services.local.demo.handler import count_notable_sessions
from penstock.services.local.demo.output_topics import read_dead_letter_reasons, read_published_sessions
from penstock.services.local.demo.replay import EventReplay, ReplayCounts
from penstock.services.local.demo.service_specs import (
    SPARK_CONF,
    aggregator_spec,
    consumer_group_id,
    consumer_spec,
    gateway_spec,
)
from penstock.services.local.demo.summary import DemoOutcome
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.services.local.stack import Service, Stack
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.common.errors import FatalError, KafkaTimeout
from penstock.shared.common.lake import state_snapshot, window_queries
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import decode_progress

PARTITIONS = 4
LONGEST = 10
POLL_MS = 200
# A wait fails if the aggregator processes no record for this time.
WAIT_MS = 300_000
# This share of all events is sent before the first compaction.
SENT_BEFORE_CRASH = 0.5
# This share of all events is sent between that compaction and the crash. Of these events, half are
# committed before the crash, and half are in progress.
SENT_INTO_CRASH = 0.1
# About this many events are processed while one compaction runs.
SHORT_REST_EVENTS = 500_000
# The summary shows at most this many different reasons of dead letters.
REASONS = 3

COUNTED = ("closed_windows", "late_records", "dead_letters")

Task = dict[str, Any]


class Scenario:
    """One run of the demo, with its data in `folder`."""

    def __init__(self, events: DemoEvents, folder: Path, display: Display) -> None:
        self._events = events
        self._plan = events.plan
        self._folder = folder
        self._display = display
        self._stack = Stack(folder, hermetic=True)
        self._lake = folder / "lake"
        self._notable = folder / "notable.jsonl"
        self._kafka = KafkaSettings()
        self._admin = Admin(self._kafka)
        self._tasks: list[Task] = []
        self._compactions: list[dict[str, Any]] = []
        self._is_short = True
        self._last_totals = dict.fromkeys(COUNTED, 0)
        self._totals_before = dict.fromkeys(COUNTED, 0)
        self._outcome = DemoOutcome(ReplayCounts())

    async def run(self) -> DemoOutcome:
        """Run all steps of the demo. Raises if one cannot be done. The outcome has the results of the checks."""
        started = time.monotonic()
        async with EmbeddedKafka(self._folder / KAFKA, EmbeddedKafkaSettings(jvm_options=QUICK_START)) as broker:
            self._kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            self._display.step(f"Kafka is up at {broker.bootstrap_servers}")
            try:
                async with Admin(self._kafka) as self._admin:
                    await self._start_services()
                    await self._stream_events()
                    await self._read_results()
                await self._stack.stop()
                await self._look_at_the_result()
            finally:
                await self._stack.stop()
        self._outcome.seconds = time.monotonic() - started
        return self._outcome

    # --- the steps ---

    async def _start_services(self) -> None:
        plan = self._plan
        stack = self._stack
        address = self._kafka.bootstrap_servers
        await self._admin.create_topics([event_time_topic(plan.topic, PARTITIONS)])
        aggregator = await stack.start(aggregator_spec(plan, address, self._lake))
        await aggregator.healthy()
        await self._wait_until("the first tasks", self._are_all_tasks_running)
        consumer = await stack.start(consumer_spec(plan, address, self._notable))
        gateway = await stack.start(gateway_spec(plan, address, {s.name: s.url for s in (aggregator, consumer)}))
        await asyncio.gather(gateway.healthy(), consumer.healthy())
        url = gateway.url
        self._display.step(f"producer, aggregator, consumer and admin are up; dashboard: [link={url}]{url}[/link]")

    async def _stream_events(self) -> None:
        replay = EventReplay(
            self._gateway_service.url, self._plan.topic, self._events.lines(), self._events.name_rejection
        )
        self._outcome.counts = replay.counts
        watching = asyncio.create_task(self._watch_aggregator(replay), name="demo-watch")
        try:
            await self._replay_with_a_crash(replay)
            self._outcome.unfit = self._events.unfit
            if not self._is_short:
                self._display.step("waiting for a compaction that covers everything")
                await self._wait_until("the last compaction", self._lake_covers_everything)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await replay.close()

    async def _replay_with_a_crash(self, replay: EventReplay) -> None:
        step = self._display.step
        total = self._events.count()
        first = math.ceil(total * SENT_BEFORE_CRASH)
        more = min(total - first, max(1, int(total * SENT_INTO_CRASH)))
        self._is_short = total - first - more <= SHORT_REST_EVENTS
        step(f"sending {first:,} of {counted(total, 'event')} to POST /v1/topics/{self._plan.topic}/events")
        seconds = await _measure_seconds(self._send_and_await_commit(replay, first))
        step("waiting for the compaction that the wall-clock punctuator requests (PySpark into Delta)")
        await self._wait_until("the first compaction", self._has_a_snapshot)
        into_crash = more // 2
        seconds += await _measure_seconds(self._send_and_await_commit(replay, more - into_crash))
        seconds += await _measure_seconds(replay.send(into_crash))
        await self._crash_aggregator(more - into_crash, into_crash)
        step("sending the rest")
        seconds += await _measure_seconds(self._send_and_await_commit(replay, None))
        self._outcome.replay_seconds = seconds

    async def _send_and_await_commit(self, replay: EventReplay, limit: int | None) -> None:
        """Send up to `limit` more events, and wait until the aggregator has committed every acknowledged event."""
        await replay.send(limit)
        await self._wait_until("the commit of the last event", self._all_is_committed)

    async def _read_results(self) -> None:
        """Read the published results, and wait until the consumer has handled all of them."""
        plan = self._plan
        outcome = self._outcome
        published = await read_published_sessions(self._kafka, plan.results, PARTITIONS, LONGEST)
        outcome.longest = published.longest

        async def all_is_handled() -> bool:
            committed = await self._admin.group_offsets(consumer_group_id(plan))
            return all(tp in committed and committed[tp].offset >= end for tp, end in published.ends.items())

        await self._wait_until("the consumer's last commit", all_is_handled)

    async def _crash_aggregator(self, committed: int, into_crash: int) -> None:
        step = self._display.step
        aggregator = self._aggregator_service
        plan = self._plan
        doing = "idle as it is"
        if committed:
            doing = f"{counted(committed, 'event')} after the snapshot"
            doing += f" and in the middle of {into_crash:,} more" if into_crash else ""
        step(f"killing the aggregator (SIGKILL), {doing}, and starting it again")
        await aggregator.kill()
        self._tasks = []
        aggregator.spec = aggregator_spec(plan, self._kafka.bootstrap_servers, self._lake, compacts=not self._is_short)
        await aggregator.start()
        await self._wait_until("the restore", self._are_all_tasks_running)
        outcome = self._outcome
        self._outcome.restores = self._tasks
        windows = counted(outcome.restored("windows"), "window")
        changes = outcome.restored("changelog_windows")
        step(
            f"restored in {outcome.restore_ms:,} ms: {windows} from Delta, "
            f"then {counted(changes, 'change')} from the changelog's end"
        )

    async def _look_at_the_result(self) -> None:
        plan = self._plan
        outcome = self._outcome
        if self._is_short:
            self._display.step("compacting the rest into Delta")
        self._display.step("the same events as `penstock batch`, then an audit with Spark's own session windows")
        log_file = self._folder / "logs" / "final-jobs.log"
        arguments = FinalJobs(
            application=plan.application,
            lake=str(self._lake),
            store=plan.results,
            topology=plan.topology,
            options=plan.options,
            records=outcome.counts.acknowledged,
            spark_conf=SPARK_CONF,
        ).arguments()
        status, outcome.audit, outcome.batch, job = await run_in_child(arguments, self._kafka, log_file)
        if not outcome.audit:
            raise job.died()
        if not await self._is_covered_by_snapshot():
            raise FatalError(f"the lake does not hold all that was committed; see {log_file}")
        outcome.audit_ok = status == 0
        outcome.compactions = sum(one["status"] == "done" for one in self._compactions) + self._is_short
        stored = await asyncio.to_thread(window_queries.count_windows, str(self._lake), plan.application)
        outcome.delta_rows = stored.live + sum(stored.closed.values())
        outcome.reasons = await read_dead_letter_reasons(self._kafka, plan.dead_letters, PARTITIONS, REASONS)
        outcome.notable = count_notable_sessions(self._notable)

    # --- watching ---

    @property
    def _aggregator_service(self) -> Service:
        return self._stack.services["aggregator"]

    @property
    def _gateway_service(self) -> Service:
        return self._stack.services["gateway"]

    async def _read_aggregator_state(self) -> None:
        """Read the aggregator's state. While it does not answer, the last state is kept."""
        state = await self._aggregator_service.get("/v1/streams")
        if state is not None:
            self._tasks = state["tasks"]
            newest = state["compactions"]
            known = {one["started_at_ms"]: one for one in [*self._compactions, *newest]}
            self._compactions = [known[at] for at in sorted(known)]

    async def _watch_aggregator(self, replay: EventReplay) -> None:
        while True:
            await self._read_aggregator_state()
            self._show_figures(replay)
            await asyncio.sleep(POLL_MS / 1000)

    def _show_figures(self, replay: EventReplay) -> None:
        figures = self._display.figures
        tasks = self._tasks
        figures.acknowledged = replay.counts.acknowledged
        figures.processed = self._processed_records()
        figures.open = sum(t.get("state_rows", 0) for t in tasks) if tasks else None
        figures.stream_time_ms = max((t.get("stream_time_ms", -1) for t in tasks), default=None)
        self._show_totals(tasks)
        figures.notable = count_notable_sessions(self._notable)
        figures.compactions = sum(one["status"] == "done" for one in self._compactions)
        figures.compacting = any(one["status"] == "running" for one in self._compactions[-1:])
        self._display.update()

    def _show_totals(self, tasks: list[Task]) -> None:
        """Update the totals. A restarted aggregator counts from zero, so its counts before the crash are added."""
        totals = {name: sum(t.get(name, 0) for t in tasks) for name in COUNTED}
        if any(totals[name] < self._last_totals[name] for name in COUNTED):
            self._totals_before = {n: self._totals_before[n] + self._last_totals[n] for n in COUNTED}
        self._last_totals = totals
        figures = self._display.figures
        closed, late, dead = (self._totals_before[n] + totals[n] for n in COUNTED)
        figures.closed = closed
        figures.late = late
        figures.dead_letters = dead

    def _processed_records(self) -> int:
        """Source records that the tasks processed. Offsets have no gaps, since ingest writes without transactions."""
        return sum(offset for task in self._tasks for offset in task.get("sources", {}).values())

    async def _all_is_committed(self) -> bool:
        """Whether the aggregator has committed every record that Kafka acknowledged."""
        if self._processed_records() < self._outcome.counts.acknowledged:
            return False
        offsets = await self._admin.group_offsets(self._plan.application, require_stable=True)
        committed = sum(at.offset for tp, at in offsets.items() if tp.topic == self._plan.topic)
        return committed >= self._outcome.counts.acknowledged

    def _are_all_tasks_running(self) -> bool:
        return len(self._tasks) == PARTITIONS and all(task["state"] == "running" for task in self._tasks)

    def _has_compacted(self) -> bool:
        for one in self._compactions:
            if one["status"] == "failed":
                raise FatalError(f"a compaction failed: {one['detail']}; see {self._aggregator_service.log_file}")
        return any(one["status"] == "done" for one in self._compactions)

    async def _has_a_snapshot(self) -> bool:
        """Whether a compaction has covered records. A compaction before the first record covers none."""
        return self._has_compacted() and await self._records_covered_by_snapshot() > 0

    async def _lake_covers_everything(self) -> bool:
        """Whether the snapshot covers every acknowledged event, and no compaction is running.

        Raises FatalError if a compaction has failed.
        """
        if not self._has_compacted() or self._compactions[-1]["status"] == "running":
            return False
        return await self._is_covered_by_snapshot()

    async def _is_covered_by_snapshot(self) -> bool:
        return await self._records_covered_by_snapshot() >= self._outcome.counts.acknowledged

    async def _records_covered_by_snapshot(self) -> int:
        """Return the number of source records that the snapshot's progress covers."""
        application = self._plan.application
        partitions = range(PARTITIONS)
        snapshot = await asyncio.to_thread(state_snapshot.read_snapshot, str(self._lake), application, partitions)
        rows = snapshot.partitions.values() if snapshot is not None else ()
        return sum(offset for row in rows for offset in decode_progress(row.progress).sources.values())

    async def _wait_until(self, what: str, reached: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait until `reached` returns True.

        Raises KafkaTimeout, which names `what`, if the aggregator processes no record for WAIT_MS. Raises ChildDied,
        which names the service, if a service ends meanwhile.
        """
        loop = asyncio.get_running_loop()
        processed = -1
        try:
            async with asyncio.timeout(None) as limit:
                while True:
                    await self._read_aggregator_state()
                    if self._processed_records() != processed:
                        processed = self._processed_records()
                        limit.reschedule(loop.time() + WAIT_MS / 1000)
                    now = reached()
                    if await now if inspect.isawaitable(now) else now:
                        return
                    self._stack.check()
                    await asyncio.sleep(POLL_MS / 1000)
        except TimeoutError:
            raise KafkaTimeout(f"waited {WAIT_MS} ms for {what}; the logs are in {self._folder / 'logs'}") from None


async def _measure_seconds(work: Awaitable[object]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started
