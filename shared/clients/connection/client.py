"""One client's connections to a cluster: sockets, metadata, coordinators, and requests with a deadline.

`Connection` wraps `AIOKafkaClient`. What it adds is what the clients promise: a start that ends in
`BrokerNotAvailable` (or `AuthenticationFailed`) with the address within a deadline, errors of ours with the place
they are about, and a default client id that tells instances apart. Secrets are read where the socket is set up and
are in no repr, log line or error.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.conn import create_conn

from shared.clients.connection.errors import translate
from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import (
    AuthenticationFailed,
    BrokerNotAvailable,
    ConfigError,
    CoordinatorNotAvailable,
    KafkaTimeout,
    NotLeaderOrFollower,
    PenstockError,
    RetriableError,
    UnknownTopicOrPartition,
)
from shared.common.records import TopicPartition
from shared.common.settings import KafkaSettings

T = TypeVar("T")

BACKOFF_MAX_MS = 1_000
"""Retries of one call back off exponentially from `retry_backoff_ms` up to this."""

UNKNOWN_TOPIC_GRACE_MS = 1_000
"""A topic that was just created may be unknown to a broker for a moment; after this it is taken to be missing."""

_instances = itertools.count(1)


def default_client_id() -> str:
    """`penstock-<host>-<pid>-<n>`, different for every client of every process."""
    return f"penstock-{socket.gethostname()}-{os.getpid()}-{next(_instances)}"


def ssl_context(kafka_settings: KafkaSettings) -> ssl.SSLContext | None:
    """The TLS context the settings ask for, None without TLS; ConfigError names a file that cannot be used."""
    if not kafka_settings.security_protocol.endswith("SSL"):
        return None
    try:
        context = ssl.create_default_context(cafile=kafka_settings.ssl_cafile)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"kafka.ssl_cafile: {kafka_settings.ssl_cafile}: {e}") from None
    if kafka_settings.ssl_certfile is not None:
        password = kafka_settings.ssl_key_password
        try:
            context.load_cert_chain(
                kafka_settings.ssl_certfile,
                kafka_settings.ssl_keyfile,
                # Without a password OpenSSL would ask for one on the terminal.
                password=password.get_secret_value() if password is not None else "",
            )
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"kafka.ssl_certfile: {kafka_settings.ssl_certfile}: {e}") from None
    return context


def aiokafka_options(kafka_settings: KafkaSettings, client_id: str) -> dict[str, Any]:
    """The connection arguments that aiokafka's classes share."""
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in kafka_settings.bootstrap_servers.split(",")],
        "client_id": client_id,
        "request_timeout_ms": kafka_settings.request_timeout_ms,
        "metadata_max_age_ms": kafka_settings.metadata_max_age_ms,
        "connections_max_idle_ms": kafka_settings.connections_max_idle_ms,
        "retry_backoff_ms": kafka_settings.retry_backoff_ms,
        "security_protocol": kafka_settings.security_protocol,
        "ssl_context": ssl_context(kafka_settings),
    }
    if kafka_settings.security_protocol.startswith("SASL"):
        assert kafka_settings.sasl_password is not None
        options["sasl_mechanism"] = kafka_settings.sasl_mechanism
        options["sasl_plain_username"] = kafka_settings.sasl_username
        options["sasl_plain_password"] = kafka_settings.sasl_password.get_secret_value()
    return options


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Errors of aiokafka and of the socket leave the block as ours, with `where` in front."""
    try:
        yield
    except (kafka.KafkaError, kafka.IllegalOperation, kafka.ConsumerStoppedError, OSError) as e:
        raise translate(e, where) from e


async def bootstrap(client: Any, kafka_settings: KafkaSettings) -> None:
    """Fetch the first metadata, trying again until `request_timeout_ms` has passed.

    Raises BrokerNotAvailable with the addresses, AuthenticationFailed as soon as a broker refuses the credentials.
    """
    deadline = SYSTEM_CLOCK.monotonic_ms() + kafka_settings.request_timeout_ms
    backoff_ms = kafka_settings.reconnect_backoff_ms
    reason = "no answer"
    where = f"kafka.bootstrap_servers={kafka_settings.bootstrap_servers}"
    while (left_ms := deadline - SYSTEM_CLOCK.monotonic_ms()) > 0:
        try:
            async with asyncio.timeout(left_ms / 1000):
                try:
                    await client.bootstrap()
                    return
                except kafka.KafkaError:
                    reason = await _why_not(client, kafka_settings) or reason
                await asyncio.sleep(min(backoff_ms, BACKOFF_MAX_MS) / 1000)
        except TimeoutError:
            break
        backoff_ms *= 2
    raise BrokerNotAvailable(f"{where}: no broker reached within {kafka_settings.request_timeout_ms} ms: {reason}")


async def _why_not(client: Any, kafka_settings: KafkaSettings) -> str | None:
    """aiokafka logs why a bootstrap connection failed and raises without it; one more try keeps the reason."""
    reason = None
    options = aiokafka_options(kafka_settings, client._client_id)
    for unknown in ("bootstrap_servers", "metadata_max_age_ms", "retry_backoff_ms", "connections_max_idle_ms"):
        del options[unknown]
    for host, port, _ in client.hosts:
        try:
            connection = await create_conn(host, port, **options)
        except (kafka.AuthenticationFailedError, kafka.AuthenticationMethodNotSupported) as e:
            raise AuthenticationFailed(f"{host}:{port}: {e}") from None
        except kafka.BrokerResponseError as e:
            ours = translate(e, f"{host}:{port}")
            if isinstance(ours, AuthenticationFailed):
                raise ours from None
            reason = str(ours)
        except (kafka.KafkaError, OSError) as e:
            reason = f"{host}:{port}: {e or type(e).__name__}"
        else:
            connection.close()
    return reason


class Connection:
    """The sockets and the metadata of one client."""

    def __init__(self, kafka_settings: KafkaSettings) -> None:
        self.settings = kafka_settings
        self.client_id = kafka_settings.client_id or default_client_id()
        self._client: Any = None
        self._coordinators: dict[tuple[str, str], int] = {}
        self._answered_ms: float | None = None

    def __repr__(self) -> str:
        state = "closed" if self._client is None else "open"
        return f"<Connection {self.client_id} to {self.settings.bootstrap_servers}, {state}>"

    async def open(self) -> None:
        """Connect; see `bootstrap` for the errors."""
        client = AIOKafkaClient(**aiokafka_options(self.settings, self.client_id))
        try:
            await bootstrap(client, self.settings)
        except BaseException:
            await client.close()
            raise
        self._client = client

    def adopt(self, client: Any) -> None:
        """Use the connections of an aiokafka object that is already open."""
        self._client = client

    async def close(self) -> None:
        """Close the sockets; requests in flight end in BrokerNotAvailable."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def silent_ms(self) -> float | None:
        """How long no broker has answered any request of this client, since the first time this was asked.

        None while there is no connection. Sockets that were closed in between no longer count.
        """
        if self._client is None:
            return None
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        # aiokafka notes the time of every response for its idle check, in seconds of the same clock.
        answered = [connection._last_action * 1000 for connection in self._client._conns.values()]
        known = [] if self._answered_ms is None else [self._answered_ms]
        self._answered_ms = max([*answered, *known], default=now_ms)
        return max(0.0, now_ms - self._answered_ms)

    @property
    def cluster(self) -> Any:
        return self._client.cluster

    def nodes(self) -> list[int]:
        """The node ids of the known brokers."""
        return [broker.nodeId for broker in self.cluster.brokers()]

    def any_node(self) -> int:
        """Some broker's node id."""
        node = self._client.get_random_node()
        if node is None:
            raise BrokerNotAvailable(f"{self.settings.bootstrap_servers}: no broker known")
        return int(node)

    def partitions(self, topic: str) -> list[int] | None:
        """The partitions of a topic, ascending; None while the topic is unknown."""
        known = self.cluster.partitions_for_topic(topic)
        return sorted(known) if known else None

    def available_partitions(self, topic: str) -> list[int]:
        """The partitions of a topic that have a leader, ascending."""
        return sorted(self.cluster.available_partitions_for_topic(topic) or ())

    def metadata_snapshot(self) -> object:
        """An object that is another one after every update of the metadata."""
        return self._client.cluster._partitions

    def leader(self, tp: TopicPartition) -> int | None:
        """The node that leads a partition, None while there is none."""
        node = self.cluster.leader_for_partition(tp)
        return None if node is None or node == -1 else int(node)

    def refresh_metadata(self) -> Awaitable[bool]:
        """Ask for fresh metadata; the future ends when the attempt is over."""
        update: Awaitable[bool] = self._client.force_metadata_update()
        return update

    def watch(self, topic: str) -> None:
        """Keep a topic's metadata up to date from now on."""
        self._client.add_topic(topic)

    async def wait_for_topic(self, topic: str, timeout_ms: float) -> list[int]:
        """The topic's partitions, as soon as they are known.

        Raises UnknownTopicOrPartition naming the topic once `timeout_ms` has passed.
        """
        if (known := self.partitions(topic)) is not None:
            return known
        self.watch(topic)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while True:
                    await self.refresh_metadata()
                    if (known := self.partitions(topic)) is not None:
                        return known
                    if topic in self.cluster.unauthorized_topics:
                        raise translate(kafka.TopicAuthorizationFailedError(), f"topic {topic}")
                    await asyncio.sleep(self.settings.retry_backoff_ms / 1000)
        except TimeoutError:
            self._client._topics.discard(topic)  # or every later metadata request would ask for it
            raise UnknownTopicOrPartition(
                f"topic {topic}: not known to the cluster after {timeout_ms:.0f} ms"
            ) from None

    async def send(self, node: int, request: Any, where: str, *, coordination: bool = False) -> Any:
        """Send one request to a node and give its response, within `request_timeout_ms`.

        `coordination` uses the socket that long-waiting group requests do not share with data.
        """
        group = ConnectionGroup.COORDINATION if coordination else ConnectionGroup.DEFAULT
        if self._client is None:
            raise BrokerNotAvailable(f"{where}: the connection is closed")
        with translated(where):
            return await self._client.send(node, request, group=group)

    async def coordinator(self, kind: Literal["group", "transaction"], key: str) -> int:
        """The node that coordinates a group or a transactional id."""
        if (known := self._coordinators.get((kind, key))) is not None:
            return known
        where = f"{kind} {key}"
        with translated(where):
            coordination_type = CoordinationType.GROUP if kind == "group" else CoordinationType.TRANSACTION
            node = int(await self._client.coordinator_lookup(coordination_type, key))
            if not await self._client.ready(node, group=ConnectionGroup.COORDINATION):
                raise CoordinatorNotAvailable(f"{where}: coordinator {node} cannot be reached")
        self._coordinators[kind, key] = node
        return node

    def forget_coordinator(self, kind: Literal["group", "transaction"], key: str) -> None:
        """Look the coordinator up again next time."""
        self._coordinators.pop((kind, key), None)

    async def ask_coordinator(self, kind: Literal["group", "transaction"], key: str, request: Any, where: str) -> Any:
        """Send a request to a coordinator; where it cannot be reached, it is looked up again next time."""
        node = await self.coordinator(kind, key)
        try:
            return await self.send(node, request, where, coordination=True)
        except (BrokerNotAvailable, KafkaTimeout):
            self.forget_coordinator(kind, key)
            raise

    async def retrying(self, call: Callable[[], Awaitable[T]], where: str, timeout_ms: float) -> T:
        """`call` until it succeeds, fails for good, or the deadline passes (KafkaTimeout with the last reason)."""
        backoff_ms = float(self.settings.retry_backoff_ms)
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
                        if isinstance(e, UnknownTopicOrPartition) and waited_ms > UNKNOWN_TOPIC_GRACE_MS:
                            raise
                        if isinstance(e, NotLeaderOrFollower | UnknownTopicOrPartition | BrokerNotAvailable):
                            await self.refresh_metadata()
                    await asyncio.sleep(backoff_ms / 1000)
                    backoff_ms = min(backoff_ms * 2, BACKOFF_MAX_MS)
        except TimeoutError:
            if isinstance(last, UnknownTopicOrPartition):
                raise last from None
            raise KafkaTimeout(f"{where}: not done after {timeout_ms:.0f} ms" + (f": {last}" if last else "")) from last
