"""A group of handler runners whose members are killed, stopped and added: ordering and delivery guarantees hold.

Each member logs the partitions that it owns and the calls of its handler (chaos_child.py). Commits and their times are
read from `__consumer_offsets`. An ownership is the time from a partition's assignment to the first of three events: its
release, its assignment in a later generation of the group, or the member's death. A stopped member may learn of its
assignment after the group has given the partition to another member. If two ownerships overlap, the one of the later
generation counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.parallel_consumer.commit_metadata import decode_finished
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.integration import chaos_child
from tests.integration.forkserver import FORKSERVER
from tests.shared_broker import Broker

PARTITIONS, KEYS = 6, 60
RECORDS_A_SECOND = 300
MEMBERS, MEMBERS_MAX = 3, 6
STOPPED_S = 3
"""Twice the session timeout."""
CONCURRENCY = 16
CLOCK_NS = 5_000_000
"""The broker's timestamps are in ms, by another clock of the same machine."""
COMMIT_GAP_NS = 1_000_000_000
"""The limit of the median time between two commits of a partition: five times the members' `commit_interval_ms`."""
GAPS_JUDGED = 20
"""With fewer gaps the median is not significant."""
COMMIT_LAG_NS = (3 + STOPPED_S) * 1_000_000_000
"""How long before a loss finished records may be uncommitted.

A rebalance may wait a session or two for dead members, and the member may have been stopped meanwhile.
"""
NEVER_NS = 2**63


@dataclass
class Call:
    """One call of a handler; `is_late` if it ended after another member had got the partition."""

    offset: int
    key: str
    started_ns: int
    ended_ns: int = NEVER_NS
    outcome: str = "unfinished"
    is_late: bool = False


@dataclass
class Ownership:
    """One member's ownership of one partition; `is_released` if the member released it after a successful commit."""

    member: str
    partition: int
    generation: int
    began_ns: int
    ended_ns: int = NEVER_NS
    is_released: bool = False
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Commit:
    """A committed offset of one partition, as the broker stored it."""

    partition: int
    at_ns: int
    offset: OffsetAndMetadata

    def covers(self, offset: int) -> bool:
        return offset < self.offset.offset or any(a <= offset <= b for a, b in decode_finished(self.offset))


def ownerships_in(member: str, journal: str) -> Iterator[Ownership]:
    """Parse a member's journal, from its first assignment to its last line."""
    open_ones: dict[int, Ownership] = {}
    running: dict[tuple[int, int], Call] = {}
    for line in journal.splitlines():
        stamp, what, *values = line.split()
        now_ns = int(stamp)
        if what in ("assigned", "released", "lost"):
            generation = int(values.pop(0)) if what == "assigned" else -1
            for partition in map(int, values):
                if what == "assigned":
                    open_ones[partition] = Ownership(member, partition, generation, now_ns)
                    yield open_ones[partition]
                elif (owned := open_ones.pop(partition, None)) is not None:
                    owned.ended_ns, owned.is_released = now_ns, what == "released"
            continue
        partition, offset, key = int(values[0]), int(values[1]), values[2]
        if what == "start":
            assert (partition, offset) not in running, "started twice at once"
            call = running[partition, offset] = Call(offset, key, now_ns)
            assert partition in open_ones, f"{member}: started a record of a partition that is not its own"
            open_ones[partition].calls.append(call)
        else:
            call = running.pop((partition, offset))
            call.ended_ns, call.outcome = now_ns, what


def end_at_take_overs(ownerships: list[Ownership]) -> None:
    """End each ownership when the one of the next generation begins, and mark the calls that ended after that."""
    for partition in range(PARTITIONS):
        in_order = sorted((o for o in ownerships if o.partition == partition), key=lambda o: o.generation)
        assert len({owned.generation for owned in in_order}) == len(in_order), "a generation has two owners"
        for before, after in itertools.pairwise(in_order):
            for call in before.calls:
                call.is_late = call.ended_ns != NEVER_NS and call.ended_ns > after.began_ns
            if before.ended_ns > after.began_ns:
                before.ended_ns, before.is_released = after.began_ns, False


def check_order(owned: Ownership) -> None:
    """Assert that a key's records are handled one at a time, in the order of their offsets, each until it is done."""
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in sorted(owned.calls, key=lambda c: c.started_ns):
        by_key[call.key].append(call)
    for calls in by_key.values():
        for one, other in itertools.pairwise(calls):
            assert one.ended_ns < other.started_ns, f"two of a key at once: {one}, {other}"
            expected = one.offset < other.offset if one.outcome == "done" else one.offset == other.offset
            assert expected, f"out of order: {one}, {other}"


