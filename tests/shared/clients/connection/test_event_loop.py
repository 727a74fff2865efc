"""A client is started once, and then belongs to its process and its event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.testing.fake_broker import FakeCluster

TP = TopicPartition("t", 0)
MESSAGE = "used outside of the event loop in which it was started"


@dataclass
class Clients:
    """Started clients of one cluster. The producer has an open batch for keys of the topic `t`."""

    cluster: FakeCluster
    producer: Producer
    consumer: Consumer
    admin: Admin


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        servers = cluster.bootstrap_servers
        producing = Producer(servers, ProducerSettings(linger_ms=60_000, transactional_id="x"))
        consuming = Consumer(servers, ConsumerSettings(group_id="g", auto_offset_reset="earliest"))
        async with producing as producer, consuming as consumer, Admin(servers) as admin:
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("t", b"0", key=b"k")
            consumer.assign([TP])
            yield Clients(cluster, producer, consumer, admin)


async def delivery(clients: Clients) -> object:
    return await (await clients.producer.send("t", b"v", key=b"k"))


async def done_callback(clients: Clients) -> None:
    (await clients.producer.send("t", b"v", key=b"k")).add_done_callback(print)


async def commit_async(clients: Clients) -> None:
    clients.consumer.commit_async()


async def ping(clients: Clients) -> None:
    clients.consumer.ping()


async def iterate(clients: Clients) -> None:
    async for _ in clients.consumer:
        pass


Call = Callable[[Clients], Coroutine[Any, Any, object]]
PRODUCER_CALLS: list[Call] = [
    delivery,
    done_callback,
    lambda c: c.producer.send_and_wait("t", b"v", key=b"k"),
    lambda c: c.producer.send("t", b"v", partition=0),
    lambda c: c.producer.send_many([ProducerRecord("t", b"v")]),
    lambda c: c.producer.flush(),
    lambda c: c.producer.partitions_for("t"),
    lambda c: c.producer.begin_transaction(),
    lambda c: c.producer.commit_transaction(),
    lambda c: c.producer.abort_transaction(),
    lambda c: c.producer.close(),
]
OTHER_CALLS: list[Call] = [
    commit_async,
    ping,
    iterate,
    lambda c: c.consumer.poll(0),
    lambda c: c.consumer.commit(),
    lambda c: c.consumer.committed(TP),
    lambda c: c.consumer.position(TP),
    lambda c: c.consumer.seek_to_end(),
    lambda c: c.consumer.lag(),
    lambda c: c.consumer.close(),
    lambda c: c.admin.list_topics(),
    lambda c: c.admin.close(),
]


@pytest.mark.parametrize("kind", [Producer, Consumer])
async def test_a_client_starts_once_before_it_is_used(kind: type[Producer] | type[Consumer]) -> None:
    """The error of a call before or after that, and of a second start, says what to do."""
    async with FakeCluster() as cluster:
        client = kind(cluster.bootstrap_servers)
        with pytest.raises(IllegalState, match="not started"):
            await use(client)
        await client.start()
        with pytest.raises(IllegalState, match="started already"):
            await client.start()
        await client.close()
        with pytest.raises(IllegalState, match="closed; make a new one"):
            await use(client)


async def use(client: Producer | Consumer) -> object:
    return await (client.flush() if isinstance(client, Producer) else client.poll(0))


async def test_another_event_loop_is_rejected(clients: Clients) -> None:
    """Each call raises IllegalState there. In the client's own loop it then goes on as usual."""
    for call in PRODUCER_CALLS + OTHER_CALLS:
        with pytest.raises(IllegalState, match=MESSAGE):
            await asyncio.to_thread(asyncio.run, call(clients))
    await clients.producer.commit_transaction()
    assert len((await clients.consumer.poll(10_000))[TP]) > 0
    assert "t" in await clients.admin.list_topics()


async def test_a_record_that_another_event_loop_cannot_wait_for_may_be_written(clients: Clients) -> None:
    """An open batch takes it, but its acknowledgement would not wake the waiter."""
    with pytest.raises(IllegalState) as caught:
        await asyncio.to_thread(asyncio.run, delivery(clients))
    assert caught.value.maybe_written


async def test_a_forked_process_is_rejected(clients: Clients) -> None:
    """Each call raises IllegalState in the child. It sends nothing, and the parent's records are stored."""
    calls = [lambda c: c.producer.send("t", b"v", key=b"k"), *PRODUCER_CALLS[2:], *OTHER_CALLS]
    pid = os.fork()
    if pid == 0:
        rejected = 0
        try:
            for call in calls:
                try:
                    asyncio.run(call(clients))
                except IllegalState as e:
                    rejected += "before a fork" in str(e)
        finally:
            os._exit(rejected)
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == len(calls)
    await clients.producer.commit_transaction()
    assert [record.value for record in clients.cluster.records("t") if record.value] == [b"0"]


def test_a_closed_consumer_may_be_closed_again_in_any_loop() -> None:
    """The second close has nothing to wait for."""
    with asyncio.Runner() as runner:
        cluster = runner.run(FakeCluster().__aenter__())
        consumer = Consumer(cluster.bootstrap_servers)
        runner.run(consumer.start())
        runner.run(consumer.close())
        runner.run(cluster.__aexit__(None, None, None))
    asyncio.run(consumer.close())
