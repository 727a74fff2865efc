"""aiokafka's client, with sockets that have time limits of their own and read responses in place.

The setup of a connection includes TCP, TLS and SASL. It ends within `socket_connection_setup_timeout_ms`, or fails with
a reason. The limit doubles with each failure in a row, up to `socket_connection_setup_timeout_max_ms` (KIP-601); for
bootstrap servers it does not. A broker that does not respond does not delay connections to other brokers. Requests that
any broker can answer go to a connected one if possible.

The addresses of a host name are tried in turn, as under Java's `client.dns.lookup=use_all_dns_ips` (KIP-302). If an
address refuses the connection, the next address is tried at once. An address that does not respond, or that fails after
it has accepted the connection, ends the attempt. The next attempt then begins with the address after it, so that every
address is tried.

aiokafka reads through asyncio's StreamReader, which copies every byte three times before a response is parsed. In a
fetch these copies are half of the work. `read_in_place` replaces the protocol of an open aiokafka connection. The
socket then receives each response directly into a buffer of its own. A response type with `decode_frame` decodes that
buffer without a copy. aiokafka still does everything else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import READER_LIMIT, AIOKafkaConnection, AIOKafkaProtocol, CloseReason
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.util import create_task

from penstock.shared.clients.connection.security import OfOthers, SeenThrough, aiokafka_options
from penstock.shared.clients.protocol.errors import translate
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import AuthenticationFailed, BrokerNotAvailable, PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.common.repeated_failure import RepeatedFailure
from penstock.shared.common.settings import KafkaSettings

Found = list[tuple[int, Any]]
"""Address families and socket addresses."""

log = get_logger(__name__)
_standard_log = logging.getLogger(__name__)

NOT_OF_A_SOCKET = ("bootstrap_servers", "metadata_max_age_ms", "retry_backoff_ms", "connections_max_idle_ms")
"""The options of aiokafka's client that its connection does not have."""
TRANSPORT_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""TLS errors that are not about certificates: the other side closed the connection."""

RECONNECT_JITTER = 0.2
"""The backoff before a connection attempt is shorter by this share. A caller that retries has a backoff of its own,
with jitter. So its retry does not come while the client still waits."""

CLOSE_TIMEOUT_MS = 1_000
"""How long the close of a client waits for the brokers to read what was sent to them."""

BOOTSTRAP = "bootstrap"
"""The id of the bootstrap servers, as a node that has a backoff."""

SIZE_BYTES = 4
FRAME_BYTES_MAX = 1 << 30
"""A larger response is treated as a broken connection."""

ConnectionId = tuple[int | str, int]


class Addresses:
    """Connects the sockets of one client.

    It remembers by host and port the address that ended the last failed attempt. The next attempt begins after it.
    """

    def __init__(self, send_buffer_bytes: int = -1, receive_buffer_bytes: int = -1) -> None:
        """The buffer sizes, in bytes, are those of the sockets; -1 for the system's default."""
        sizes = {socket.SO_SNDBUF: send_buffer_bytes, socket.SO_RCVBUF: receive_buffer_bytes}
        self._buffers = {option: size for option, size in sizes.items() if size >= 0}
        self._failed: dict[tuple[str, int], Any] = {}

    def __repr__(self) -> str:
        return f"Addresses(failed {self._failed})"

    def attempt_failed(self, host: str, port: int, address: Any) -> None:
        """Begin the next attempt after this address."""
        self._failed[host, port] = address

    async def connected_socket(self, host: str, port: int) -> tuple[socket.socket, Any]:
        """Return a socket connected to one of the host's addresses, and that address.

        Raises the OSError of the last address if all addresses refuse the connection.
        """
        error: OSError = ConnectionRefusedError(f"{host} has no address")
        for family, address in self._rotate_addresses((host, port), await _resolve_host(host, port)):
            try:
                return await self._connect_to_address(family, address), address
            # 1. The address refuses the connection, or the system lacks its family: try the next one.
            except OSError as e:
                error = e
            # 2. The caller's time limit has passed: the next attempt begins after this address.
            except BaseException:
                self.attempt_failed(host, port, address)
                raise
        raise error

    async def _connect_to_address(self, family: int, address: Any) -> socket.socket:
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            # Before connecting: TCP negotiates its window from the buffer sizes.
            for option, size in self._buffers.items():
                connecting.setsockopt(socket.SOL_SOCKET, option, size)
            await asyncio.get_running_loop().sock_connect(connecting, address)
        except BaseException:
            connecting.close()
            raise
        return connecting

    def _rotate_addresses(self, broker: tuple[str, int], found: Found) -> Found:
        """Return the addresses, beginning after the one that ended the last failed attempt."""
        addresses = [address for _, address in found]
        if (failed := self._failed.get(broker)) not in addresses:
            return found
        first = addresses.index(failed) + 1
        return found[first:] + found[:first]


