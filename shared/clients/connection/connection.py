"""One client's connections to a cluster: sockets, metadata, coordinators, and requests with a deadline.

`Connection` wraps `AIOKafkaClient` and adds these guarantees. If a start reaches no broker or is rejected, it raises
BrokerNotAvailable or AuthenticationFailed with the address, within its deadline. Errors are Penstock's classes, and
name the resource. Each instance has a default client id of its own. No repr, log line or error contains a secret.

A client belongs to the process and to the event loop in which it was started. In another loop, its calls would wait for
ever. After a fork, both processes would write to the same sockets, and a broker would take the records of one for
retries of the other's. So no request is sent there, and the clients call `check_loop`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from asyncio import _get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeVar
from weakref import WeakSet

from aiokafka import errors as kafka
from aiokafka.client import ConnectionGroup, CoordinationType
from aiokafka.conn import CloseReason
from aiokafka.structs import BrokerMetadata

from penstock.shared.clients.connection.security import aiokafka_options
from penstock.shared.clients.connection.sockets import SocketClient, read_in_place
from penstock.shared.clients.protocol.errors import translate, translating_errors
from penstock.shared.clients.protocol.fetch import FetchRequest, FetchResponse
from penstock.shared.clients.protocol.flexible_types import Endpoint
from penstock.shared.common.backoff import RETRY_BACKOFF_MAX_MS, ExponentialBackoff
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    AuthenticationFailed,
    BrokerNotAvailable,
    ConcurrentTransactions,
    CoordinatorNotAvailable,
    IllegalState,
    InvalidRequest,
    KafkaTimeout,
    NotLeaderOrFollower,
    PenstockError,
    RetriableError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.repeated_failure import RepeatedFailure
from penstock.shared.common.settings import KafkaSettings

log = get_logger(__name__)

T = TypeVar("T")

UNKNOWN_TOPIC_GRACE_MS = 1_000
"""A broker may not know a new topic for a moment. After this time the topic is taken to be missing."""

SOON_MS = 5
SOON_MAX_MS = 20
"""SOON_MS is the first and SOON_MAX_MS the longest wait between attempts while the last transaction is being completed.
Java's producer waits for 20 ms (`TransactionManager.ADD_PARTITIONS_RETRY_BACKOFF_MS`)."""
UNREACHED_LOG_MS = 2_000
"""A start that has reached no broker after this time logs a warning. A normal start takes a fraction of it."""

WAITING = 2
"""The connection group, besides aiokafka's two, for requests that the broker holds until other members act."""

KEY_BYTES_MAX = 32_767
"""The longest group id or transactional id in bytes: Kafka's protocol has 16 bits for its length."""
KEY_SHOWN_MAX = 250
"""The most characters of an invalid id in the error."""

_instances = itertools.count(1)
_unreached: dict[str, RepeatedFailure] = {}
"""The bootstrap servers that no client of this process has reached since the last success, with their failures."""
_started: WeakSet[Connection] = WeakSet()
"""The connections of this process, or, in a forked process, also those of its parent."""
_OF_PARENT: Any = object()
"""Stands for the event loop of a client that was started before a fork: no loop of this process is that one."""


def _leave_to_parent() -> None:
    for connection in list(_started):
        connection.after_fork()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _default_client_id() -> str:
    """Return `penstock-<host>-<pid>-<n>`, different for every client of every process."""
    return f"penstock-{socket.gethostname()}-{os.getpid()}-{next(_instances)}"


def retry_waits(retry_backoff_ms: float, *, soon: bool = False) -> Callable[[RetriableError], float]:
    """Return a function that maps each error of one call to the ms to wait before the retry (`Connection.retrying`).

    `soon` is for a call that opens a transaction. Its waits after ConcurrentTransactions are short, since the
    coordinator is then completing the last transaction.

    >>> wait_after = retry_waits(100, soon=True)
    >>> [wait_after(error("t")) for error in (ConcurrentTransactions, BrokerNotAvailable, ConcurrentTransactions)]
    [5.0, 100.0, 10.0]
    """
    backoff = ExponentialBackoff(retry_backoff_ms, RETRY_BACKOFF_MAX_MS)
    # The coordinator answers EndTxn before it has written all markers. It answers the next transaction's first request
    # with CONCURRENT_TRANSACTIONS until it is done, mostly within a few milliseconds (KAFKA-5482).
    completing = ExponentialBackoff(min(SOON_MS, retry_backoff_ms), min(SOON_MAX_MS, retry_backoff_ms))
    failures: Counter[ExponentialBackoff] = Counter()

    def wait_after(error: RetriableError) -> float:
        which = completing if soon and isinstance(error, ConcurrentTransactions) else backoff
        failures[which] += 1
        return which.wait_ms(failures[which])

    return wait_after


