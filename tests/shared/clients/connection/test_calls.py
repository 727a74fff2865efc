"""The calls of one client: client ids, deadlines, retries and their waits, secrets that no error shows, and checked
offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from pydantic import SecretStr

from penstock.shared.clients.connection.connection import Connection, retry_waits
from penstock.shared.clients.connection.offsets import checked_offset, checked_offsets, checked_spec, checked_time
from penstock.shared.clients.connection.sockets import SocketClient
from penstock.shared.clients.protocol.flexible_types import Endpoint
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    ConcurrentTransactions,
    IllegalState,
    KafkaTimeout,
    NotEnoughReplicas,
    RecordTooLarge,
    RetriableError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, Drop, FakeCluster, Request
from tests.shared.clients.producer import clusters

SECRET = "open-sesame"


def sasl() -> KafkaSettings:
    return KafkaSettings(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username="ali",
        sasl_password=SecretStr(SECRET),
    )


def test_client_ids_are_unique() -> None:
    """Every client has a unique id, unless one is configured."""
    first, second = Connection(KafkaSettings()).client_id, Connection(KafkaSettings()).client_id
    assert first != second
    assert first.startswith("penstock-")
    assert Connection(KafkaSettings(client_id="mine")).client_id == "mine"


async def test_secrets_are_in_no_error() -> None:
    """A connection error does not contain the password."""
    settings = sasl().model_copy(update={"bootstrap_servers": "127.0.0.1:1", "request_timeout_ms": 100})
    with pytest.raises(BrokerNotAvailable) as caught:
        await Connection(settings).open()
    assert SECRET not in repr(caught.getrepr(showlocals=False)) + str(caught.value)


async def test_an_advertised_leader_is_used_until_the_next_metadata() -> None:
    """A new leader from a response is used until the next metadata update if the response has its address, and ignored
    otherwise."""
    connection, tp = clusters.connection(), TopicPartition("t", 0)
    clusters.know(connection, {"t": {0: 1}})
    connection.leader_moved(tp, 7)
    assert connection.leader(tp) == 1
    connection.add_brokers([Endpoint(7, "young", 9092), Endpoint(1, "elsewhere", 1), Endpoint(8, "", 0)])
    connection.leader_moved(tp, 7)
    assert connection.leader(tp) == 7
    assert connection.cluster.broker_metadata(7)[:3] == (7, "young", 9092)
    assert connection.cluster.broker_metadata(1).host == "localhost", "the metadata knows better"
    assert sorted(connection.nodes()) == [1, 7]
    clusters.know(connection, {"t": {0: 1}})
    assert connection.leader(tp) == 1


async def test_silence_is_the_time_since_the_last_response_of_any_socket() -> None:
    """The time since the last response is None before the client is open. Afterwards it counts from the newest
    response, even if its socket is closed."""
    connection = Connection(KafkaSettings())
    assert connection.silent_ms() is None
    client = AIOKafkaClient(bootstrap_servers=["127.0.0.1:1"])
    connection._client = client
    assert connection.silent_ms() == 0  # no socket, so it counts from now
    for node, ago_s in ((1, -60.0), (2, -30.0)):
        client._conns[node, 0] = AIOKafkaConnection("127.0.0.1", 1)
        client._conns[node, 0]._last_action += ago_s
    older = Connection(KafkaSettings())
    older._client = client
    assert 29_000 <= (older.silent_ms() or 0) < 59_000
    del client._conns[2, 0]
    assert 29_000 <= (older.silent_ms() or 0) < 59_000


async def test_retrying() -> None:
    """Retriable errors are retried until the deadline, and the timeout names the last one. Other errors are raised at
    once."""
    connection = Connection(KafkaSettings(retry_backoff_ms=1))
    calls: list[int] = []

    async def fail(times: int, error: Exception) -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    assert await connection.retrying(lambda: fail(2, NotEnoughReplicas("t-0")), "produce", 5_000) == "done"
    with pytest.raises(RecordTooLarge):
        await connection.retrying(lambda: fail(99, RecordTooLarge("t-0")), "produce", 5_000)
    with pytest.raises(KafkaTimeout, match=r"produce.*20 ms.*t-0"):
        await connection.retrying(lambda: fail(10**9, NotEnoughReplicas("t-0")), "produce", 20)
    assert issubclass(KafkaTimeout, RetriableError)


async def test_a_request_over_a_closed_connection_fails() -> None:
    """A request over a closed connection fails with BrokerNotAvailable and the address."""
    with pytest.raises(BrokerNotAvailable, match="topic t"):
        await Connection(KafkaSettings()).send(1, object(), "topic t")
    with pytest.raises(BrokerNotAvailable, match="group g"):
        await Connection(KafkaSettings()).coordinator("group", "g")


WAITING_CALLS: dict[str, Callable[[Connection], Awaitable[Any]]] = {
    "refresh_metadata": lambda connection: connection.refresh_metadata(),
    "wait_for_topic": lambda connection: connection.wait_for_topic("t", 3_600_000),
    "retrying": lambda connection: connection.retrying(
        lambda: connection.send(99, object(), "topic t"), "topic t", 3_600_000
    ),
}


@pytest.mark.parametrize("name", WAITING_CALLS)
async def test_a_close_ends_the_calls_that_wait_for_metadata(name: str) -> None:
    """A call that waits for metadata does not wait for its deadline if the connection is closed meanwhile."""
    requested = asyncio.Event()

    def drop(_: Request) -> Drop:
        requested.set()
        return Drop()

    async with FakeCluster() as cluster:
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=1))
        await connection.open()
        client = connection._client
        cluster.control(Api.METADATA, drop)
        waiting = asyncio.ensure_future(WAITING_CALLS[name](connection))
        await requested.wait()
        await connection.close()
        async with asyncio.timeout(10):
            (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
            assert outcome is False if name == "refresh_metadata" else isinstance(outcome, IllegalState)
            assert await client.force_metadata_update() is False


async def test_a_connection_that_is_not_open_raises_illegal_state() -> None:
    """What needs an open connection raises IllegalState with the client's id."""
    connection = Connection(KafkaSettings(client_id="me"))
    for call in (
        connection.any_node,
        connection.nodes,
        connection.check_authentication,
        connection.refresh_metadata,
        connection.watch_all,
        lambda: connection.connected(1),
        lambda: connection.watch("t"),
        lambda: connection.unwatch("t"),
    ):
        with pytest.raises(IllegalState, match="client me"):
            call()
    for opens in (connection.connect(1), connection.api_versions(1)):
        with pytest.raises(IllegalState, match="client me"):
            await opens


