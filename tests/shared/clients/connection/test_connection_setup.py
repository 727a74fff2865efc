"""Connections to brokers: timeouts, one shared attempt for each broker, no broker that blocks another, and responses
that are decoded in place."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.protocol.admin import ApiVersionResponse_v0
from aiokafka.protocol.metadata import MetadataResponse_v0
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.connection import sockets
from penstock.shared.clients.connection.connection import Connection, bootstrap
from penstock.shared.clients.connection.sockets import (
    BOOTSTRAP,
    FRAME_BYTES_MAX,
    Addresses,
    Found,
    Frames,
    SocketClient,
    canonical_names,
    read_in_place,
)
from penstock.shared.clients.protocol.fetch import FetchRequest
from penstock.shared.clients.protocol.produce import produce_request
from penstock.shared.common import log
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    AuthenticationFailed,
    BrokerNotAvailable,
    CoordinatorNotAvailable,
    KafkaTimeout,
)
from penstock.shared.common.settings import KafkaSettings, LogSettings
from penstock.shared.testing.fake_broker import Api, Drop, FakeCluster
from penstock.shared.testing.manual_clock import ManualClock

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


class Server:
    """Accepts connections and passes each to `handler`. `taken` counts them."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.taken = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        try:
            await self._handler(reader, writer)
        finally:
            writer.close()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads requests and never responds."""
    while await reader.read(1_000):
        pass


async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes the connection at the first bytes."""
    await reader.read(1)


async def leaving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Responds to ApiVersions and closes the connection."""
    request = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    body = request[4:8] + ApiVersionResponse_v0(0, [(18, 0, 0), (1, 12, 12)]).encode()
    writer.write(len(body).to_bytes(4, "big") + body)


async def frozen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Responds to ApiVersions and then reads no more."""
    request = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
    body = request[4:8] + ApiVersionResponse_v0(0, [(18, 0, 0), (0, 9, 10)]).encode()
    writer.write(len(body).to_bytes(4, "big") + body)
    # Cancelled at the end of the test.
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Responds to the oldest ApiVersions and Metadata requests as a cluster of one broker."""
    await respond(reader, writer, [(1, "127.0.0.1", writer.get_extra_info("sockname")[1])])


async def starting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Responds as a broker that does not know any broker yet."""
    await respond(reader, writer, [])


async def respond(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, brokers: list[tuple[int, str, int]]
) -> None:
    responses = {18: ApiVersionResponse_v0(0, [(18, 0, 0), (3, 0, 0)]), 3: MetadataResponse_v0(brokers, [])}
    while head := await reader.read(4):
        request = await reader.readexactly(int.from_bytes(head, "big"))
        body = request[4:8] + responses[int.from_bytes(request[:2], "big")].encode()
        writer.write(len(body).to_bytes(4, "big") + body)


@asynccontextmanager
async def serving(*handlers: Handler) -> AsyncIterator[list[tuple[Server, int]]]:
    """Starts a server for each handler and returns the ports."""
    servers = [Server(handler) for handler in handlers]
    listening = [await asyncio.start_server(server, "127.0.0.1", 0) for server in servers]
    try:
        yield [(s, at.sockets[0].getsockname()[1]) for s, at in zip(servers, listening, strict=True)]
    finally:
        for at in listening:
            at.close()


def settings(*ports: int, **more: Any) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=",".join(f"127.0.0.1:{port}" for port in ports), **more)


def knowing(client: SocketClient, *ports: int) -> None:
    """Sets a client's metadata to brokers 0, 1, … at the given ports."""
    client.cluster.update_metadata(MetadataResponse_v0([(i, "127.0.0.1", port) for i, port in enumerate(ports)], []))


def adopted(connection: Connection, port: int) -> SocketClient:
    """A client of a connection whose broker 0 is at the given port."""
    client = SocketClient(connection.settings, "c")
    connection.adopt(client)
    knowing(client, port)
    return client


async def test_an_unresponsive_bootstrap_server_is_skipped() -> None:
    """Each bootstrap server gets its share of the timeout. One that responds is enough."""
    async with serving(silent, silent, answering) as [(_, first), (_, second), (_, third)]:
        connection = Connection(settings(first, second, third, request_timeout_ms=1_500))
        await connection.open()
        assert connection.nodes() == [1]
        await connection.close()


async def test_a_bootstrap_server_that_knows_no_broker_is_skipped() -> None:
    """A broker that has just started may know no broker yet. The next server is used."""
    async with serving(starting, answering) as [(_, first), (_, second)]:
        connection = Connection(settings(first, second))
        await connection.open()
        assert connection.nodes() == [1]
        await connection.close()


