"""Soak: stream workers are killed, stopped and rebalanced for a minute under load, under both guarantees.

Besides the output, the test reads the changelog as a reader does, and compares it with that of an uninterrupted run.
The state is exact under both guarantees, since the owner's epoch and the commit's progress record decide which entries
count.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.streams.changelog.changelog_reader import Change, ChangelogReader, apply_one_by_one
from penstock.shared.streams.changelog.format import FINAL, LIVE, TAKEOVER, decode_entry
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.runtime.worker_tasks import OwnedTask
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.integration.stream_worker_child import WorkerProcess
from tests.integration.test_stream_worker import (
    GUARANTEES,
    WAIT_SECONDS,
    Chain,
    chain_of,
    child,
    offline,
    running,
    topology,
    until,
)
from tests.shared_broker import Broker

SOAK_SECONDS = 60.0
STOPPED_SECONDS = 5.0  # past the session timeout: the group rebalances, and the continued worker is a zombie
GUEST_SECONDS = 3.0  # how long a third worker has its share before it leaves
EVENTS_A_TIME, EVERY_SECONDS = 250, 0.5
PARTITIONS = 4
Given = Callable[[int], dict[str, Any]]
"""The settings of each worker, by its index."""


class State:
    """The state of a changelog partition for a reader: live windows, and each closed one."""

    def __init__(self) -> None:
        self.live: dict[tuple[bytes, int], tuple[int, bytes]] = {}
        self.closed: Counter[tuple[bytes, int, int, bytes]] = Counter()
        self.reader = ChangelogReader(apply_one_by_one(self._apply))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and (self.live, self.closed) == (other.live, other.closed)

    def __repr__(self) -> str:
        return f"State({self.live}, {self.closed}, {self.reader})"

    @classmethod
    def of(cls, records: Iterable[tuple[bytes | None, bytes | None]]) -> State:
        state = cls()
        for offset, (key, value) in enumerate(records):
            state.reader.feed_record(offset, key, value)
        return state

    def _apply(self, change: Change) -> None:
        if change.operation == LIVE:
            self.live[change.key, change.start] = change.end, change.state
            return
        self.live.pop((change.key, change.start), None)
        if change.operation == FINAL:
            self.closed[change.key, change.start, change.end, change.state] += 1


def rows_of(owned: OwnedTask) -> dict[tuple[bytes, int], int]:
    """The live windows of a running task: their ends by key and start."""
    assert owned.task is not None
    return {(row.key.encode(), row.start): row.end for row in owned.task.stores["s"].rows()}


def offline_state(chain: Chain, partition: int) -> State:
    """The state of a partition after an uninterrupted run."""
    driver = TopologyTestDriver(topology(chain.topic), partition=partition, errors=ErrorHandlers())
    for _, key, timestamp, number in (event for event in chain.sent if event[0] == partition):
        driver.pipe(chain.topic, key=key, value=b'{"id":%d}' % number, timestamp=timestamp)
    return State.of(driver.changelog)


class Crew:
    """Two workers in separate processes that are killed and stopped at random and restarted, and temporary third
    workers.
    """

    def __init__(self, chain: Chain, guarantee: str, seed: int, given: Given) -> None:
        self._chain, self._guarantee, self.random, self._given = chain, guarantee, random.Random(seed), given
        self._stack = contextlib.AsyncExitStack()
        self._processes: list[WorkerProcess] = []
        self._running: set[int] = set()
        self.done: Counter[str] = Counter()

    async def __aenter__(self) -> Crew:
        self._processes = [await self._start(index) for index in range(2)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def disturb(self) -> None:
        """Kill or stop a worker, or run a third one for a while; restart workers that ended."""
        process = self.random.choice(self._processes)
        what = self.random.choice(("killed", "stopped", "rebalanced"))
        if what == "killed":
            process.send_signal(signal.SIGKILL)
            await process.wait()
        elif what == "stopped":
            await self._make_zombie(process)
        else:
            guest = await self._start(len(self._processes))
            await asyncio.sleep(GUEST_SECONDS)
            guest.send_signal(signal.SIGTERM)
            await guest.wait()
        self.done[what] += 1
        for i, one in enumerate(self._processes):
            if one.returncode is not None:
                self._processes[i] = await self._start(i)

    async def _make_zombie(self, process: WorkerProcess) -> None:
        """Stop a worker before a commit, and continue it when another owner has taken over its partitions."""

        async def stopped() -> bool:
            return _is_stopped(process)

        if process.pid not in self._running:
            assert await process.has_committed(WAIT_SECONDS)
            self._running.add(process.pid)
        process.send_signal(signal.SIGUSR1)
        await until(stopped)
        before = await self._takeovers()

        async def taken_over() -> bool:
            return await self._takeovers() > before

        await asyncio.sleep(STOPPED_SECONDS)
        await until(taken_over)
        process.send_signal(signal.SIGCONT)

    async def _takeovers(self) -> int:
        records = await self._chain.read(f"{self._chain.topic}-changelog")
        return sum(decode_entry(record.value).operation == TAKEOVER for record in records)

    async def _start(self, index: int) -> WorkerProcess:
        return await self._stack.enter_async_context(child(self._chain, self._guarantee, **self._given(index)))


def _is_stopped(process: WorkerProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.asynccontextmanager
async def load(chain: Chain) -> AsyncIterator[None]:
    """Send events until the block ends."""

    async def send() -> None:
        while not ended.is_set():
            await chain.send(EVENTS_A_TIME)
            await asyncio.sleep(EVERY_SECONDS)

    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        try:
            yield
        finally:
            ended.set()


def in_memory(index: int) -> dict[str, Any]:
    return {}


def on_disk(folder: Path) -> Given:
    """Settings of workers with standbys, each with a state folder that survives the process."""

    def given(index: int) -> dict[str, Any]:
        own = {"default_dsl_store": "rocksDB", "state_dir": str(folder / str(index)), "statestore_cache_max_bytes": 0}
        return {**own, "num_standby_replicas": 1, "partition_assignment_strategy": "cooperative-sticky"}

    return given


@pytest.mark.soak
@pytest.mark.parametrize("store", ["in_memory", "rocksDB"])
@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_soak_of_crashes(kafka: Broker, topic_name: str, tmp_path: Path, guarantee: str, store: str) -> None:
    """After a minute of kills, stops and rebalances under load, output, late records and state equal an uninterrupted
    run's.
    """
    given = in_memory if store == "in_memory" else on_disk(tmp_path)
    async with chain_of(kafka, topic_name, partitions=PARTITIONS) as chain:
        async with Crew(chain, guarantee, 11, given) as crew, load(chain):
            end = time.monotonic() + SOAK_SECONDS
            while time.monotonic() < end:
                await crew.disturb()
                await asyncio.sleep(crew.random.uniform(0, 2))
        worker = chain.worker(processing_guarantee=guarantee, transaction_timeout_ms=5_000, **given(0))
        async with running(worker):
            await chain.wait_processed(worker)
            rows = {p: rows_of(owned) for p, owned in worker.tasks().items()}
            print([owned.report for owned in worker.tasks().values()])
        closed, late = offline(topic_name, chain.sent)
        got = await chain.values("out"), await chain.values("late")
        entries = await chain.read(f"{topic_name}-changelog")
        states = [State.of((r.key, r.value) for r in entries if r.partition == p) for p in range(PARTITIONS)]
        ignored = sum(state.reader.entries_ignored for state in states)
        epochs = [state.reader.epoch for state in states]
        print(f"\n{guarantee}: {len(chain.sent)} events, {dict(crew.done)}, {len(closed)} sessions, {len(late)} late")
        print(f"owner epochs {epochs}; {ignored} of {len(entries)} changelog records are of overtaken owners")
        print(f"{len(got[0]) - len(set(got[0]))} results and {len(got[1]) - len(set(got[1]))} late records came twice")
        assert min(crew.done[what] for what in ("killed", "stopped", "rebalanced")) > 0
        assert (ignored > 0) == (guarantee == "at_least_once"), "zombies write what no reader takes, if they can"
        assert [state == offline_state(chain, p) for p, state in enumerate(states)] == [True] * PARTITIONS
        assert rows == {p: {at: end for at, (end, _) in state.live.items()} for p, state in enumerate(states)}
        if guarantee == "exactly_once":
            assert got == (closed, late)
        else:
            assert (set(got[0]), set(got[1])) == (set(closed), set(late))