async def test_which_topics_are_removed_from_metadata() -> None:
    """A topic stays in the metadata while a call waits for it, or if all topics are tracked."""
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    connection.adopt(AIOKafkaClient(bootstrap_servers=["127.0.0.1:1"]))
    for topic in ("a", "b", "c"):
        connection.watch(topic)
    waiting = asyncio.ensure_future(connection.wait_for_topic("a", 60_000))
    await asyncio.sleep(0)
    assert not connection.unwatch("a")
    assert connection.unwatch("b")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert connection.unwatch("a")
    assert connection.unwatch("c")
    connection.watch_all()
    assert not connection.unwatch("c")


async def test_metadata_has_only_the_watched_topics() -> None:
    """A client that watches no topic, such as the admin client, requests the metadata of none, and not of all."""
    async with FakeCluster() as cluster:
        for topic in ("a", "b"):
            cluster.create_topic(topic, 1)
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
        await connection.open()

        async def topics() -> frozenset[str]:
            assert await connection.refresh_metadata()
            return connection.topics()

        assert await topics() == set()
        connection.watch("a")
        assert await topics() == {"a"}
        connection.unwatch("a")
        assert await topics() == set()
        connection.watch_all()
        assert await topics() == {"a", "b"}
        connection.watch("a")
        assert await topics() == {"a", "b"}
        await connection.close()


async def test_no_client_creates_a_topic_by_accident() -> None:
    """Neither the metadata of a running client nor that of a bootstrap server creates a missing topic, even if the
    broker would create it."""
    async with FakeCluster(configs={"auto.create.topics.enable": "true"}) as cluster:
        cluster.create_topic("t", 1)
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
        await connection.open()
        connection.watch("tpyo")
        assert await connection.refresh_metadata()
        await connection._client._bootstrap_from_any(["tpyo"], 5_000)
        connection.watch_all()
        assert await connection.refresh_metadata()
        assert connection.topics() == {"t"}
        await connection.close()


async def test_an_unknown_topic_is_left_out_after_the_wait_for_it() -> None:
    """The topic is in no later metadata request, whether the wait was cancelled or timed out."""
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    connection.adopt(SocketClient(connection.settings, "c"))
    cancelled = asyncio.ensure_future(connection.wait_for_topic("a", 60_000))
    with pytest.raises(UnknownTopicOrPartition):
        await connection.wait_for_topic("b", 0)
    assert connection._client._topics == {"a"}
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert connection._client._topics == set()
    await connection.close()


async def test_a_topic_is_not_reported_as_missing_without_a_response() -> None:
    """If no broker responds in time, the error says so."""
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:1", retry_backoff_ms=1))
    connection.adopt(SocketClient(connection.settings, "c"))
    with pytest.raises(BrokerNotAvailable, match="topic a: no response of a broker within 20 ms"):
        await connection.wait_for_topic("a", 20)
    await connection.close()