async def test_bootstrap_names_each_server_and_its_reason() -> None:
    """If no bootstrap server responds, the error lists each with its reason, within `request_timeout_ms`."""
    async with serving(silent, closing) as [(_, first), (_, second)]:
        started = time.monotonic()
        with pytest.raises(BrokerNotAvailable, match=f"{first},127.0.0.1:{second}: .*broker") as caught:
            await Connection(settings(first, second, request_timeout_ms=400)).open()
        assert 0.3 < time.monotonic() - started < 3
        assert f"127.0.0.1:{first}: no response after" in str(caught.value)
        assert f"127.0.0.1:{second}: the broker closed" in str(caught.value)


@pytest.mark.parametrize("lookup", ["use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"])
async def test_a_server_without_a_valid_host_name_is_named(lookup: str) -> None:
    """A host name with an empty label, as from an unset variable, is an unreachable server with that reason."""
    kafka_settings = KafkaSettings(bootstrap_servers=".svc:9092", client_dns_lookup=lookup, request_timeout_ms=50)
    with pytest.raises(BrokerNotAvailable, match=r"\.svc:9092: .*not a host name"):
        await Connection(kafka_settings).open()


async def test_unreachable_brokers_are_logged_before_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    """Unreachable brokers are logged once for all clients of the process, unless one is reached in time."""
    log.configure(LogSettings(format="json"), "test")
    async with serving(closing, answering) as [(_, hangs_up), (_, answers)]:
        kafka_settings = settings(hangs_up, request_timeout_ms=400)
        clients = [SocketClient(kafka_settings, name) for name in "ab"]
        outcomes = await asyncio.gather(
            *(bootstrap(client, kafka_settings, log_after_ms=100) for client in clients), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [BrokerNotAvailable] * 2
        reached = SocketClient(settings(answers), "c")
        await bootstrap(reached, settings(answers))
        for client in (*clients, reached):
            await client.close()
    (line,) = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["level"], line["bootstrap_servers"]) == ("warning", f"127.0.0.1:{hangs_up}")
    assert "the broker closed the connection" in line["reason"]


async def test_the_backoff_between_attempts_is_bounded() -> None:
    """Attempts are at most `reconnect_backoff_max_ms` apart."""
    async with serving(closing) as [(server, port)]:
        more = {"reconnect_backoff_ms": 1, "reconnect_backoff_max_ms": 4, "request_timeout_ms": 1_000}
        with pytest.raises(BrokerNotAvailable):
            await Connection(settings(port, **more)).open()
        assert server.taken > 15


async def test_the_setup_timeout_bounds_a_connection() -> None:
    """A broker that accepts without responding is given up after `socket_connection_setup_timeout_ms`."""
    async with serving(silent) as [(_, port)]:
        client = SocketClient(settings(port, socket_connection_setup_timeout_ms=100), "c")
        knowing(client, port)
        started = time.monotonic()
        assert not await client.ready(0)
        assert 0.09 < time.monotonic() - started < 2
        assert str(client.connection_error(0, "here")) == f"here: 127.0.0.1:{port}: no response after 100 ms"
        with pytest.raises(kafka.NodeNotReadyError):
            await client.send(0, object())
        await client.close()


async def test_the_setup_timeout_grows_with_the_failures() -> None:
    """The setup timeout doubles with each consecutive failure, up to `socket_connection_setup_timeout_max_ms`."""
    async with serving(silent) as [(_, port)]:
        limits = {"socket_connection_setup_timeout_ms": 20, "socket_connection_setup_timeout_max_ms": 50}
        client = SocketClient(settings(port, reconnect_backoff_ms=1, reconnect_backoff_max_ms=1, **limits), "c")
        knowing(client, port)
        reasons = []
        while len(reasons) < 4:
            if not await client.ready(0) and (error := str(client.connection_error(0, "t"))) not in reasons[-1:]:
                reasons.append(error)
            if len(reasons) == 3:
                break
        assert [reason.rpartition("after ")[2] for reason in reasons] == ["20 ms", "40 ms", "50 ms"]
        await client.close()