class Clocks:
    """Converts times of the wall clock, which is corrected while it runs, to the monotonic clock.

    The clocks are compared at the start and the end, and times between are interpolated.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []
        self.compare()

    def compare(self) -> None:
        """Compare the clocks now, and keep the quickest of a few attempts."""
        attempts = []
        for _ in range(9):
            before, wall_ns, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            attempts.append((after - before, wall_ns, (before + after) // 2))
        self._pairs.append(min(attempts)[1:])

    def monotonic_ns(self, wall_ns: int) -> int:
        """The monotonic clock's time at a time of the wall clock."""
        (wall, mono), (wall_last, mono_last) = self._pairs
        return mono + (wall_ns - wall) * (mono_last - mono) // (wall_last - wall)


def read_commits(keys: list[bytes | None], values: list[bytes | None], group: str, clocks: Clocks) -> Iterator[Commit]:
    """The commits among records of `__consumer_offsets` (OffsetCommitKey 0 to 1, OffsetCommitValue 0 to 4)."""
    for key, value in zip(keys, values, strict=True):
        if key is None or value is None or struct.unpack_from(">h", key)[0] > 1:
            continue
        at, names = 2, []
        for _ in range(2):
            size = struct.unpack_from(">h", key, at)[0]
            names.append(key[at + 2 : at + 2 + size].decode())
            at += 2 + size
        if names[0] != group:
            continue
        version, offset = struct.unpack_from(">hq", value)
        at = 10 + (4 if version >= 3 else 0)
        if version >= 4:  # the length plus one, as a varint
            size, at = value[at] & 0x7F, at + 1
            if value[at - 1] & 0x80:
                size, at = size | value[at] << 7, at + 1
            size -= 1
        else:
            size, at = struct.unpack_from(">h", value, at)[0], at + 2
        stamp_ms = struct.unpack_from(">q", value, at + size)[0]
        partition = struct.unpack_from(">i", key, len(key) - 4)[0]
        metadata = value[at : at + size].decode()
        yield Commit(partition, clocks.monotonic_ns(stamp_ms * 1_000_000), OffsetAndMetadata(offset, metadata))


async def commits_of(connection: KafkaSettings, group: str, clocks: Clocks) -> dict[int, list[Commit]]:
    """Every commit that the broker stored, by partition, in order."""
    found: dict[int, list[Commit]] = defaultdict(list)
    async with Admin(connection) as admin:
        described = (await admin.describe_topics(["__consumer_offsets"]))["__consumer_offsets"]
    tps = [TopicPartition("__consumer_offsets", each.partition) for each in described.partitions]
    settings = ConsumerSettings(auto_offset_reset="earliest", max_poll_records=None)
    async with Consumer(connection, settings) as consumer:
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        while any([await consumer.position(tp) < ends[tp] for tp in tps]):
            for columns in (await consumer.poll(200)).values():
                for commit in read_commits(columns.keys, columns.values, group, clocks):
                    found[commit.partition].append(commit)
    return found


