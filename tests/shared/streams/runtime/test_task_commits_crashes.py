"""A process is killed between kernel, encoding and commit. The next one produces the output of an uninterrupted run."""

from __future__ import annotations

import asyncio
import signal

import pytest

from penstock.shared.testing.fake_broker import FakeCluster
from tests.integration.stream_worker_child import POINTS
from tests.integration.test_soak_crashes import State, offline_state, rows_of
from tests.integration.test_stream_worker import GUARANTEES, chain_of, child, offline, running

TOPIC = "clicks"
BROKER = {"group.min.session.timeout.ms": "10"}
QUICK = {"session_timeout_ms": 500, "heartbeat_interval_ms": 100, "poll_ms": 10}
EVENTS_BETWEEN = 200
DEADLINE_SECONDS = 60
DEATHS = [(point, calls) for point in POINTS for calls in ((1, 2, 3) if point == "a write" else (2,))]
"""A commit writes twice at least once: results and entries, then the progress record; once in a transaction."""


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_killed_at_each_point(guarantee: str) -> None:
    """A task that is killed at each point in turn has the results and state of an uninterrupted run. With
    at_least_once, results may repeat."""
    async with FakeCluster(configs=BROKER) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        for death in DEATHS:
            await chain.send(EVENTS_BETWEEN)
            async with child(chain, guarantee, dies_after=death, **QUICK) as process:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    assert await process.wait() == -signal.SIGKILL
        async with running(worker := chain.worker(processing_guarantee=guarantee, **QUICK)):
            await chain.wait_processed(worker)
            (owned,) = worker.tasks().values()
            rows = rows_of(owned)
        state = State.of((entry.key, entry.value) for entry in await chain.read(f"{TOPIC}-changelog"))
        assert state == offline_state(chain, 0)
        assert state.reader.epoch == len(DEATHS) + 1
        assert rows == {at: end for at, (end, _) in state.live.items()}
        closed, late = offline(TOPIC, chain.sent)
        got = await chain.values("out"), await chain.values("late")
        if guarantee == "exactly_once":
            assert got == (closed, late)
        else:
            assert len(got[0]) > len(closed), "nobody was killed between results and progress"
            assert (set(got[0]), set(got[1])) == (set(closed), set(late))