async def canonical_names(host: str, port: int) -> list[str]:
    """Return the name of each of a host's addresses, or the address itself if it has no name.

    Raises OSError if the host is unknown.
    """
    names = []
    for _, address in await _resolve_host(host, port):
        name, _ = await asyncio.get_running_loop().getnameinfo(address)
        names.append(name)
    return list(dict.fromkeys(names))


async def _resolve_host(host: str, port: int) -> Found:
    # An address needs no resolver, which may be slow or absent.
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A label is empty or too long.
        except UnicodeError:
            raise OSError(f"{host} is not a host name") from None
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    return [(family, (host, port))]


def metadata_request(topics: list[str] | None) -> MetadataRequest:
    """Return the request for the metadata of `topics`, or of all topics if it is None.

    The broker does not create missing topics, even with `auto.create.topics.enable`. Otherwise a running client would
    create a deleted topic again, with the broker's default partitions and retention.
    """
    return MetadataRequest(topics, allow_auto_topic_creation=False)


class Socket(AIOKafkaConnection):  # type: ignore[misc]
    """One connection to a broker, at one of its host's addresses."""

    def __init__(self, host: str, port: int, *, addresses: Addresses, **options: Any) -> None:
        super().__init__(host, port, **options)
        self._addresses = addresses
        self._transport: Any = None

    async def connect(self) -> None:
        """Connect by TCP and TLS, request the broker's versions, and authenticate by SASL.

        `SocketClient._open_socket` translates the errors.
        """
        # These are the steps of aiokafka's `connect`. Only the socket is new: it is made for one address of the host,
        # while aiokafka leaves the choice to asyncio, which begins with the first address in every attempt.
        loop = asyncio.get_running_loop()
        is_tls = self._security_protocol.endswith("SSL")
        connected, address = await self._addresses.connected_socket(self._host, self._port)
        self._closed_fut = loop.create_future()
        reader = asyncio.StreamReader(limit=READER_LIMIT, loop=loop)
        protocol = AIOKafkaProtocol(self._closed_fut, reader, loop=loop)
        tls = {"ssl": self._ssl_context, "server_hostname": self._host} if is_tls else {}
        try:
            transport, _ = await loop.create_connection(lambda: protocol, sock=connected, **tls)
            self._reader = reader
            self._protocol = protocol
            self._transport = transport
            self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            self._read_task = self._create_reader_task()
            if self._max_idle_ms is not None:
                self._idle_handle = loop.call_soon(self._idle_check, weakref.ref(self))
            await self._do_version_lookup()
            if self._security_protocol.startswith("SASL"):
                await self._do_sasl_handshake()
        except BaseException:
            self._addresses.attempt_failed(self._host, self._port, address)
            self.close()
            raise

    def send(self, request: Any, expect_response: bool = True) -> Any:
        """Send a request as aiokafka does, and log it at DEBUG.

        aiokafka closes a connection whose request is not answered in time, but not if the caller stops waiting earlier.
        Then the connection is closed at the end of the same time. Otherwise a connection that the network has dropped
        silently would be used for ever by callers with shorter time limits.
        """
        sent = super().send(request, expect_response)
        if expect_response:
            self._close_after_a_cancelled_wait()
        if _standard_log.isEnabledFor(logging.DEBUG):
            log.debug(
                "request",
                client_id=self._client_id,
                correlation_id=self._correlation_id,
                api=getattr(request, "name", None) or type(request).__name__.removesuffix("Request"),
                broker=f"{self._host}:{self._port}",
            )
        return sent

    def _close_after_a_cancelled_wait(self) -> None:
        loop = asyncio.get_running_loop()
        correlation_id, _, response = self._requests[-1]
        deadline_s = loop.time() + self._request_timeout

        def close_if_unanswered() -> None:
            if any(open_id == correlation_id for open_id, _, _ in self._requests):
                self.close(CloseReason.CONNECTION_TIMEOUT)

        def stopped_waiting(response: asyncio.Future[Any]) -> None:
            # The timer would keep a closed connection in memory.
            if response.cancelled() and self.connected():
                loop.call_at(deadline_s, close_if_unanswered)

        response.add_done_callback(stopped_waiting)

    def abort_close(self) -> None:
        """End a close that has not ended yet. Unsent bytes are dropped."""
        if not self._closed_fut.done():
            self._transport.abort()

    def authenticator_oauth(self) -> SeenThrough:
        return SeenThrough(sasl_oauth_token_provider=self._sasl_oauth_token_provider)


