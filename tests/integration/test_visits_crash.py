"""The topology of `test_soak_visits`, exactly once, with one worker that is killed once under load."""

from __future__ import annotations

from collections import defaultdict

from penstock.shared.clients.admin import Admin, event_time_topic
from tests.integration.stream_worker_child import GAP_MS, visits
from tests.integration.test_soak_visits import DONE_SECONDS, PARTITIONS, Clicks, decoded, sums, until_done
from tests.integration.test_stream_worker import chain_of, child, running, until
from tests.shared_broker import Broker

Session = tuple[str, int, int, int, int]
"""User, start, end, number of clicks and their sum."""


def sessions(clicks: list[tuple[str, int, int]]) -> list[Session]:
    """The sessions of clicks (user, timestamp, ms) in any order, if none was late."""
    by_user = defaultdict[str, list[tuple[int, int]]](list)
    for user, at, ms in clicks:
        by_user[user].append((at, ms))
    found = list[Session]()
    for user, own in by_user.items():
        run: list[tuple[int, int]] = []
        for at, ms in sorted(own):
            if run and at - run[-1][0] > GAP_MS:
                found.append(_session(user, run))
                run = []
            run.append((at, ms))
        found.append(_session(user, run))
    return sorted(found)


def _session(user: str, run: list[tuple[int, int]]) -> Session:
    return user, run[0][0], run[-1][0], len(run), sum(ms for _, ms in run)


async def test_a_kill_under_load_with_several_sub_topologies(kafka: Broker, topic_name: str) -> None:
    """After a kill, the committed output of the join, the sessions and the schedule is that of an uninterrupted run."""
    async with chain_of(kafka, topic_name, PARTITIONS) as chain:
        async with Admin(chain.kafka) as admin:
            await admin.create_topics([event_time_topic(f"{topic_name}-users", PARTITIONS)])
        clicks = Clicks(chain)
        await clicks.users()
        await clicks.some()

        async def has_joined() -> bool:
            return bool(await chain.read(f"{topic_name}-joined"))

        async with child(chain, "exactly_once", "visits") as process:
            assert await process.has_committed(DONE_SECONDS)
            await until(has_joined, DONE_SECONDS)
            for _ in range(3):
                await clicks.some()
            process.kill()
            await process.wait()
        assert len(await chain.read(f"{topic_name}-joined")) < clicks.sent, "there was work left"
        worker = chain.worker(visits(topic_name))
        async with running(worker):
            await clicks.some()
            await until_done(worker)
            expected = sessions(clicks.all)
            await clicks.last()
            await until_done(worker)
        joined = [row["id"] for _, row in decoded(await chain.read(f"{topic_name}-joined"))]
        assert sorted(joined) == list(range(clicks.sent))
        deltas = [(key.decode(), row["n"], row["ms"]) for key, row in decoded(await chain.read(f"{topic_name}-deltas"))]
        assert sums(deltas) == clicks.by_user
        closed = [row for _, row in decoded(await chain.read(f"{topic_name}-out"))]
        found = [(str(row["key"]), row["start"], row["end"], row["n"], row["ms"]) for row in closed]
        assert sorted(found) == expected