async def test_all_addresses_of_a_host_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refused connection the next address is tried at once. An unresponsive address is skipped by the next
    attempt."""
    async with serving(answering) as [(server, port)]:
        found = [(2, ("127.0.0.2", 1)), (2, ("127.0.0.1", port))]

        async def resolve(host: str, at: int) -> list[tuple[int, Any]]:
            assert (host, at) == ("kafka.example", 9092)
            return found

        monkeypatch.setattr(sockets, "_resolve_host", resolve)
        connection = Connection(KafkaSettings(bootstrap_servers="kafka.example:9092"))
        await connection.open()
        assert server.taken == 1
        await connection.close()


@pytest.mark.parametrize("handler", [silent, closing])
async def test_an_address_whose_set_up_fails_is_skipped_by_the_next_attempt(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address may accept the TCP connection and then fail. The next attempt begins with the address after it."""
    async with serving(handler, answering) as [(failing, first), (_, second)]:

        async def resolve(host: str, at: int) -> Found:
            return [(socket.AF_INET, ("127.0.0.1", port)) for port in (first, second)]

        monkeypatch.setattr(sockets, "_resolve_host", resolve)
        kafka_settings = KafkaSettings(
            bootstrap_servers="kafka.example:9092", request_timeout_ms=2_000, socket_connection_setup_timeout_ms=100
        )
        connection = Connection(kafka_settings)
        await connection.open()
        assert failing.taken == 1
        await connection.close()


