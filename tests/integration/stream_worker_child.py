"""A stream worker in a separate process that tests can kill.

With `dies_after`, a key of POINTS and a number of calls, it kills itself after that call once it has a task. On SIGTERM
it commits and leaves the group, as a service does. On SIGUSR1 it stops itself (SIGSTOP) before its next commit. If its
partitions have other owners when a test continues it, it is a zombie that writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from penstock.shared.clients.protocol.column_batch_builder import ColumnBatchBuilder
from penstock.shared.common import log
from penstock.shared.common.records import GroupMetadata
from penstock.shared.common.settings import KafkaSettings, LogSettings
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.task.outputs import TaskCommit
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_table import WindowTable
from tests.integration.forkserver import FORKSERVER

GAP_MS, GRACE_MS = 100, 50
LONG_GRACE_MS, TICK_MS = 60_000, 200
SHUTDOWN_MS = 10_000
RECORDS_A_TURN = 50  # few, so that the worker can always be killed in a later turn


class Deltas(Processor):
    """Sums the values of each key, forwards the sums at each wall-clock tick, and then clears them."""

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self.sums = context.store("sums")
        context.schedule(TICK_MS, PunctuationType.WALL_CLOCK_TIME, self.tick, name="tick")

    def process(self, record: Record) -> None:
        known = self.sums.get(record.key) or {"n": 0, "ms": 0}
        self.sums.put(record.key, {"n": known["n"] + 1, "ms": known["ms"] + record.value["ms"]})

    def tick(self, now_ms: int) -> None:
        for key, known in list(self.sums.items()):
            self.context.forward(Record(key, known, now_ms))
            self.sums.delete(key)


def sessions(topic: str) -> Topology:
    """One source and one session window."""
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(GAP_MS, GRACE_MS)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


def visits(topic: str) -> Topology:
    """A repartition topic, a table join, a session window, and a store that a named wall-clock schedule empties."""
    builder = StreamsBuilder()
    users = builder.table(f"{topic}-users")
    clicks = builder.stream(topic).key_by(lambda record: record.value["user"], name="by-user")
    joined = clicks.join(users, lambda click, user: {**click, "city": user["city"]})
    joined.to(f"{topic}-joined")
    joined.process_values(Deltas, builder.add_store("sums"), name="deltas").to(f"{topic}-deltas")
    windows = joined.group_by_key().session_window(GAP_MS, LONG_GRACE_MS)
    windows.aggregate("visits", n=Count(), ms=Sum("ms")).on_close().to(f"{topic}-out")
    return builder.build()


POINTS: dict[str, tuple[type, str]] = {
    "a kernel": (WindowTable, "_run_kernel"),
    "encoding what a commit writes": (StreamTask, "prepare_commit"),
    "filling a batch": (ColumnBatchBuilder, "extend"),
    "sealing a batch": (ColumnBatchBuilder, "build"),
    "a write": (ChangelogPartition, "_write_records"),
    "a commit": (ChangelogPartition, "commit"),
}
"""The methods after whose call the worker can be killed."""


def die_after(point: str, calls: int) -> None:
    """Kill the process after this many further calls."""
    owner, name = POINTS[point]
    method = getattr(owner, name)
    left = calls

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    async def waited(*arguments: Any) -> Any:
        result = await method(*arguments)
        count()
        return result

    def called(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        count()
        return result

    setattr(owner, name, waited if asyncio.iscoroutinefunction(method) else called)


def stop_on_sigusr1() -> None:
    """After SIGUSR1, stop the process before its next commit is written."""
    signalled, write = asyncio.Event(), ChangelogPartition.commit

    async def commit(self: ChangelogPartition, commit: TaskCommit, group: GroupMetadata) -> CommitPosition:
        if signalled.is_set():
            signalled.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        return await write(self, commit, group)

    ChangelogPartition.commit = commit  # type: ignore[method-assign]
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, signalled.set)


class WorkerProcess:
    """A process that runs a stream worker with a configuration in JSON."""

    def __init__(self, config: bytes) -> None:
        self._commits, commits = FORKSERVER.Pipe(duplex=False)
        self._process = FORKSERVER.Process(target=run, args=(config, commits), daemon=True)
        self._process.start()
        commits.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit status, negative after a signal."""
        await asyncio.to_thread(self._process.join)
        assert self.returncode is not None
        return self.returncode

    async def has_committed(self, timeout_s: float) -> bool:
        """Wait until the worker's first commit is durable. Returns False after the time limit, or if it has ended."""
        if not await asyncio.to_thread(self._commits.poll, timeout_s):
            return False
        try:
            self._commits.recv_bytes()
        except EOFError:
            return False
        return True


def run(config: bytes, commits: Connection) -> None:
    asyncio.run(main(config, commits))


async def main(argument: bytes, commits: Connection) -> None:
    stop_on_sigusr1()
    log.configure(LogSettings(), "child")
    config = msgspec.json.decode(argument)
    if config["build"] == "sessions":
        build, given = sessions(config["topic"]), {"max_poll_records": RECORDS_A_TURN, "commit_interval_ms": 1}
    else:
        build, given = visits(config["topic"]), {}
    settings = StreamsSettings(**{**config["settings"], **given})
    worker = StreamWorker(KafkaSettings(bootstrap_servers=config["kafka"]), settings, build)
    working = asyncio.ensure_future(work(worker, commits, config.get("dies_after")))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await working
    await worker.shutdown(SHUTDOWN_MS)


async def work(worker: StreamWorker, commits: Connection, dies_after: tuple[str, int] | None) -> None:
    await worker.startup()
    has_told = False
    while True:
        await worker.run_once()
        tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
        if tasks and dies_after is not None:
            die_after(*dies_after)
            dies_after = None
        if not has_told and any(task.metrics.committed.records for task in tasks):
            has_told = True
            commits.send_bytes(b"committed")