async def test_all_topics_are_requested_if_they_are_watched_during_an_update() -> None:
    """The update in flight names no topic. `refresh_metadata` waits for another one."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 1)
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
        await connection.open()

        def watch_all(_: Request) -> None:
            control.remove()
            connection.watch_all()

        control = cluster.control(Api.METADATA, watch_all)
        assert await connection.refresh_metadata()
        assert connection.topics() == {"t"}
        await connection.close()


@pytest.mark.parametrize("cause", ["requested", "regular"])
async def test_a_topic_that_is_watched_during_an_update_is_requested_before_the_update_ends(cause: str) -> None:
    """The topic is not in the request in flight. `refresh_metadata` waits for another request, which names it."""
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    client = SocketClient(connection.settings, "c")
    connection.adopt(client)
    requested: list[set[str]] = []
    is_sent, is_answered = asyncio.Event(), asyncio.Event()

    async def update(_: object, topics: set[str]) -> bool:
        requested.append(set(topics))
        is_sent.set()
        await is_answered.wait()
        return True

    client._metadata_update = update
    connection.watch("own")
    if cause == "regular":
        client._md_update_waiter, client._md_update_fut = asyncio.Future(), None
        client._metadata_max_age_ms = 1
    client._sync_task = asyncio.ensure_future(client._md_synchronizer())
    await is_sent.wait()
    client._metadata_max_age_ms = 3_600_000
    connection.watch("other")
    refreshed = connection.refresh_metadata()
    is_answered.set()
    async with asyncio.timeout(5):
        assert await refreshed
    assert requested == [{"own"}, {"own", "other"}]
    await connection.close()


async def test_an_update_that_ends_during_close_has_no_listeners() -> None:
    """A listener may use the connection, so it is not called for an update that was in flight at `close`."""
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    client = SocketClient(connection.settings, "c")
    connection.adopt(client)
    topics: list[frozenset[str]] = []
    connection.on_metadata(lambda: topics.append(connection.topics()))
    connection._on_metadata_update(client.cluster)
    await connection.close()
    connection._on_metadata_update(client.cluster)
    assert topics == [frozenset()]


async def test_a_name_that_was_waited_for_takes_no_memory() -> None:
    """A long-lived producer may wait for any number of unknown topics. None of their names is kept."""
    connection = Connection(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    connection.adopt(AIOKafkaClient(bootstrap_servers=["127.0.0.1:1"]))
    calls = [asyncio.ensure_future(connection.wait_for_topic(topic, 60_000)) for topic in ("a", "a", "b")]
    await asyncio.sleep(0)
    assert connection._waited_for == {"a": 2, "b": 1}
    for call in calls:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert list(connection._waited_for) == []


BUSY, DOWN = ConcurrentTransactions("x"), BrokerNotAvailable("x")


def test_waits_grow() -> None:
    """Each wait is twice the previous one, up to one second."""
    wait_after = retry_waits(100)
    assert [wait_after(DOWN) for _ in range(6)] == pytest.approx([100, 200, 400, 800, 1_000, 1_000])


def test_concurrent_transactions_have_short_waits() -> None:
    """Waits for the completion of the previous transaction are at most 20 ms. Other errors use the normal backoff."""
    wait_after = retry_waits(100, soon=True)
    waits = [wait_after(error) for error in (BUSY, BUSY, DOWN, BUSY, BUSY, DOWN)]
    assert waits == pytest.approx([5, 10, 100, 20, 20, 200])


def test_other_calls_have_one_backoff() -> None:
    """For a call that does not open a transaction, a busy coordinator is backed off like any other error."""
    wait_after = retry_waits(100)
    assert [wait_after(BUSY), wait_after(DOWN)] == pytest.approx([100, 200])


@pytest.mark.parametrize("retry_backoff_ms", [1, 7])
def test_no_wait_is_longer_than_the_setting_allows(retry_backoff_ms: int) -> None:
    """A retry_backoff_ms below the short waits limits them too."""
    wait_after = retry_waits(retry_backoff_ms, soon=True)
    assert max(wait_after(BUSY) for _ in range(5)) == retry_backoff_ms


A = TopicPartition("t", 0)


def test_valid_offsets_pass() -> None:
    """A valid specification is returned. A plain number becomes an offset without metadata, and an integer of numpy,
    such as those of columns, an int."""
    for offset in (3, np.int64(3), OffsetAndMetadata(np.int64(3))):  # type: ignore[arg-type]
        checked = checked_offsets({A: offset})  # type: ignore[dict-item]
        assert checked == {A: OffsetAndMetadata(3)}
        assert type(checked[A].offset) is int
    assert [checked_spec(A, spec) for spec in ("earliest", "latest", 0, np.int64(7))] == ["earliest", "latest", 0, 7]


@pytest.mark.parametrize("value", [-1, 1 << 63, True, 1.5, "x", None])
def test_an_invalid_offset_is_named_with_its_partition(value: object) -> None:
    """A number out of range raises ValueError, and a value of another type TypeError. The error names the partition."""
    for check in (checked_offset, checked_time, checked_spec):
        is_value_error = value in (-1, 1 << 63) or (check is checked_spec and value == "x")
        with pytest.raises(ValueError if is_value_error else TypeError) as e:
            check(A, value)
        assert "t-0" in str(e.value)


@pytest.mark.parametrize(("epoch", "error"), [(-2, ValueError), (1 << 31, ValueError), ("x", TypeError)])
def test_an_invalid_leader_epoch_is_named_with_its_partition(epoch: Any, error: type[Exception]) -> None:
    """An offset with a leader epoch that no request can hold is not committed."""
    with pytest.raises(error, match="t-0"):
        checked_offsets({A: OffsetAndMetadata(3, "", epoch)})