async def test_canonical_names_of_the_bootstrap_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address of each bootstrap server is contacted by its canonical name. An unknown server is skipped."""

    async def names(host: str, port: int) -> list[str]:
        if host == "gone":
            raise OSError("not known")
        return [f"{host}-{i}.example" for i in (1, 2)]

    monkeypatch.setattr(sockets, "canonical_names", names)
    kafka_settings = KafkaSettings(
        bootstrap_servers="a:1,gone:2,b:3", client_dns_lookup="resolve_canonical_bootstrap_servers_only"
    )
    client = SocketClient(kafka_settings, "c")
    wanted = {("a-1.example", 1), ("a-2.example", 1), ("b-1.example", 3), ("b-2.example", 3)}
    assert set(await client._bootstrap_hosts()) == wanted
    await client.close()


async def test_a_slow_resolver_does_not_delay_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to look up canonical names counts against `request_timeout_ms`."""

    async def names(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(sockets, "canonical_names", names)
    lookup = "resolve_canonical_bootstrap_servers_only"
    kafka_settings = KafkaSettings(bootstrap_servers="slow:1", client_dns_lookup=lookup, request_timeout_ms=50)
    async with asyncio.timeout(5):
        with pytest.raises(BrokerNotAvailable, match="slow:1: no canonical names after"):
            await Connection(kafka_settings).open()


async def test_callers_share_one_attempt_to_a_broker() -> None:
    """Callers that wait for an unresponsive broker share one attempt. Other brokers can be connected to meanwhile."""
    async with serving(silent, answering) as [(mute, first), (_, second)]:
        client = SocketClient(settings(first, socket_connection_setup_timeout_ms=5_000), "c")
        knowing(client, first, second)
        waiting = [asyncio.ensure_future(client.ready(0)) for _ in range(5)]
        async with asyncio.timeout(3):
            assert await client.ready(1)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert not any(waiter.done() for waiter in waiting[1:])
        assert mute.taken == 1
        await client.close()
        assert await asyncio.gather(*waiting[1:]) == [False] * 4
        assert not await client.ready(0)
        assert str(client.connection_error(0, "t")) == "t: the client is closed"


async def test_an_idle_connection_is_closed_and_made_again() -> None:
    """A connection is closed after `connections_max_idle_ms`, and the next request opens another."""
    async with serving(answering) as [(server, port)]:
        connection = Connection(settings(port, connections_max_idle_ms=50))
        await connection.open()
        assert await connection.connect(1)
        assert connection.connected(1)
        taken = server.taken
        closed = connection._client._conns[1, 0]._closed_fut
        async with asyncio.timeout(5):
            await closed
        assert not connection.connected(1)
        assert await connection.connect(1)
        assert server.taken == taken + 1
        await connection.close()


async def test_a_caller_that_stops_waiting_does_not_keep_a_silent_connection() -> None:
    """A request that is not answered in time closes its connection, also if its caller has stopped waiting."""
    async with serving(frozen) as [(_, port)]:
        connection = Connection(settings(port))
        client = adopted(connection, port)
        assert await connection.connect(0)
        opened = client._conns[0, ConnectionGroup.DEFAULT]
        opened._request_timeout = 0.02
        request = asyncio.ensure_future(connection.send(0, produce_request(None, 1, 10, []), "produce"))
        await asyncio.sleep(0)
        assert opened._requests
        request.cancel()
        async with asyncio.timeout(5):
            await opened._closed_fut
        assert not connection.connected(0)
        await connection.close()


async def test_failed_attempts_are_backed_off() -> None:
    """After a failed attempt the next ones are delayed, with a growing, limited backoff. The reason stays available
    meanwhile."""
    async with serving(closing) as [(server, port)]:
        client = SocketClient(settings(port, reconnect_backoff_ms=20, reconnect_backoff_max_ms=80), "c")
        knowing(client, port)
        times: list[float] = []
        async with asyncio.timeout(10):
            while len(times) < 6:
                assert not await client.ready(0)
                assert "closed the connection" in str(client.connection_error(0, "t"))
                if server.taken > len(times):
                    times.append(time.monotonic())
                await asyncio.sleep(0)
        assert times[-1] - times[0] > 0.2, "16, 32 and three times 64 ms at least"
        assert client._backoffs[0][1] - SYSTEM_CLOCK.monotonic_ms() <= 80
        await client.close()


async def test_a_broker_that_does_not_read_does_not_hold_up_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close does not wait until the broker has read what was sent to it, nor if the request has timed out before."""
    monkeypatch.setattr(sockets, "CLOSE_TIMEOUT_MS", 20)
    request = produce_request(None, 1, 1_000, [("t", [(0, bytes(16_000_000))])])
    async with serving(frozen) as [(_, port)]:
        connection = Connection(settings(port))
        client = adopted(connection, port)
        assert await connection.connect(0)
        client._conns[0, ConnectionGroup.DEFAULT]._request_timeout = 0.02
        with pytest.raises(KafkaTimeout):
            await connection.send(0, request, "produce")
        assert await client.ready(0, group=ConnectionGroup.COORDINATION)
        pending = asyncio.ensure_future(connection.send(0, request, "produce", coordination=True))
        await asyncio.sleep(0)
        transports = [opened._transport for opened in client._conns.values()]
        assert all(transport.get_write_buffer_size() for transport in transports)
        async with asyncio.timeout(5):
            await connection.close()
        assert [transport.get_write_buffer_size() for transport in transports] == [0, 0]
        with pytest.raises(BrokerNotAvailable):
            await pending


CONNECTING_CALLS: dict[str, Callable[[Connection], Awaitable[Any]]] = {
    "send": lambda connection: connection.send(0, object(), "topic t"),
    "waiting": lambda connection: connection.send(0, object(), "topic t", waits_ms=60_000),
    "fetch": lambda connection: connection.fetch(0, FetchRequest(300, 1, 1 << 20, False, []), "topic t"),
}


@pytest.mark.parametrize("name", CONNECTING_CALLS)
async def test_a_close_ends_a_request_that_is_still_connecting(name: str) -> None:
    """A request whose connection is being set up during the close ends in BrokerNotAvailable, as all others."""
    accepted = asyncio.Event()

    async def accepting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        await silent(reader, writer)

    async with serving(accepting) as [(_, port)]:
        connection = Connection(settings(port))
        adopted(connection, port)
        request = asyncio.ensure_future(CONNECTING_CALLS[name](connection))
        await accepted.wait()
        await connection.close()
        with pytest.raises(BrokerNotAvailable, match="topic t"):
            await request


async def test_a_broker_that_is_not_known() -> None:
    """A request to a node without an address fails with an error that names the node."""
    client = SocketClient(settings(1), "c")
    assert not await client.ready(7)
    assert str(client.connection_error(7, "produce")) == "produce: broker 7 is not in the metadata"
    await client.close()


async def test_authentication_error_of_a_node_is_kept() -> None:
    """An authentication error is kept until the node is removed from the metadata. Other errors are not authentication
    errors."""
    client = SocketClient(settings(1), "c")
    knowing(client, 1, 2)
    client._node_errors = {0: BrokerNotAvailable("gone"), 1: AuthenticationFailed("wrong")}
    assert str(client.authentication_error()) == "wrong"
    knowing(client, 1)
    assert client.authentication_error() is None
    await client.close()


async def test_errors_of_failed_connections() -> None:
    """TLS alerts and failed SASL exchanges are AuthenticationFailed. A closed socket is not."""
    client = SocketClient(settings(1), "c")
    alert = kafka.KafkaConnectionError("closed")
    alert.__cause__ = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")
    error = client._connection_error(alert, "h:1", 5)
    assert isinstance(error, AuthenticationFailed)
    assert str(error).startswith("h:1: TLS: ")
    assert isinstance(
        client._connection_error(ValueError("Server sent wrong signature!"), "h:1", 5), AuthenticationFailed
    )
    for gone in (ssl.SSLEOFError(8, "eof"), ConnectionResetError(), kafka.KafkaConnectionError("closed")):
        error = client._connection_error(gone, "h:1", 5)
        assert isinstance(error, BrokerNotAvailable)
        assert "kafka.security_protocol=PLAINTEXT" in str(error)
    assert "refused" in str(client._connection_error(ConnectionRefusedError(111, "refused"), "h:1", 5))
    await client.close()


@pytest.mark.parametrize(
    ("handler", "more", "found"),
    [
        (closing, {"metadata_recovery_rebootstrap_trigger_ms": 60_000}, True),
        (closing, {"metadata_recovery_rebootstrap_trigger_ms": 0, "metadata_recovery_strategy": "none"}, False),
        (starting, {"metadata_recovery_rebootstrap_trigger_ms": 60_000}, False),
        (starting, {"metadata_recovery_rebootstrap_trigger_ms": 0}, True),
    ],
)
async def test_metadata_is_bootstrapped_again_if_all_brokers_moved(
    handler: Handler, more: dict[str, Any], found: bool
) -> None:
    """If no known broker can be connected to, or if none returns metadata for too long, the bootstrap servers are used
    again, unless this is switched off."""
    async with serving(answering, handler) as [(_, new), (_, old)]:
        client = SocketClient(settings(new, **more), "c")
        knowing(client, old)
        assert await client._metadata_update(client.cluster, set()) is found
        assert [(broker.nodeId, broker.port) for broker in client.cluster.brokers()] == [
            (1, new) if found else (0, old)
        ]
        await client.close()


async def test_bootstrapping_again_keeps_the_backoffs_of_unreachable_addresses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nodes that still have the same address are not connected to sooner: their listeners may be advertised wrongly."""

    async def advertising(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await respond(reader, writer, brokers)

    async with serving(advertising, closing, closing) as [(_, server), (_, old), (_, other)]:
        client = SocketClient(settings(server), "c")
        knowing(client, old)
        for port, backed_off in ((old, [0]), (other, [])):
            brokers = [(0, "127.0.0.1", port)]
            caplog.clear()
            assert await client._metadata_update(client.cluster, set())
            assert [node for node in client._backoffs if node != BOOTSTRAP] == backed_off
            assert caplog.text.count("metadata from the bootstrap servers") == (not backed_off)
            del client._backoffs[BOOTSTRAP]
        await client.close()


@pytest.mark.parametrize("is_down", [True, False])
async def test_bootstrapping_again_has_a_backoff(is_down: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap servers are not used at each update if they are down, or name only unreachable brokers. The backoff
    ends when a known broker returns metadata."""
    clock = ManualClock()
    monkeypatch.setattr(sockets, "SYSTEM_CLOCK", clock)

    async def advertising(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await respond(reader, writer, [] if is_down else [(0, "127.0.0.1", old)])

    async with serving(advertising, closing, answering) as [(bootstrap_server, server), (_, old), (_, good)]:
        client = SocketClient(settings(server, reconnect_backoff_max_ms=60_000), "c")
        knowing(client, old)
        for updates, wait_ms in ((1, 0), (1, 0), (2, 50), (2, 50), (3, 50)):
            clock.advance(wait_ms)
            await client._metadata_update(client.cluster, set())
            assert bootstrap_server.taken == updates
        knowing(client, old, good)
        assert await client._metadata_update(client.cluster, set())
        assert BOOTSTRAP not in client._backoffs
        await client.close()


async def test_bootstrapping_again_requests_the_watched_topics() -> None:
    """No update lacks their partitions. A consumer without a group would drop its positions."""
    async with FakeCluster() as cluster, serving(closing) as [(_, old)]:
        cluster.create_topic("t", 1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, metadata_recovery_rebootstrap_trigger_ms=0)
        client = SocketClient(kafka, "c")
        knowing(client, old)
        updates: list[set[str]] = []
        client.cluster.add_listener(lambda metadata: updates.append(metadata.topics()))
        assert await client._metadata_update(client.cluster, {"t"})
        assert updates == [{"t"}]
        await client.close()


async def test_metadata_is_kept_if_bootstrapping_again_fails() -> None:
    """If the bootstrap servers are unreachable too, the update fails and the old metadata is kept."""
    async with serving(closing, closing) as [(_, one), (_, other)]:
        client = SocketClient(settings(one, metadata_recovery_rebootstrap_trigger_ms=0), "c")
        knowing(client, other)
        assert not await client._metadata_update(client.cluster, set())
        assert [broker.port for broker in client.cluster.brokers()] == [other]
        await client.close()


async def test_the_wait_before_bootstrapping_again_begins_with_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time since the last successful update does not count. Later failures are logged after waits that double."""
    clock = ManualClock()
    monkeypatch.setattr(sockets, "SYSTEM_CLOCK", clock)
    async with serving(closing, starting) as [(_, one), (_, other)]:
        client = SocketClient(settings(one, metadata_recovery_rebootstrap_trigger_ms=1_000), "c")
        knowing(client, other)
        lines = []
        for wait_ms in (60_000, 1_000, 1_000, 10_000):
            clock.advance(wait_ms)
            caplog.clear()
            assert not await client._metadata_update(client.cluster, set())
            lines.append(caplog.text.count("no bootstrap server reached either"))
        assert lines == [0, 1, 0, 1]
        await client.close()


async def test_nodes_that_are_likely_to_respond_are_preferred() -> None:
    """Connected nodes come first, those with the fewest open requests before the others. Nodes whose last attempt to
    connect failed come last."""
    async with FakeCluster(3) as cluster:
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
        await connection.open()
        assert await connection.connect(1)
        assert {connection.any_node() for _ in range(20)} == {1}
        cluster.control(Api.METADATA, Drop(), node=1, times=1)
        waiting = asyncio.ensure_future(connection.refresh_metadata())
        assert await connection.connect(2)
        assert {connection.any_node() for _ in range(20)} == {2}
        await connection.close()
        assert not await waiting
        await connection.open()
        for node in (1, 2):
            await cluster.stop_node(node)
            assert not await connection.connect(node)
        assert {connection.any_node() for _ in range(20)} == {3}
        await connection.close()


async def test_a_node_that_does_not_return_metadata_is_connected_to_again() -> None:
    """A silent connection is closed after the request timeout. Otherwise each update could wait for it again."""
    async with FakeCluster() as cluster:
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=50))
        await connection.open()
        assert await connection.refresh_metadata()
        cluster.control(Api.METADATA, Drop(), times=1)
        assert not await connection.refresh_metadata()
        assert not connection.connected(1)
        assert await connection.refresh_metadata()
        await connection.close()


async def test_buffers_of_the_sockets_have_the_size_that_is_set() -> None:
    """The socket buffers have the configured size. The default is the system's, like Kafka's -1."""
    sizes, kinds = {}, dict[str, Any]
    async with serving(answering) as [(_, port)]:
        for name, more in (("system", kinds()), ("set", {"send_buffer_bytes": 20_000, "receive_buffer_bytes": 30_000})):
            client = SocketClient(settings(port, **more), name)
            await client.bootstrap()
            assert await client.ready(1)
            at = client._conns[1, ConnectionGroup.DEFAULT]._writer.get_extra_info("socket")
            sizes[name] = [at.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
            await client.close()
    assert sizes["set"] in ([20_000, 30_000], [40_000, 60_000])  # Linux doubles what it is given
    assert sizes["system"] != sizes["set"]


async def test_aiokafka_logs_of_own_clients_are_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    """aiokafka's log lines of Penstock's clients are suppressed. Those of a client that the user created with aiokafka
    are logged."""
    logging.getLogger("aiokafka").setLevel(logging.NOTSET)
    with caplog.at_level(logging.DEBUG):
        async with serving(closing) as [(_, port)]:
            client = SocketClient(settings(port), "c")
            with pytest.raises(BrokerNotAvailable):
                await client.bootstrap(500)
            await client.close()
            assert not [record for record in caplog.records if record.name.startswith("aiokafka.")]
            others = AIOKafkaClient(bootstrap_servers=f"127.0.0.1:{port}")
            with pytest.raises(kafka.KafkaConnectionError):
                await others.bootstrap()
            assert [record for record in caplog.records if record.name.startswith("aiokafka.")]


async def test_requests_and_errors_name_their_client(caplog: pytest.LogCaptureFixture) -> None:
    """The debug line of a request has its correlation id. An error has a note with the client id, which tracebacks
    show."""
    async with serving(answering) as [(_, port)]:
        with caplog.at_level(logging.DEBUG, sockets.__name__):
            connection = Connection(settings(port, client_id="shop-1"))
            await connection.open()
            await connection.connect(1)
        lines = [record.getMessage() for record in caplog.records if record.name == sockets.__name__]
        assert any(line.startswith("request client_id='shop-1' correlation_id=1 api=") for line in lines)
        await connection.close()
    with pytest.raises(BrokerNotAvailable) as raised:
        await connection.send(1, None, "topic t")
    assert "client shop-1" in getattr(raised.value, "__notes__", ())


async def test_errors_of_connecting_name_their_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of the bootstrap, of a request without a known broker, of an unreachable coordinator, and of a broker
    that rejects the client have their reason and the note."""
    connection = Connection(settings(1, client_id="shop-1", request_timeout_ms=50))
    with pytest.raises(BrokerNotAvailable, match="no broker reached") as bootstrapping:
        await connection.open()
    assert getattr(bootstrapping.value, "__notes__", ()) == ["client shop-1"]

    client = SocketClient(connection.settings, "shop-1")
    connection.adopt(client)
    with pytest.raises(BrokerNotAvailable, match="no broker known") as knowing_none:
        connection.any_node()
    assert getattr(knowing_none.value, "__notes__", ()) == ["client shop-1"]
    with pytest.raises(BrokerNotAvailable, match="no broker known") as coordinating:
        await connection.coordinator("group", "g")
    assert getattr(coordinating.value, "__notes__", ()) == ["client shop-1"]

    knowing(client, 1)

    async def find(*_: object) -> int:
        return 7

    monkeypatch.setattr(client, "coordinator_lookup", find)
    with pytest.raises(CoordinatorNotAvailable, match="group g: coordinator 7") as coordinating:
        await connection.coordinator("group", "g")
    assert getattr(coordinating.value, "__notes__", ()) == ["client shop-1"]

    async def is_ready(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(client, "ready", is_ready)
    client._node_errors[7] = AuthenticationFailed("rejected")
    for call in (connection.connect, connection.api_versions):
        with pytest.raises(AuthenticationFailed, match="node 7: rejected") as rejecting:
            await call(7)
        assert getattr(rejecting.value, "__notes__", ()) == ["client shop-1"]
    await connection.close()


HERE, NOBODY, BLACK_HOLE = ("127.0.0.1", 0), ("127.0.0.1", 1), ("192.0.2.1", 9092)
NO_FAMILY = 9_999
"""A number that is no address family."""


class Network:
    """A fake network with several addresses under one name. At an address that does not respond the attempt's time is
    over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent: set[object]) -> None:
        self.found: Found = []
        self.tried: list[object] = []
        self.limit = asyncio.timeout(None)
        self._silent = silent
        self._connect = asyncio.get_running_loop().sock_connect
        monkeypatch.setattr(sockets, "_resolve_host", self.resolve)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", self.connect)

    async def resolve(self, host: str, port: int) -> Found:
        return self.found

    async def connect(self, connecting: socket.socket, address: tuple[str, int]) -> None:
        self.tried.append(address)
        if address in self._silent:
            self.limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
        await self._connect(connecting, address)


async def attempt(network: Network, known: Addresses) -> tuple[str, int] | None:
    """Return the address that was connected to, or None if the attempt timed out."""
    network.limit = asyncio.timeout(None)
    try:
        async with network.limit:
            connected, address = await known.connected_socket("kafka", 9092)
            with connected:
                assert connected.getpeername() == address
                peer: tuple[str, int] = address
                return peer
    except TimeoutError:
        return None


async def test_each_address_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refused connection the next address is tried at once. An unresponsive address uses up its attempt, and
    the next attempt starts after it."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    here = server.sockets[0].getsockname()
    network = Network(monkeypatch, {BLACK_HOLE})
    network.found = [(socket.AF_INET, address) for address in (NOBODY, BLACK_HOLE, here)]
    known = Addresses()
    assert [await attempt(network, known) for _ in range(3)] == [None, here, here]
    assert network.tried == [NOBODY, BLACK_HOLE, here, here]
    assert "192.0.2.1" in repr(known)
    network.found = [(socket.AF_INET, here)]  # the name has moved
    assert await attempt(network, known) == here
    server.close()


async def test_an_address_of_a_family_that_the_system_lacks_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPv6 address on a system without IPv6 counts as one that refuses the connection."""
    network = Network(monkeypatch, set())
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    here = server.sockets[0].getsockname()
    network.found = [(NO_FAMILY, ("::1", 9092)), (socket.AF_INET, here)]
    assert await attempt(network, Addresses()) == here
    network.found = [(NO_FAMILY, ("::1", 9092))]
    with pytest.raises(OSError, match="family"):
        await attempt(network, Addresses())
    server.close()


async def test_if_all_addresses_fail_the_last_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all addresses refuse the connection, the last error is raised. A name without addresses is an error too."""
    network = Network(monkeypatch, set())
    network.found = [(socket.AF_INET, NOBODY)]
    with pytest.raises(ConnectionRefusedError):
        await attempt(network, Addresses())
    network.found = []
    with pytest.raises(ConnectionRefusedError, match="kafka has no address"):
        await attempt(network, Addresses())


async def test_names_and_addresses() -> None:
    """A name is resolved, an address is used unchanged, and canonical names come from the reverse lookup of the
    addresses."""
    assert await sockets._resolve_host("127.0.0.1", 5) == [(socket.AF_INET, ("127.0.0.1", 5))]
    assert await sockets._resolve_host("::1", 5) == [(socket.AF_INET6, ("::1", 5))]
    assert (socket.AF_INET, ("127.0.0.1", 5)) in await sockets._resolve_host("localhost", 5)
    assert await canonical_names("127.0.0.1", 5) == [socket.getnameinfo(("127.0.0.1", 5), 0)[0]]


class Whole:
    """A response that consists of its raw bytes."""

    @staticmethod
    def decode_frame(frame: bytearray) -> bytes:
        if frame[4:] == b"broken":
            raise ValueError("broken")
        return bytes(frame)


class FetchLike:
    RESPONSE_TYPE = Whole


class NotFetch:
    RESPONSE_TYPE = object


class Response:
    """A future that records its result."""

    def __init__(self) -> None:
        self.result: bytes | None = None

    def done(self) -> bool:
        return self.result is not None

    def set_result(self, result: bytes) -> None:
        self.result = result


class Recording:
    """Records calls of the parts of aiokafka's connection that are used."""

    def __init__(self, *requests: tuple[int, Any]) -> None:
        self.responses = [Response() for _ in requests]
        self._requests = deque(
            (number, request, response) for (number, request), response in zip(requests, self.responses, strict=True)
        )
        self._last_action = 0.0
        self.handed_on: list[bytes] = []
        self.closed: list[Exception] = []

    def _handle_frame(self, frame: bytes) -> None:
        self.handed_on.append(frame)
        self._requests.popleft()

    def close(self, exc: Exception) -> None:
        self.closed.append(exc)


def framed(number: int, body: bytes) -> bytes:
    return (4 + len(body)).to_bytes(4, "big") + number.to_bytes(4, "big") + body


def feed(frames: Frames, data: bytes, sizes: list[int]) -> None:
    at, turn = 0, 0
    while at < len(data):
        buffer = frames.get_buffer(-1)
        size = min(len(buffer), len(data) - at, sizes[turn % len(sizes)])
        buffer[:size] = data[at : at + size]
        frames.buffer_updated(size)
        at, turn = at + size, turn + 1


@given(
    bodies=st.lists(st.tuples(st.booleans(), st.binary(max_size=50)), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_frames_are_reassembled_from_any_chunks(bodies: list[tuple[bool, bytes]], sizes: list[int]) -> None:
    """For any chunks, each request gets its own response. Responses without an in-place decoder go to aiokafka."""
    connection = Recording(*((i, FetchLike() if ours else NotFetch()) for i, (ours, _) in enumerate(bodies)))
    feed(Frames(connection, None), b"".join(framed(i, body) for i, (_, body) in enumerate(bodies)), sizes)
    whole = [framed(i, body)[4:] for i, (_, body) in enumerate(bodies)]
    if not connection.closed:
        assert [a.result for a, (ours, _) in zip(connection.responses, bodies, strict=True) if ours] == [
            frame for frame, (ours, _) in zip(whole, bodies, strict=True) if ours
        ]
        assert connection.handed_on == [frame for frame, (ours, _) in zip(whole, bodies, strict=True) if not ours]
        assert not connection._requests


def test_an_unexpected_correlation_id_is_passed_to_aiokafka() -> None:
    """A response with an unexpected correlation id is passed to aiokafka."""
    connection = Recording((1, FetchLike()))
    feed(Frames(connection, None), framed(2, b"x"), [100])
    assert (connection.handed_on, connection.responses[0].result) == ([framed(2, b"x")[4:]], None)


def test_a_response_that_cannot_be_read_closes_the_connection() -> None:
    """A response that cannot be decoded, or with an invalid size, closes the connection. aiokafka fails the request's
    future."""
    connection = Recording((1, FetchLike()))
    feed(Frames(connection, None), framed(1, b"broken"), [100])
    assert [str(e) for e in connection.closed] == ["broken"]
    for size in (0, 3, -1, FRAME_BYTES_MAX + 1):
        connection = Recording((1, FetchLike()))
        feed(Frames(connection, None), size.to_bytes(4, "big", signed=True), [4])
        assert str(connection.closed[0]).endswith(f"a response of {size} bytes")


async def test_a_connection_of_aiokafka() -> None:
    """An open connection is upgraded once, between two responses, and serves every kind of request afterwards."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
        await connection.open()
        node = connection.nodes()[0]
        request = FetchRequest(300, 1, 1 << 20, False, [("t", [(0, 0, -1, 1 << 20)])])
        waiting = asyncio.create_task(connection.fetch(node, request, "fetch"))
        assert (await waiting).partitions["t", 0].high_watermark == 0
        socket = connection._client._conns[node, 0]
        frames = socket._writer.transport.get_protocol()
        assert isinstance(frames, Frames)
        read_in_place(socket)
        assert socket._writer.transport.get_protocol() is frames
        assert await connection.refresh_metadata()
        await connection.close()


async def test_a_fetch_fails_if_the_broker_closes_the_new_connection() -> None:
    """A broker that closes the connection after its set-up is not available. A retry may succeed."""
    async with serving(leaving) as [(_, port)]:
        connection = Connection(settings(port))
        adopted(connection, port)
        with pytest.raises(BrokerNotAvailable):
            await connection.fetch(0, FetchRequest(300, 1, 1 << 20, False, []), "fetch")
        await connection.close()
