"""The demo's course, on real parts: replay, compact, kill the aggregator half-way, restore, finish, audit.

Half of the events are sent; when the wall-clock punctuator's first compaction has put a snapshot into the lake, the
aggregator is killed (SIGKILL) while it works on more, started again, and restores from snapshot and changelog. The
rest follows, and at the end a Spark job with none of the engine's window code proves the result.

A Spark job takes its twenty seconds however little there is to fold. Where the rest is through sooner than that, the
restarted aggregator starts none, which could only come too early to cover everything; one job at the end does it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.local.demo import closing, specs
from services.local.demo.display import Display, counted
from services.local.demo.events import Events
from services.local.demo.replay import Replay, ReplayCounts
from services.local.demo.results import count_notable, dead_letter_reasons, longest_sessions
from services.local.jobs import run_job
from services.local.kafka import EmbeddedKafka
from services.local.stack import Service, Stack
from shared.clients.admin import Admin, event_time_topic
from shared.common import lake
from shared.common.errors import FatalError, KafkaTimeout
from shared.common.settings import KafkaSettings
from shared.streams.changelog_format import decode_progress

PARTITIONS = 4
LONGEST = 10
POLL_MS = 200
WAIT_MS = 300_000  # for each thing that is waited for
SENT_BEFORE_CRASH = 0.5  # of all events
SENT_INTO_CRASH = 0.1  # of all events, right before it, so that it comes in the middle of work
SHORT_REST_EVENTS = 500_000  # about as many go through the chain while one compaction runs
REASONS = 3  # of dead letters, in the summary

COUNTED = ("closed_sessions", "late_records", "dead_letters")

Task = dict[str, Any]


@dataclass(slots=True)
class Outcome:
    """What the demo found."""

    counts: ReplayCounts
    restores: list[Task] = field(default_factory=list)
    compactions: int = 0
    replay_seconds: float = 0.0
    audit_ok: bool = False
    audit: dict[str, Any] = field(default_factory=dict)
    lake: dict[str, Any] = field(default_factory=dict)
    longest: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notable: int = 0
    seconds: float = 0.0

    @property
    def restore_ms(self) -> int:
        """The longest restore after the crash: the tasks restore side by side."""
        return max((task["restore_ms"] for task in self.restores), default=0)

    def restored(self, what: str) -> int:
        """How many `windows` (of the snapshot), `changelog_windows` or `changelog_records` that restore read."""
        return sum(task[f"restored_{what}"] for task in self.restores)


class Scenario:
    """One run with its data in `folder`."""

    def __init__(self, events: Events, folder: Path, display: Display) -> None:
        self._events, self._plan, self._folder, self._display = events, events.plan, folder, display
        self._stack = Stack(folder, hermetic=True)
        self._lake, self._notable = folder / "lake", folder / "notable.jsonl"
        self._kafka = KafkaSettings()
        self._tasks: list[Task] = []
        self._compactions: list[dict[str, Any]] = []
        self._is_short = True
        self._last_totals = dict.fromkeys(COUNTED, 0)
        self._totals_before = dict.fromkeys(COUNTED, 0)
        self._outcome = Outcome(ReplayCounts())

    async def run(self) -> Outcome:
        """The whole course; raises where a part of it fails."""
        started = time.monotonic()
        async with EmbeddedKafka(self._folder / "kafka") as broker:
            self._kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            self._display.step(f"Kafka is up at {broker.bootstrap_servers}")
            try:
                await self._start_services()
                await self._stream()
                await self._stack.stop()
                await self._look_at_the_result()
            finally:
                await self._stack.stop()
        self._outcome.seconds = time.monotonic() - started
        return self._outcome

    # --- the parts ---

    async def _start_services(self) -> None:
        plan, stack, address = self._plan, self._stack, self._kafka.bootstrap_servers
        async with Admin(self._kafka) as admin:
            await admin.create_topics([event_time_topic(plan.topic, PARTITIONS)])
        aggregator = await stack.start(specs.aggregator(plan, address, self._lake))
        await aggregator.healthy()
        await self._until("the first tasks", lambda: self._all_tasks("running"))
        consumer = await stack.start(specs.consumer(plan, address, self._notable))
        gateway = await stack.start(specs.gateway(plan, address, {s.name: s.url for s in (aggregator, consumer)}))
        await asyncio.gather(gateway.healthy(), consumer.healthy())
        url = gateway.url
        self._display.step(f"producer, aggregator, consumer and admin are up; dashboard: [link={url}]{url}[/link]")

    async def _stream(self) -> None:
        replay = Replay(self._gateway.url, self._plan.topic, self._events.lines(), self._events.name_refusal)
        self._outcome.counts = replay.counts
        watching = asyncio.create_task(self._watch(replay), name="demo-watch")
        try:
            await self._replay_with_a_crash(replay)
            if not self._is_short:
                self._display.step("waiting for a compaction that covers everything")
                await self._until("the last compaction", self._lake_covers_everything)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await replay.close()

    async def _replay_with_a_crash(self, replay: Replay) -> None:
        step, total = self._display.step, self._events.count()
        first, more = math.ceil(total * SENT_BEFORE_CRASH), int(total * SENT_INTO_CRASH)
        self._is_short = total - first - more <= SHORT_REST_EVENTS
        step(f"sending {first:,} of {counted(total, 'event')} to POST /v1/topics/{self._plan.topic}/events")
        seconds = await _timed(replay.send(first))
        step("waiting for the wall-clock punctuator's compaction (PySpark into Delta)")
        await self._until("the first compaction", self._has_compacted)
        seconds += await _timed(replay.send(more))
        await self._crash(more)
        step("sending the rest")
        seconds += await _timed(replay.send())
        seconds += await _timed(self._until("the last event", lambda: self._processed() >= replay.counts.acknowledged))
        self._outcome.replay_seconds = seconds

    async def _crash(self, more: int) -> None:
        step, aggregator, plan = self._display.step, self._aggregator, self._plan
        doing = f"right after sending {counted(more, 'event')} more" if more else "idle as it is"
        step(f"killing the aggregator (SIGKILL), {doing}, and starting it again")
        await aggregator.kill()
        self._tasks = []
        aggregator.spec = specs.aggregator(plan, self._kafka.bootstrap_servers, self._lake, compacts=not self._is_short)
        await aggregator.start()
        await self._until("the restore", lambda: self._all_tasks("running"))
        outcome, self._outcome.restores = self._outcome, self._tasks
        windows, changes = counted(outcome.restored("windows"), "window"), outcome.restored("changelog_windows")
        step(
            f"restored in {outcome.restore_ms:,} ms: {windows} from Delta, "
            f"then {counted(changes, 'change')} from the changelog's end"
        )

    async def _look_at_the_result(self) -> None:
        plan, outcome, records = self._plan, self._outcome, self._outcome.counts.acknowledged
        if self._is_short:
            self._display.step("folding the rest into Delta, then auditing with Spark's own session windows")
            flags = closing.arguments_for(plan.application, str(self._lake), records, specs.SPARK_CONF)
            module: str | None = closing.__name__
        else:
            self._display.step("auditing: a Spark job with Spark's own session windows")
            flags = ["--application", plan.application, "--lake", str(self._lake), "--json"]
            flags, module = [*flags, "--expect-records", str(records)], None
        log_file = self._folder / "logs" / "audit.log"
        status, outcome.audit, job = await run_job("audit", flags, self._kafka, log_file, "audit_ok", module)
        if not outcome.audit:
            raise job.died()
        if not await self._is_covered():
            raise FatalError(f"the lake does not hold all that was committed; see {log_file}")
        outcome.audit_ok = status == 0
        outcome.compactions = sum(run["status"] == "done" for run in self._compactions) + self._is_short
        outcome.lake = await asyncio.to_thread(lake.describe, str(self._lake), plan.application)
        outcome.longest = await longest_sessions(self._kafka, plan.results, PARTITIONS, LONGEST)
        outcome.reasons = await dead_letter_reasons(self._kafka, plan.dead_letters, PARTITIONS, REASONS)
        outcome.notable = count_notable(self._notable)

    # --- watching ---

    @property
    def _aggregator(self) -> Service:
        return self._stack.services["aggregator"]

    @property
    def _gateway(self) -> Service:
        return self._stack.services["gateway"]

    async def _look(self) -> None:
        """Ask the aggregator how far it is; while it does not answer, what it said last stands."""
        state = await self._aggregator.get("/v1/streams")
        if state is not None:
            self._tasks, runs = state["tasks"], state["compactions"]
            known = {run["started_at_ms"]: run for run in [*self._compactions, *runs]}
            self._compactions = [known[at] for at in sorted(known)]

    async def _watch(self, replay: Replay) -> None:
        while True:
            await self._look()
            self._show(replay)
            await asyncio.sleep(POLL_MS / 1000)

    def _show(self, replay: Replay) -> None:
        figures, tasks = self._display.figures, self._tasks
        figures.acknowledged, figures.processed = replay.counts.acknowledged, self._processed()
        figures.open = sum(t.get("open_sessions", 0) for t in tasks) if tasks else None
        figures.stream_time_ms = max((t.get("stream_time_ms", -1) for t in tasks), default=None)
        self._show_totals(tasks)
        figures.notable = count_notable(self._notable)
        figures.compactions = sum(run["status"] == "done" for run in self._compactions)
        figures.compacting = any(run["status"] == "running" for run in self._compactions[-1:])
        self._display.update()

    def _show_totals(self, tasks: list[Task]) -> None:
        """A restarted aggregator counts from nothing: what it had counted before the crash is added."""
        totals = {name: sum(t.get(name, 0) for t in tasks) for name in COUNTED}
        if any(totals[name] < self._last_totals[name] for name in COUNTED):
            self._totals_before = {n: self._totals_before[n] + self._last_totals[n] for n in COUNTED}
        self._last_totals = totals
        figures = self._display.figures
        closed, late, dead = (self._totals_before[n] + totals[n] for n in COUNTED)
        figures.closed, figures.late, figures.dead_letters = closed, late, dead

    def _processed(self) -> int:
        """Source records that the tasks took; offsets have no holes, since ingest writes without transactions."""
        return sum(offset for task in self._tasks for offset in task.get("sources", {}).values())

    def _all_tasks(self, state: str) -> bool:
        return len(self._tasks) == PARTITIONS and all(task["state"] == state for task in self._tasks)

    def _has_compacted(self) -> bool:
        for run in self._compactions:
            if run["status"] == "failed":
                raise FatalError(f"a compaction failed: {run['detail']}; see {self._aggregator.log_file}")
        return any(run["status"] == "done" for run in self._compactions)

    async def _lake_covers_everything(self) -> bool:
        """Whether the snapshot's progress reaches as far as the aggregator's commits, and no job is under way."""
        if not self._has_compacted() or self._compactions[-1]["status"] == "running":
            return False
        return await self._is_covered()

    async def _is_covered(self) -> bool:
        application, partitions = self._plan.application, range(PARTITIONS)
        snapshot = await asyncio.to_thread(lake.read_snapshot, str(self._lake), application, partitions)
        rows = snapshot.partitions.values() if snapshot is not None else ()
        covered = sum(offset for row in rows for offset in decode_progress(row.progress).sources.values())
        return covered >= self._outcome.counts.acknowledged

    async def _until(self, what: str, reached: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait until `reached`; the error names what did not come, or the service that ended instead."""
        try:
            async with asyncio.timeout(WAIT_MS / 1000):
                while True:
                    await self._look()
                    now = reached()
                    if await now if inspect.isawaitable(now) else now:
                        return
                    self._stack.check()
                    await asyncio.sleep(POLL_MS / 1000)
        except TimeoutError:
            raise KafkaTimeout(f"waited {WAIT_MS} ms for {what}; the logs are in {self._folder / 'logs'}") from None


async def _timed(work: Awaitable[object]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started
