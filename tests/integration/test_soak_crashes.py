"""Soak: stream workers that are killed, stopped and rebalanced for a minute, under both guarantees."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter

import pytest

from services.local.kafka import EmbeddedKafka
from tests.integration.test_stream_worker import GUARANTEES, Chain, chain_of, child, offline, running

SOAK_SECONDS = 60.0
STOPPED_SECONDS = 5.0  # past the session timeout: the group goes on without it, and it wakes as a zombie


class Crew:
    """Two workers in processes of their own that are killed and stopped at random, and started again."""

    def __init__(self, chain: Chain, guarantee: str, seed: int) -> None:
        self._chain, self._guarantee, self.random = chain, guarantee, random.Random(seed)
        self._stack = contextlib.AsyncExitStack()
        self._processes: list[asyncio.subprocess.Process] = []
        self.done: Counter[str] = Counter()

    async def __aenter__(self) -> Crew:
        self._processes = [await self._start() for _ in range(2)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def disturb(self) -> None:
        """Kill or stop one of them, and bring back whoever ended."""
        at = self.random.randrange(2)
        process = self._processes[at]
        if self.random.random() < 0.5:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            self.done["killed"] += 1
        else:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_SECONDS)
            process.send_signal(signal.SIGCONT)
            self.done["stopped"] += 1
        for i, one in enumerate(self._processes):
            if one.returncode is not None:
                self._processes[i] = await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        return await self._stack.enter_async_context(child(self._chain, self._guarantee))


@pytest.mark.soak
@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_soak_of_crashes(kafka: EmbeddedKafka, topic_name: str, guarantee: str) -> None:
    """A minute of kills, stops and rebalances under load: output and late records equal an offline computation."""
    async with chain_of(kafka, topic_name, partitions=4) as chain:
        async with Crew(chain, guarantee, seed=11) as crew:
            end = time.monotonic() + SOAK_SECONDS
            while time.monotonic() < end:
                await chain.send(2_000)
                await crew.disturb()
                await asyncio.sleep(crew.random.uniform(0, 2))
        worker = chain.worker(processing_guarantee=guarantee, transaction_timeout_ms=5_000)
        async with running(worker):
            await chain.wait_processed(worker)
        closed, late = offline(topic_name, chain.sent)
        got = await chain.values("out"), await chain.values("late")
        print(f"\n{guarantee}: {len(chain.sent)} events, {dict(crew.done)}, {len(closed)} sessions, {len(late)} late")
        print(f"{len(got[0]) - len(set(got[0]))} results and {len(got[1]) - len(set(got[1]))} late records came twice")
        if guarantee == "exactly_once":
            assert got == (closed, late)
        else:
            assert (set(got[0]), set(got[1])) == (set(closed), set(late))