class SocketClient(AIOKafkaClient):  # type: ignore[misc]
    """The sockets and the metadata of one client."""

    _sync_task: Any
    _topics: set[str] | None
    """The topics of which the metadata is kept up to date; None: all topics."""

    def __init__(self, kafka_settings: KafkaSettings, client_id: str) -> None:
        """Raises ConfigError if a certificate file is invalid, or if the token function is missing."""
        options = aiokafka_options(kafka_settings, client_id)
        super().__init__(**options)
        self._settings = kafka_settings
        self._socket_options = {name: value for name, value in options.items() if name not in NOT_OF_A_SOCKET}
        self._attempts: dict[ConnectionId, asyncio.Task[Any]] = {}
        self._node_errors: dict[int | str, PenstockError] = {}
        # Each node has its failures in a row and the earliest time of its next attempt, in ms. All bootstrap servers
        # together are the node BOOTSTRAP.
        self._backoffs: dict[int | str, tuple[int, float]] = {}
        self._is_closed = False
        self._addresses = Addresses(kafka_settings.send_buffer_bytes, kafka_settings.receive_buffer_bytes)
        # The time of the first of the failed metadata updates in a row.
        self._failing_since_ms: int | None = None
        self._unreached = RepeatedFailure()

    async def bootstrap(self, timeout_ms: float | None = None) -> None:
        """Fetch the first metadata if needed. The bootstrap servers are tried once each, until one answers.

        Raises AuthenticationFailed as soon as a server rejects the credentials. Raises BrokerNotAvailable with the
        reason of each server.
        """
        if self._sync_task is not None:
            return
        await self._bootstrap_from_any([], self._settings.request_timeout_ms if timeout_ms is None else timeout_ms)
        self._sync_task = create_task(self._md_synchronizer())

    async def _bootstrap_from_any(self, topics: list[str] | None, timeout_ms: float) -> None:
        """Fetch the metadata of the brokers and of `topics` (None: all topics) from the first server that answers."""
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                hosts = await self._bootstrap_hosts()
        except TimeoutError:
            servers = self._settings.bootstrap_servers
            raise BrokerNotAvailable(f"{servers}: no canonical names after {timeout_ms:.0f} ms") from None
        reasons: list[str] = []
        for index, (host, port) in enumerate(hosts):
            # Each server gets its share of the time that is left: a silent one must not use up the time of the others.
            share_ms = max(0.0, deadline_ms - SYSTEM_CLOCK.monotonic_ms()) / (len(hosts) - index)
            try:
                await self._bootstrap_from(host, port, topics, share_ms)
                return
            # All servers of a cluster check the same credentials: more attempts would only delay the error.
            except AuthenticationFailed:
                raise
            except PenstockError as e:
                reasons.append(str(e))
        raise BrokerNotAvailable("; ".join(reasons))

    async def _bootstrap_hosts(self) -> list[tuple[str, int]]:
        """Return the bootstrap servers; by their canonical names unless `client_dns_lookup` is use_all_dns_ips.

        A host that cannot be resolved to a canonical name is left out, unless none can be resolved.
        """
        hosts = [(host, port) for host, port, _ in self.hosts]
        if self._settings.client_dns_lookup == "use_all_dns_ips":
            return hosts
        found: dict[tuple[str, int], None] = {}
        for host, port in hosts:
            try:
                found.update(dict.fromkeys((name, port) for name in await canonical_names(host, port)))
            except OSError as e:
                log.warning("a bootstrap server is not known", host=host, reason=str(e))
        return list(found) or hosts

    async def _metadata_update(self, cluster_metadata: Any, topics: set[str] | None) -> bool:
        """Update the metadata from a known broker. Returns whether that succeeded.

        If no known broker can be connected to (KIP-899), or if updates fail for
        `metadata_recovery_rebootstrap_trigger_ms` (KIP-1102), the bootstrap servers are used, since all brokers may
        have moved. With `metadata_recovery_strategy=none` they are not. They have a backoff, as a broker does, until a
        known broker returns metadata.
        """
        started_ms = SYSTEM_CLOCK.monotonic_ms() if self._failing_since_ms is None else self._failing_since_ms
        if await self._update_from_known_node(cluster_metadata, None if topics is None else list(topics)):
            self._backoffs.pop(BOOTSTRAP, None)
            self._metadata_updated()
            return True
        settings = self._settings
        self._failing_since_ms = started_ms
        silent_ms = SYSTEM_CLOCK.monotonic_ms() - started_ms
        known = self.cluster.brokers()
        # A node has a backoff from a failed attempt to connect until a successful one.
        is_any_reachable = any(broker.nodeId not in self._backoffs for broker in known)
        # The third condition leaves out `fetch_all_metadata`, which fills metadata of its own.
        if (
            settings.metadata_recovery_strategy == "none"
            or (is_any_reachable and silent_ms < settings.metadata_recovery_rebootstrap_trigger_ms)
            or cluster_metadata is not self.cluster
            or self._is_backing_off(BOOTSTRAP)
        ):
            return False
        try:
            await self._bootstrap_from_any(None if topics is None else list(topics), settings.request_timeout_ms)
        except PenstockError as e:
            if (times := self._unreached.failed(SYSTEM_CLOCK.monotonic_ms())) is not None:
                log.warning("no bootstrap server reached either", silent_ms=silent_ms, reason=str(e), **times)
            return False
        finally:
            # Also after a success: the brokers that they name may be unreachable.
            self._back_off(BOOTSTRAP)
        if moved := self.cluster.brokers() - known:
            log.warning("metadata from the bootstrap servers", silent_ms=silent_ms)
        # Their backoffs belong to addresses that they no longer have. Other nodes still cannot be connected to.
        for broker in moved:
            self._backoffs.pop(broker.nodeId, None)
        self._metadata_updated()
        return True

    def _metadata_updated(self) -> None:
        self._failing_since_ms = None
        self._unreached.succeeded(SYSTEM_CLOCK.monotonic_ms())

    async def _update_from_known_node(self, cluster_metadata: Any, topics: list[str] | None) -> bool:
        for node in self._nodes_by_readiness():
            if (connection := await self._get_conn(node)) is None:
                continue
            try:
                metadata = await connection.send(metadata_request(topics))
            except TimeoutError:
                # Later requests must not wait for this silent connection again.
                connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
            except kafka.KafkaError as e:
                log.debug("no metadata from a broker", node=node, reason=str(e))
            else:
                # The broker may have just started.
                if metadata.brokers:
                    cluster_metadata.update_metadata(metadata)
                return bool(metadata.brokers)
        return False

    def get_random_node(self) -> int | None:
        """Return a node that is likely to respond soon. Returns None if no node is known."""
        return next(iter(self._nodes_by_readiness()), None)

    def _nodes_by_readiness(self) -> list[int]:
        """Return the known nodes, those first that are likely to respond soon (Java: `leastLoadedNode`).

        1. Connected nodes, those with the fewest open requests first. A silent node has an open request.
        2. Nodes that are not connected.
        3. Nodes whose last attempt to connect failed: another attempt may take a whole setup timeout.
        Nodes that are equal in this are in random order.
        """

        def rank(node: int) -> tuple[int, int]:
            connection = self._conns.get((node, ConnectionGroup.DEFAULT))
            if connection is not None and connection.connected():
                return 1, len(connection._requests)
            return (3 if node in self._node_errors else 2), 0

        nodes = [int(broker.nodeId) for broker in self.cluster.brokers()]
        random.shuffle(nodes)
        return sorted(nodes, key=rank)

    async def _bootstrap_from(self, host: str, port: int, topics: list[str] | None, timeout_ms: float) -> None:
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        setup_ms = min(timeout_ms, self._settings.socket_connection_setup_timeout_ms)
        connection = await self._open_socket(host, port, setup_ms)
        try:
            async with asyncio.timeout(max(0.0, deadline_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000):
                metadata = await connection.send(metadata_request(topics))
        # TimeoutError is an OSError.
        except (kafka.KafkaError, OSError) as e:
            raise self._connection_error(e, f"{host}:{port}", timeout_ms) from e
        finally:
            connection.close()
        # The broker may have just started.
        if not metadata.brokers:
            raise BrokerNotAvailable(f"{host}:{port}: the broker knows no broker of its cluster yet")
        self.cluster.update_metadata(metadata)

    async def _get_conn(self, node_id: int | str, *, group: int = ConnectionGroup.DEFAULT) -> Any:
        """Return the connection to a node, and connect if needed. Returns None if that fails; see `connection_error`.

        After a failure there is no attempt during the backoff. It is `reconnect_backoff_ms` after the first failure,
        and doubles with each further one up to `reconnect_backoff_max_ms`. Each backoff is shortened by the fixed
        share RECONNECT_JITTER.
        """
        conn_id = (node_id, group)
        known = self._conns.get(conn_id)
        if known is not None and known.connected():
            return known
        attempt = self._attempts.get(conn_id)
        if attempt is None:
            if self._is_backing_off(node_id):
                return None
            # One attempt for all waiting callers: cancelling one of them does not end it for the others.
            attempt = asyncio.ensure_future(self._connect_to_broker(conn_id))
            self._attempts[conn_id] = attempt
            attempt.add_done_callback(lambda _: self._attempts.pop(conn_id, None))
        await asyncio.wait([attempt])
        return None if attempt.cancelled() else attempt.result()

    async def _connect_to_broker(self, conn_id: ConnectionId) -> Any:
        node_id = conn_id[0]
        broker = self.cluster.broker_metadata(node_id)
        try:
            if self._is_closed:
                raise BrokerNotAvailable("the client is closed")
            if broker is None:
                raise BrokerNotAvailable(f"broker {node_id} is not in the metadata")
            connection = await self._open_connection_with_backoff(node_id, broker.host, broker.port)
        except PenstockError as e:
            # The newest first, for `connection_error` without a node.
            self._node_errors = {
                node_id: e,
                **{node: why for node, why in self._node_errors.items() if node != node_id},
            }
            # The node may have another address by now.
            if not self._is_closed:
                self.force_metadata_update()
            return None
        self._conns[conn_id] = connection
        self._node_errors.pop(node_id, None)
        return connection

    async def _open_connection_with_backoff(self, node_id: int | str, host: str, port: int) -> Socket:
        settings = self._settings
        failures, _ = self._backoffs.get(node_id, (0, 0))
        # A short first timeout finds another address or broker soon. A broker that needs longer for TLS, as all clients
        # connect again at once, gets more time in each attempt (KIP-601).
        shortest_ms = settings.socket_connection_setup_timeout_ms
        longest_ms = max(shortest_ms, settings.socket_connection_setup_timeout_max_ms)
        timeout_ms = ExponentialBackoff(shortest_ms, longest_ms).wait_ms(failures + 1)
        try:
            connection = await self._open_socket(host, port, timeout_ms, self._on_connection_closed)
        except PenstockError:
            self._back_off(node_id)
            raise
        self._backoffs.pop(node_id, None)
        return connection

    def _back_off(self, node_id: int | str) -> None:
        failures, _ = self._backoffs.get(node_id, (0, 0))
        backoff = ExponentialBackoff(self._settings.reconnect_backoff_ms, self._settings.reconnect_backoff_max_ms)
        wait_ms = backoff.wait_ms(failures + 1) * (1 - RECONNECT_JITTER)
        self._backoffs[node_id] = failures + 1, SYSTEM_CLOCK.monotonic_ms() + wait_ms

    def _is_backing_off(self, node_id: int | str) -> bool:
        return SYSTEM_CLOCK.monotonic_ms() < self._backoffs.get(node_id, (0, 0))[1]

    def connection_error(self, node_id: int | None, where: str) -> PenstockError:
        """Return the error of the last failed attempt to connect to `node_id`, or to any node if `node_id` is None.

        Returns BrokerNotAvailable if there is none. A successful attempt drops the error of its node.
        """
        why = self._node_errors.get(node_id) if node_id is not None else next(iter(self._node_errors.values()), None)
        if why is None:
            return BrokerNotAvailable(f"{where}: not connected")
        return type(why)(f"{where}: {why}")

    def authentication_error(self) -> PenstockError | None:
        """Return the AuthenticationFailed of a known broker that has rejected this client. Returns None if there is
        none."""
        known = {broker.nodeId for broker in self.cluster.brokers()}
        errors = (why for node, why in self._node_errors.items() if node in known)
        return next((why for why in errors if isinstance(why, AuthenticationFailed)), None)

    async def _open_socket(
        self, host: str, port: int, timeout_ms: float, on_close: Callable[..., None] | None = None
    ) -> Socket:
        where = f"{host}:{port}"
        more = {"max_idle_ms": self._settings.connections_max_idle_ms, "on_close": on_close}
        connection = Socket(host, port, addresses=self._addresses, **self._socket_options, **more)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await connection.connect()
        # Raised by the token provider.
        except PenstockError as e:
            raise type(e)(f"{where}: {e}") from e.__cause__
        except (kafka.KafkaError, OSError, ValueError, KeyError, AssertionError) as e:
            raise self._connection_error(e, where, timeout_ms) from e
        return connection

    def _connection_error(self, error: BaseException, where: str, timeout_ms: float) -> PenstockError:
        """Return the error for a connection that could not be set up, or was closed at its first request."""
        # 1. TLS: a certificate or a protocol that the other side rejects. A retry does not help.
        for cause in _exception_causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return AuthenticationFailed(
                    f"{where}: the broker's certificate cannot be verified: {cause.verify_message}"
                )
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, TRANSPORT_ENDED):
                reason = getattr(cause, "reason", None) or str(cause)
                hint = ", see kafka.ssl_certfile" if "CERTIFICATE" in reason else ""
                return AuthenticationFailed(f"{where}: TLS: {reason}{hint}")
        # 2. Nothing answered in time.
        if isinstance(error, TimeoutError):
            return BrokerNotAvailable(f"{where}: no response after {timeout_ms:.0f} ms")
        # 3. aiokafka's SASL code parses what the broker sends, and raises these for a wrong nonce or signature.
        if isinstance(error, ValueError | KeyError | AssertionError):
            mechanism = self._settings.sasl_mechanism
            return AuthenticationFailed(f"{where}: invalid {mechanism} response of the broker: {error}")
        # 4. The broker closed the connection: a broker does so, without a response, if the client speaks another
        #    security protocol than the listener.
        if isinstance(error, kafka.KafkaConnectionError) and isinstance(error.__cause__, OSError):
            error = error.__cause__
        if isinstance(error, kafka.KafkaConnectionError | ConnectionResetError | BrokenPipeError | ssl.SSLError):
            protocol = self._settings.security_protocol
            return BrokerNotAvailable(
                f"{where}: the broker closed the connection; is this a listener for kafka.security_protocol={protocol}?"
            )
        return translate(error, where)

    def force_metadata_update(self) -> asyncio.Future[bool]:
        """Request new metadata. The future is done when the request is answered or has failed, or at the close."""
        if self._is_closed:
            closed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            closed.set_result(False)
            return closed
        # aiokafka does not do so during a regular update: if that must be repeated, it would wait for the next one.
        if not self._md_update_waiter.done():
            self._md_update_waiter.set_result(None)
        update: asyncio.Future[bool] = super().force_metadata_update()
        return update

    async def close(self) -> None:
        """Close every socket, cancel the attempts to connect, and end the pending metadata update.

        A socket first sends what was written to it. This ends after CLOSE_TIMEOUT_MS, since the broker may not read.
        """
        self._is_closed = True
        attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        closing = asyncio.ensure_future(super().close())
        try:
            await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_MS / 1000)
            for connection in self._conns.values():
                connection.abort_close()
            await closing
        finally:
            # aiokafka leaves it pending for ever.
            if self._md_update_fut is not None and not self._md_update_fut.done():
                self._md_update_fut.set_result(False)