def _check_coordinator_key(kind: str, key: str) -> None:
    try:
        if len(key.encode()) <= KEY_BYTES_MAX:
            return
    # JSON may contain a lone surrogate.
    except UnicodeEncodeError:
        pass
    raise InvalidRequest(f"{kind} {repr(key)[:KEY_SHOWN_MAX]}: an id has at most {KEY_BYTES_MAX} bytes of UTF-8")


async def bootstrap(client: SocketClient, kafka_settings: KafkaSettings, log_after_ms: int = UNREACHED_LOG_MS) -> None:
    """Fetch the first metadata, with retries until `request_timeout_ms` has passed.

    If there is no metadata after `log_after_ms`, the addresses and the reason are logged: once for all clients of the
    process that start together and wait for the same servers. Raises BrokerNotAvailable with the addresses. Raises
    AuthenticationFailed as soon as a broker rejects the credentials.
    """
    servers = kafka_settings.bootstrap_servers
    deadline_ms = SYSTEM_CLOCK.monotonic_ms() + kafka_settings.request_timeout_ms
    backoff = ExponentialBackoff(kafka_settings.reconnect_backoff_ms, kafka_settings.reconnect_backoff_max_ms)
    attempts = 0
    reason = ""

    def log_unreached() -> None:
        # Several clients of one process may start together and wait for the same brokers: log once for all.
        if (times := _unreached.setdefault(servers, RepeatedFailure()).failed(SYSTEM_CLOCK.monotonic_ms())) is not None:
            log.warning(
                "no Kafka broker reached yet, trying on",
                bootstrap_servers=servers,
                **times,
                reason=reason or "no response",
                request_timeout_ms=kafka_settings.request_timeout_ms,
            )

    logging = asyncio.get_running_loop().call_later(log_after_ms / 1000, log_unreached)
    try:
        while (left_ms := deadline_ms - SYSTEM_CLOCK.monotonic_ms()) > 0:
            try:
                await client.bootstrap(left_ms)
            except BrokerNotAvailable as e:
                # The error of an attempt that the deadline cut short is less useful than the one before.
                if not reason or SYSTEM_CLOCK.monotonic_ms() < deadline_ms:
                    reason = str(e)
            else:
                _unreached.pop(servers, None)
                return
            attempts += 1
            left_ms = deadline_ms - SYSTEM_CLOCK.monotonic_ms()
            await asyncio.sleep(max(0, min(backoff.wait_ms(attempts), left_ms)) / 1000)
    finally:
        logging.cancel()
    raise BrokerNotAvailable(
        f"bootstrap servers {servers}: no broker reached within {kafka_settings.request_timeout_ms} ms: "
        f"{reason or 'no response'}"
    )