class Group:
    """The members of the group, with the counts of what was done to them."""

    def __init__(self, *given: Any) -> None:
        self._given = given
        self._processes: list[ForkServerProcess] = []
        self.members: dict[int, str] = {}
        self.names: list[str] = []
        self.happened: Counter[str] = Counter()
        self._stopped: set[asyncio.Task[None]] = set()

    async def add(self) -> None:
        name = f"member-{len(self.names)}"
        self.names.append(name)
        process = FORKSERVER.Process(target=chaos_child.run, args=(name, *self._given), daemon=True)
        await asyncio.to_thread(process.start)
        self._processes.append(process)
        assert process.pid is not None
        self.members[process.pid] = name

    def signal(self, pid: int, what: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)

    def kill(self, pid: int) -> None:
        del self.members[pid]
        self.signal(pid, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        async def stopped() -> None:
            self.signal(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            self.signal(pid, signal.SIGCONT)

        task = asyncio.create_task(stopped())
        self._stopped.add(task)
        task.add_done_callback(self._stopped.discard)

    async def disturb(self, rng: random.Random) -> None:
        """Kill, stop or terminate a member if there are enough, and add one if there are few."""
        what = rng.choice(["killed", "killed", "stopped", "stopped", "left"])
        if len(self.members) >= MEMBERS:
            victim = rng.choice(list(self.members))
            self.happened[what] += 1
            if what == "killed":
                self.kill(victim)
            elif what == "stopped":
                self.stop(victim)
            else:
                del self.members[victim]
                self.signal(victim, signal.SIGTERM)
        if len(self.members) < MEMBERS_MAX:
            await self.add()
            self.happened["added"] += 1

    async def wait_until_resumed(self) -> None:
        if self._stopped:
            await asyncio.wait(self._stopped)

    async def end(self) -> None:
        for pid in self.members:
            self.signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while any(map(is_alive, self.members)):
            assert time.monotonic() < deadline, "a member does not end"
            await asyncio.sleep(0.05)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.asynccontextmanager
async def group_of(servers: str, topic: str, strategy: str, folder: Path) -> AsyncIterator[Group]:
    group = Group(servers, topic, strategy, folder)
    try:
        yield group
    finally:
        for pid in list(group.members):
            group.kill(pid)


async def cause_chaos(
    connection: KafkaSettings, topic: str, strategy: str, folder: Path, seconds: int, rng: random.Random
) -> tuple[Group, Counter[int]]:
    """Run and disturb the members while records are sent; return the group and the number of records of each
    partition.
    """
    sent: Counter[int] = Counter()
    async with Admin(connection) as admin:
        await admin.create_topics([NewTopic(topic, PARTITIONS), NewTopic(f"{topic}-dlq", 1)])
    async with (
        group_of(connection.bootstrap_servers, topic, strategy, folder) as group,
        Producer(connection) as producer,
        Admin(connection) as admin,
    ):
        for _ in range(MEMBERS):
            await group.add()
        started = time.monotonic()
        for second in range(1, seconds + 1):
            records = []
            for _ in range(RECORDS_A_SECOND):
                key = rng.randrange(KEYS)
                sent[key % PARTITIONS] += 1
                records.append(ProducerRecord(topic, b"v", b"%d" % key, partition=key % PARTITIONS))
            assert await (await producer.send_many(records)).first_error() is None
            await asyncio.sleep(max(0.0, started + second - time.monotonic()))
            await group.disturb(rng)
        await group.wait_until_resumed()
        deadline = time.monotonic() + 60
        while sum(at.offset for at in (await admin.group_offsets(topic)).values()) < sent.total():
            assert time.monotonic() < deadline, await admin.group_offsets(topic)
            await asyncio.sleep(0.1)
        await group.end()
    return group, sent


def judge(ownerships: list[Ownership], commits: dict[int, list[Commit]], sent: Counter[int]) -> dict[str, int]:
    """Assert every guarantee, and return the counts."""
    end_at_take_overs(ownerships)
    done: dict[int, dict[int, list[int]]] = {p: defaultdict(list) for p in range(PARTITIONS)}
    counts: Counter[str] = Counter()
    for owned in ownerships:
        check_order(owned)
        for call in owned.calls:
            counts[call.outcome] += 1
            counts["ended after the ownership was lost"] += call.is_late
            if call.outcome == "done":
                counts["done twice or more"] += bool(done[owned.partition][call.offset])
                done[owned.partition][call.offset].append(NEVER_NS if call.is_late else call.ended_ns)
    for partition, offsets in done.items():
        assert set(offsets) == set(range(sent[partition])), "a record was never handled"
        committed = [commit.offset.offset for commit in commits[partition]]
        assert committed == sorted(committed), "a committed offset went backwards"
        counts["commits"] += len(committed)
        for commit in commits[partition]:
            beyond = [offset for a, b in decode_finished(commit.offset) for offset in range(a, b + 1)]
            for offset in [*range(commit.offset.offset), *beyond]:
                first_ns = min(offsets[offset])  # calls that ended after their ownership was lost do not count
                assert first_ns <= commit.at_ns + CLOCK_NS, f"{partition}@{offset} was committed before it was done"
    gaps = sorted(after.at_ns - at.at_ns for each in commits.values() for at, after in itertools.pairwise(each))
    median_ns = gaps[len(gaps) // 2] if len(gaps) >= GAPS_JUDGED else 0
    assert median_ns <= COMMIT_GAP_NS, f"commits are too rare: one in {median_ns / 1e6:.0f} ms"
    counts["in flight at take-overs"] = in_flight(ownerships, commits)
    assert counts["done twice or more"] <= counts["in flight at take-overs"], (
        f"more was done twice than in flight: {counts}"
    )
    return dict(counts)


def in_flight(ownerships: list[Ownership], commits: dict[int, list[Commit]]) -> int:
    """The number of records that may be handled twice.

    For each lost ownership these are the calls that were running or began later, and those that ended within
    COMMIT_LAG_NS before.
    """
    total = 0
    for owned in ownerships:
        if owned.is_released:
            continue
        before = [commit for commit in commits[owned.partition] if commit.at_ns <= owned.ended_ns + CLOCK_NS]
        starts = [call.started_ns for call in owned.calls if call.started_ns <= owned.ended_ns]
        last_ns = max(starts, default=owned.began_ns)
        end_ns = min(owned.ended_ns, last_ns)  # the time of a kill is not logged
        open_ones = {
            call.offset
            for call in owned.calls
            if call.started_ns <= owned.ended_ns and call.ended_ns > end_ns - COMMIT_LAG_NS
        }
        total += sum(not before or not before[-1].covers(offset) for offset in open_ones)
        total += sum(call.started_ns > owned.ended_ns for call in owned.calls)  # the member did not know yet
    return total


def history(*, commits_at: int) -> tuple[list[Ownership], dict[int, list[Commit]], Counter[int]]:
    """A member handles 1,000 records in 10 s and is lost, and the next one handles those after `commits_at` again."""

    def calls(from_ns: int) -> list[Call]:
        starts = [from_ns + offset * 10_000_000 for offset in range(1_000)]
        return [Call(o, f"k{o % 50}", at_ns, at_ns + 5_000_000, "done") for o, at_ns in enumerate(starts)]

    first, second = 1_000_000_000, 20_000_000_000
    owned = [
        Ownership("m1", 0, 1, first, calls=calls(first)),
        Ownership("m2", 0, 2, second, calls=calls(second)[commits_at:]),
    ]
    commits: dict[int, list[Commit]] = {p: [] for p in range(PARTITIONS)}
    if commits_at:
        commits[0].append(Commit(0, first + commits_at * 10_000_000, OffsetAndMetadata(commits_at)))
    commits[0].append(Commit(0, 40_000_000_000, OffsetAndMetadata(1_000)))
    return owned, commits, Counter({0: 1_000})


def test_judge_finds_a_member_that_never_commits() -> None:
    """`judge` fails if a member never commits, since it repeats more than was in flight; the last records may be
    repeated.
    """
    counts = judge(*history(commits_at=900))
    assert counts["done twice or more"] == 100 <= counts["in flight at take-overs"]
    with pytest.raises(AssertionError, match="more was done twice"):
        judge(*history(commits_at=0))


@pytest.mark.parametrize("interval_ms", [200, 3_000])
def test_judge_finds_commits_that_are_too_rare(interval_ms: int) -> None:
    """`judge` fails if commits come at fifteen times their interval, even if no more than was in flight is repeated."""
    owned, commits, sent = history(commits_at=900)
    end = commits[0].pop()
    step_ns = interval_ms * 1_000_000
    commits[0] += [
        Commit(0, commits[0][0].at_ns + step_ns * n, OffsetAndMetadata(900)) for n in range(1, GAPS_JUDGED + 1)
    ] + [Commit(0, end.at_ns + 60_000_000_000, end.offset)]
    if interval_ms == 200:
        judge(owned, commits, sent)
    else:
        with pytest.raises(AssertionError, match=r"commits.*3000 ms"):
            judge(owned, commits, sent)


@pytest.mark.parametrize(
    ("strategy", "seconds"),
    [
        pytest.param("cooperative-sticky", 60, marks=pytest.mark.soak),
        pytest.param("range", 60, marks=pytest.mark.soak),
        ("cooperative-sticky", 6),
    ],
)
async def test_chaos(kafka: Broker, topic_name: str, tmp_path: Path, strategy: str, seconds: int) -> None:
    """Members are killed, stopped past their session and added every second, while 5 % of the handler calls fail.

    Every record is handled, and each key's records stay in order within an ownership. Calls that end after a lost
    ownership are not committed, committed offsets never decrease, and only records in flight are handled twice.
    """
    connection = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    clocks = Clocks()
    seed = random.Random(seconds)
    group, sent = await cause_chaos(connection, topic_name, strategy, tmp_path, seconds, seed)
    journals = {name: (tmp_path / f"{name}.log") for name in group.names}
    ownerships = [
        owned for name, path in journals.items() if path.exists() for owned in ownerships_in(name, path.read_text())
    ]
    clocks.compare()
    counts = judge(ownerships, await commits_of(connection, topic_name, clocks), sent)
    print(f"{sent.total()} records, {dict(group.happened)}, {len(ownerships)} ownerships, {counts}")
    assert group.happened["killed"]
    assert group.happened["stopped"]
    assert group.happened["added"] >= seconds // 3