for _name in ("aiokafka", "aiokafka.cluster", "aiokafka.conn"):
    logging.getLogger(_name).addFilter(OfOthers(Socket, SocketClient))


def _exception_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class Frames(asyncio.BufferedProtocol):
    """Kafka's frames: four bytes of length, then the response."""

    def __init__(self, connection: Any, below: Any) -> None:
        self._connection = connection
        self._below = below
        self._size = bytearray(SIZE_BYTES)
        self._frame: bytearray | None = None
        self._view = memoryview(self._size)
        self._at = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at < len(self._view):
            return
        frame = self._frame
        self._at = 0
        # The buffer that is full held the length: read the response into a buffer of that length.
        if frame is None:
            size = int.from_bytes(self._size, "big", signed=True)
            if not SIZE_BYTES <= size <= FRAME_BYTES_MAX:
                self._connection.close(exc=kafka.KafkaConnectionError(f"a response of {size} bytes"))
                return
            self._frame = bytearray(size)
            self._view = memoryview(self._frame)
            return
        self._frame = None
        self._view = memoryview(self._size)
        # A response that cannot be matched or decoded ends the connection, as in aiokafka: nothing after it can be
        # trusted.
        try:
            self._handle_response_frame(frame)
        except Exception as e:
            self._connection.close(exc=e)

    def _handle_response_frame(self, frame: bytearray) -> None:
        connection = self._connection
        correlation_id, request, future = connection._requests[0]
        decode = getattr(getattr(request, "RESPONSE_TYPE", None), "decode_frame", None)
        if decode is None or int.from_bytes(frame[:SIZE_BYTES], "big", signed=True) != correlation_id:
            connection._handle_frame(bytes(frame))
            return
        # The caller may have been cancelled, or its timeout have passed.
        if not future.done():
            future.set_result(decode(frame))
        connection._last_action = time.monotonic()
        connection._requests.popleft()

    # The original protocol handles the rest.

    def eof_received(self) -> bool | None:
        response: bool | None = self._below.eof_received()
        return response

    def connection_lost(self, exc: Exception | None) -> None:
        self._below.connection_lost(exc)

    def pause_writing(self) -> None:
        self._below.pause_writing()

    def resume_writing(self) -> None:
        self._below.resume_writing()


def read_in_place(connection: Any) -> None:
    """Make a connection read each response directly into a buffer of the response's size (`Frames`).

    Does nothing if it reads so already, if it is closed, if a request is open, or if bytes are unread.
    """
    # The broker may close a new connection before the caller resumes.
    if connection._writer is None or isinstance(connection._writer.transport.get_protocol(), Frames):
        return
    # The new protocol would not see bytes that are in the stream already, and would read a response from its middle.
    if connection._requests or connection._reader._buffer:
        return
    connection._writer.transport.set_protocol(Frames(connection, connection._protocol))