class Connection:
    """The sockets and the metadata of one client."""

    def __init__(self, kafka_settings: KafkaSettings) -> None:
        """Raises ConfigError for a file or a function in the settings that is missing or cannot be used."""
        self.settings = kafka_settings
        self.client_id = kafka_settings.client_id or _default_client_id()
        # Only to find errors now. `open` reads the files again, since certificates may be renewed.
        aiokafka_options(kafka_settings, self.client_id)
        self._client: Any = None
        self._closing: asyncio.Future[None] | None = None
        self._loop: Any = None
        self._on_fork: list[Callable[[], None]] = []
        self._coordinators: dict[tuple[str, str], int] = {}
        self._answered_ms: float | None = None
        self._moved: dict[TopicPartition, int] = {}
        """New leaders that brokers named in their responses (KIP-951), until the next metadata."""
        self._on_metadata: list[Callable[[], None]] = []
        self._waited_for: Counter[str] = Counter()
        """The number of calls that wait for an unknown topic."""

    def __repr__(self) -> str:
        state = "closed" if self._client is None else "open"
        return f"<Connection {self.client_id} to {self.settings.bootstrap_servers}, {state}>"

    async def open(self) -> None:
        """Connect. Raises the errors of `bootstrap`, and ConfigError if a certificate file is invalid by now."""
        client = SocketClient(self.settings, self.client_id)
        try:
            with translating_errors(self.settings.bootstrap_servers, self.client_id):
                await bootstrap(client, self.settings)
        except BaseException:
            await self._close_client(client)
            raise
        self.adopt(client)

    def adopt(self, client: Any) -> None:
        """Use the sockets and the metadata of an existing client. It belongs to the running event loop."""
        self._loop = asyncio.get_running_loop()
        _started.add(self)
        self._client = client
        client.cluster.add_listener(self._on_metadata_update)

    def on_metadata(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every update of the metadata, as long as the connection is open."""
        self._on_metadata.append(listener)

    def check_loop(self) -> None:
        """Raise IllegalState outside of the event loop in which the client was started, and in a forked process."""
        if _get_running_loop() is self._loop or self._loop is None:
            return
        if self.is_of_parent:
            raise IllegalState(f"client {self.client_id}: started before a fork; start a new one in the forked process")
        raise IllegalState(
            f"client {self.client_id}: used outside of the event loop in which it was started; each event loop, and "
            "so each `asyncio.run`, needs a client of its own"
        )

    @property
    def is_of_parent(self) -> bool:
        """Whether the client was started before this process was forked."""
        return self._loop is _OF_PARENT

    def on_fork(self, listener: Callable[[], None]) -> None:
        """Call `listener` in each process that is forked after the connection was first opened, directly after the
        fork."""
        self._on_fork.append(listener)

    def after_fork(self) -> None:
        """Leave the client to the parent process."""
        self._loop = _OF_PARENT
        for listener in self._on_fork:
            listener()

    def _on_metadata_update(self, _: Any) -> None:
        if self._client is None:
            # The update was in flight at `close`.
            return
        self._moved.clear()
        for listener in self._on_metadata:
            listener()

    async def close(self) -> None:
        """Close the sockets. Requests in flight end in BrokerNotAvailable, and pending `refresh_metadata` end.

        If the call is cancelled, the sockets are closed in the background. A second call waits for that.
        """
        # First without a client: a call that runs meanwhile must not open a socket again.
        client = self._client
        self._client = None
        if client is not None:
            await self._close_client(client)
        elif self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close_client(self, client: Any) -> None:
        # A task of its own, which a cancellation of the caller does not reach.
        self._closing = asyncio.ensure_future(client.close())
        await asyncio.shield(self._closing)

    def silent_ms(self) -> float | None:
        """Return the ms since a broker last answered a request of this client.

        Without a response the time counts from the first call of this method. Responses on a socket that was replaced
        since the last call are not known. Returns None while the connection is not open.
        """
        if self._client is None:
            return None
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        # For its idle check aiokafka stores the time of every response, in seconds of the same clock.
        answered = [connection._last_action * 1000 for connection in self._client._conns.values()]
        known = [] if self._answered_ms is None else [self._answered_ms]
        self._answered_ms = max([*answered, *known], default=now_ms)
        return max(0.0, now_ms - self._answered_ms)

    @property
    def _open_client(self) -> Any:
        if self._client is None:
            raise IllegalState(f"client {self.client_id}: not open")
        return self._client

    @property
    def cluster(self) -> Any:
        """aiokafka's metadata of the cluster. Raises IllegalState if the connection is not open."""
        return self._open_client.cluster

    def nodes(self) -> list[int]:
        """Return the node ids of the known brokers."""
        return [broker.nodeId for broker in self.cluster.brokers()]

    def any_node(self) -> int:
        """Return the node id of a broker that is likely to respond soon. Raises BrokerNotAvailable if none is known."""
        servers = self.settings.bootstrap_servers
        with translating_errors(servers, self.client_id):
            node = self._open_client.get_random_node()
            if node is None:
                raise BrokerNotAvailable(f"{servers}: no broker known")
            return int(node)

    async def api_versions(self, node: int) -> dict[int, tuple[int, int]]:
        """Return the lowest and highest version of each API that a broker supports, by the API's key.

        Raises the error of the attempt to connect: BrokerNotAvailable or AuthenticationFailed.
        """
        with translating_errors(f"node {node}", self.client_id):
            client = self._open_client
            if not await client.ready(node):
                raise self.connection_error(node, f"node {node}")
            return dict(client._conns[node, ConnectionGroup.DEFAULT]._versions)

    def partitions(self, topic: str) -> list[int] | None:
        """Return the partitions of a topic, ascending. Returns None while the topic is unknown."""
        known = self.cluster.partitions_for_topic(topic)
        return sorted(known) if known else None

    def available_partitions(self, topic: str) -> list[int]:
        """Return the partitions of a topic that have a leader, ascending."""
        return sorted(self.cluster.available_partitions_for_topic(topic) or ())

    def leader(self, tp: TopicPartition) -> int | None:
        """Return the node that leads a partition. Returns None if no leader is known."""
        if (moved := self._moved.get(tp)) is not None:
            return moved
        node = self.cluster.leader_for_partition(tp)
        return None if node is None or node == -1 else int(node)

    def leader_moved(self, tp: TopicPartition, node: int) -> None:
        """Store a partition's new leader, which a broker named in a response (KIP-951), until the next metadata.

        A node without a known address is ignored. `add_brokers` stores the addresses that a response names.
        """
        if self.cluster.broker_metadata(node) is not None:
            self._moved[tp] = node

    def add_brokers(self, endpoints: Iterable[Endpoint]) -> None:
        """Store the addresses of brokers that a response named (KIP-951) and that are not in the metadata yet."""
        for node, host, port in endpoints:
            if host and self.cluster.broker_metadata(node) is None:
                self.cluster._brokers[node] = BrokerMetadata(node, host, port, None)

    def check_authentication(self) -> None:
        """Raise AuthenticationFailed if a known broker rejected this client at the last attempt to connect to it."""
        if (authentication_error := self._open_client.authentication_error()) is not None:
            raise type(authentication_error)(f"client {self.client_id}: {authentication_error}")

    def connected(self, node: int) -> bool:
        """Whether a request to a node can be written at once."""
        connection = self._open_client._conns.get((node, ConnectionGroup.DEFAULT))
        return connection is not None and bool(connection.connected())

    async def connect(self, node: int) -> bool:
        """Connect to a node if needed. Returns whether it is connected.

        The module `sockets` describes the time limit of an attempt. During the backoff after a failure no attempt is
        made. Raises AuthenticationFailed if the node rejects the credentials.
        """
        with translating_errors(f"node {node}", self.client_id):
            if await self._open_client.ready(node):
                return True
            error = self.connection_error(node, f"node {node}")
            if isinstance(error, AuthenticationFailed):
                raise error
            return False

    def connection_error(self, node: int, where: str) -> PenstockError:
        """Return the error of the last attempt to connect to a node, or BrokerNotAvailable if it left none."""
        error: PenstockError = self._open_client.connection_error(node, where)
        return error

    def refresh_metadata(self) -> asyncio.Future[bool]:
        """Request new metadata, or wait for a request in flight. The future's result is whether that succeeded.

        It is False if the request fails, or if the connection is closed meanwhile.
        """
        update: asyncio.Future[bool] = self._open_client.force_metadata_update()
        return update

    def watch(self, topic: str) -> None:
        """Keep a topic's metadata up to date from now on."""
        client = self._open_client
        if client._topics is not None and topic not in client._topics:
            # A new set: aiokafka then notices that an update in flight does not name the topic, and repeats it.
            client.set_topics({*client._topics, topic})

    def unwatch(self, topic: str) -> bool:
        """Leave a topic out of later metadata requests. Returns whether that was possible.

        Returns False if all topics are watched, or if a call waits for this topic.
        """
        topics = self._open_client._topics
        if topics is None or self._waited_for[topic]:
            return False
        topics.discard(topic)
        return True

    def watch_all(self) -> None:
        """Keep the metadata of every topic up to date from now on."""
        self._open_client._topics = None
        self.refresh_metadata()

    def topics(self) -> frozenset[str]:
        """Return the known topics, without Kafka's internal ones."""
        return frozenset(self.cluster.topics())

    def unauthorized_topics(self) -> frozenset[str]:
        """Return the topics whose metadata the principal may not read."""
        return frozenset(self.cluster.unauthorized_topics)

    async def wait_for_topic(self, topic: str, timeout_ms: float) -> list[int]:
        """Return the topic's partitions as soon as they are known.

        After `timeout_ms`, raises UnknownTopicOrPartition, which names the topic, or BrokerNotAvailable if no broker
        has responded meanwhile. Raises AuthorizationFailed if the principal may not read the topic's metadata, and
        IllegalState if the connection is closed.
        """
        if (known := self.partitions(topic)) is not None:
            return known
        self.watch(topic)
        self._waited_for[topic] += 1
        backoff = ExponentialBackoff(self.settings.retry_backoff_ms, RETRY_BACKOFF_MAX_MS)
        # Without a wait there is no time for a response.
        has_response = timeout_ms <= 0
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                attempts = 0
                while True:
                    has_response |= await self.refresh_metadata()
                    if (known := self.partitions(topic)) is not None:
                        return known
                    if topic in self.cluster.unauthorized_topics:
                        error = translate(kafka.TopicAuthorizationFailedError(), f"topic {topic}")
                        # It concerns this topic alone: a producer can go on with others.
                        error.abortable = True
                        raise error
                    attempts += 1
                    await asyncio.sleep(backoff.wait_ms(attempts) / 1000)
        except TimeoutError:
            # Callers give up a record whose topic does not exist.
            if not has_response:
                raise BrokerNotAvailable(f"topic {topic}: no response of a broker within {timeout_ms:.0f} ms") from None
            raise UnknownTopicOrPartition(
                f"topic {topic}: not known to the cluster after {timeout_ms:.0f} ms"
            ) from None
        finally:
            self._waited_for[topic] -= 1
            # Otherwise the counter would keep every name that was ever waited for, and every later metadata request
            # would include the unknown ones.
            if not self._waited_for[topic]:
                del self._waited_for[topic]
                if self._client is not None and self.partitions(topic) is None:
                    self.unwatch(topic)

    def _client_for(self, where: str) -> Any:
        if self._client is None:
            raise BrokerNotAvailable(f"{where}: the connection is closed")
        self.check_loop()
        return self._client

    async def send(
        self, node: int, request: Any, where: str, *, coordination: bool = False, waits_ms: float | None = None
    ) -> Any:
        """Send one request to a node and return its response.

        The node has `request_timeout_ms` to respond. If a connection must be set up first, that takes additional time
        (see the module `sockets`).

        `coordination` selects the socket for coordination instead of that for data. `waits_ms` replaces the timeout and
        selects a third socket. It is for requests whose response waits for other members, such as JoinGroup.
        """
        group = ConnectionGroup.COORDINATION if coordination else ConnectionGroup.DEFAULT
        with translating_errors(where, self.client_id):
            client = self._client_for(where)
            try:
                # A broker handles one request of a socket at a time: a JoinGroup would hold up the heartbeats behind
                # it. And aiokafka has one timeout for each socket.
                if waits_ms is not None:
                    group = WAITING
                    if not await client.ready(node, group=group):
                        raise kafka.NodeNotReadyError
                    client._conns[node, group]._request_timeout = waits_ms / 1000
                return await client.send(node, request, group=group)
            except kafka.NodeNotReadyError:
                raise client.connection_error(node, where) from None

    async def fetch(self, node: int, request: FetchRequest, where: str) -> FetchResponse:
        """Send a fetch on the socket for data and return the response.

        If possible, the connection reads the response in place (see `read_in_place`).
        """
        with translating_errors(where, self.client_id):
            client = self._client_for(where)
            if await client.ready(node):
                read_in_place(client._conns[node, ConnectionGroup.DEFAULT])
            response: FetchResponse = await client.send(node, request)
            return response

    async def coordinator(self, kind: Literal["group", "transaction"], key: str) -> int:
        """Return the node that coordinates a group or a transactional id.

        Raises InvalidRequest without a request if the key is too long for one, or is not Unicode.
        """
        if (known := self._coordinators.get((kind, key))) is not None:
            return known
        _check_coordinator_key(kind, key)
        where = f"{kind} {key}"
        with translating_errors(where, self.client_id):
            client = self._client_for(where)
            # Raises BrokerNotAvailable if no broker is known, where aiokafka's look-up has an assertion.
            self.any_node()
            coordination_type = CoordinationType.GROUP if kind == "group" else CoordinationType.TRANSACTION
            try:
                node = int(await client.coordinator_lookup(coordination_type, key))
            except kafka.NodeNotReadyError:
                raise client.connection_error(None, where) from None
            # The cluster may still name a coordinator that has just died. This is retriable: it elects another one.
            if not await client.ready(node, group=ConnectionGroup.COORDINATION):
                connection_error: PenstockError = client.connection_error(node, f"{where}: coordinator {node}")
                raise (
                    connection_error
                    if isinstance(connection_error, AuthenticationFailed)
                    else CoordinatorNotAvailable(str(connection_error))
                )
        self._coordinators[kind, key] = node
        return node

    def forget_coordinator(self, kind: Literal["group", "transaction"], key: str) -> None:
        """Forget the coordinator, so that the next request looks it up again."""
        self._coordinators.pop((kind, key), None)

    def disconnect_coordinator(self, kind: Literal["group", "transaction"], key: str) -> None:
        """Forget the coordinator and close the sockets to it, which the network may have dropped silently."""
        node = self._coordinators.pop((kind, key), None)
        if node is None or self._client is None:
            return
        for group in (ConnectionGroup.COORDINATION, WAITING):
            if (connection := self._client._conns.get((node, group))) is not None:
                connection.close(CloseReason.CONNECTION_TIMEOUT)

    async def request_coordinator(
        self,
        kind: Literal["group", "transaction"],
        key: str,
        request: Any,
        where: str,
        *,
        waits_ms: float | None = None,
    ) -> Any:
        """Send a request to a coordinator (see `send`).

        If the coordinator does not answer, the next request looks it up again.
        """
        node = await self.coordinator(kind, key)
        try:
            return await self.send(node, request, where, coordination=True, waits_ms=waits_ms)
        except (BrokerNotAvailable, KafkaTimeout):
            self.forget_coordinator(kind, key)
            raise

    async def retrying(
        self, call: Callable[[], Awaitable[T]], where: str, timeout_ms: float, *, soon: bool = False
    ) -> T:
        """Repeat `call` after retriable errors, until it succeeds or `timeout_ms` have passed. Raises any other error
        at once.

        After `timeout_ms`, raises KafkaTimeout from the last error. UnknownTopicOrPartition itself is raised after
        UNKNOWN_TOPIC_GRACE_MS, or after a shorter `timeout_ms`. `soon` shortens the waits after ConcurrentTransactions
        (`retry_waits`).
        """
        wait_after = retry_waits(self.settings.retry_backoff_ms, soon=soon)
        last: PenstockError | None = None
        started = SYSTEM_CLOCK.monotonic_ms()
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while True:
                    try:
                        return await call()
                    except RetriableError as e:
                        last = e
                        waited_ms = SYSTEM_CLOCK.monotonic_ms() - started
                        # Retriable only while the topic may be new: a missing topic would use up the whole deadline.
                        if isinstance(e, UnknownTopicOrPartition) and waited_ms > UNKNOWN_TOPIC_GRACE_MS:
                            raise
                        # The request may have gone to a broker that no longer leads, or no longer runs.
                        if isinstance(e, NotLeaderOrFollower | UnknownTopicOrPartition | BrokerNotAvailable):
                            await self.refresh_metadata()
                        wait_ms = wait_after(e)
                    await asyncio.sleep(wait_ms / 1000)
        except TimeoutError:
            # With a deadline below the grace, a missing topic is still reported as missing.
            if isinstance(last, UnknownTopicOrPartition):
                raise last from None
            error = KafkaTimeout(f"{where}: not done after {timeout_ms:.0f} ms" + (f": {last}" if last else ""))
            error.add_note(f"client {self.client_id}")
            raise error from last
