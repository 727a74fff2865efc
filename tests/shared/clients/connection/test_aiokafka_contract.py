"""What is used of aiokafka beyond its documentation: this fails when a release changes it."""

from __future__ import annotations

import inspect
from typing import Any

import aiokafka
import pytest
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, OAuthAuthenticator
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.legacy_records import LegacyRecordBatch, LegacyRecordBatchBuilder

SIGNATURES: list[tuple[Any, list[str]]] = [
    (AIOKafkaClient.send, ["self", "node_id", "request", "group"]),
    (AIOKafkaClient.ready, ["self", "node_id", "group"]),
    (AIOKafkaClient.coordinator_lookup, ["self", "coordinator_type", "coordinator_key"]),
    (AIOKafkaClient.force_metadata_update, ["self"]),
    (AIOKafkaClient.get_random_node, ["self"]),
    (AIOKafkaClient.add_topic, ["self", "topic"]),
    (AIOKafkaClient.set_topics, ["self", "topics"]),
    (ClusterMetadata.add_listener, ["self", "listener"]),
    (ClusterMetadata.topics, ["self", "exclude_internal_topics"]),
    (AIOKafkaClient.bootstrap, ["self"]),
    (AIOKafkaClient._get_conn, ["self", "node_id", "group", "no_hint"]),
    (AIOKafkaClient._on_connection_closed, ["self", "conn", "reason"]),
    (AIOKafkaClient._md_synchronizer, ["self"]),
    (AIOKafkaConnection.authenticator_oauth, ["self"]),
    (OAuthAuthenticator.__init__, ["self", "sasl_oauth_token_provider"]),
    (OAuthAuthenticator.step, ["self", "payload"]),
    (ClusterMetadata.update_metadata, ["self", "metadata"]),
    (ClusterMetadata.leader_for_partition, ["self", "partition"]),
    (ClusterMetadata.partitions_for_topic, ["self", "topic"]),
    (ClusterMetadata.available_partitions_for_topic, ["self", "topic"]),
    (ProduceRequest.__init__, ["self", "transactional_id", "required_acks", "timeout", "topics"]),
]


def test_the_version_is_the_one_that_was_read() -> None:
    """The parts below were checked against 0.14; another version is to be read before it is used."""
    assert aiokafka.__version__.split(".")[:2] == ["0", "14"]


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES, ids=lambda f: getattr(f, "__qualname__", ""))
def test_signatures(function: Any, parameters: list[str]) -> None:
    """Every function that is called takes the parameters it is called with."""
    assert list(inspect.signature(function).parameters) == parameters


def test_options_of_a_connection() -> None:
    """A connection can be made with what `aiokafka_options` gives, and an idle limit."""
    wanted = {"client_id", "request_timeout_ms", "security_protocol", "ssl_context", "max_idle_ms", "on_close"}
    wanted |= {"sasl_mechanism", "sasl_plain_username", "sasl_plain_password", "sasl_oauth_token_provider"}
    assert wanted <= set(inspect.signature(AIOKafkaConnection).parameters)


def test_every_connection_goes_through_what_is_overridden() -> None:
    """Sockets are made in `bootstrap` and `_get_conn` alone, and a request is logged as its last argument."""
    client = inspect.getsource(AIOKafkaClient)
    assert client.count("create_conn(") == 2
    for method in (AIOKafkaClient.bootstrap, AIOKafkaClient._get_conn):
        assert "create_conn(" in inspect.getsource(method)
    assert "self.authenticator_oauth()" in inspect.getsource(AIOKafkaConnection._do_sasl_handshake)
    logged = inspect.getsource(AIOKafkaConnection.send) + inspect.getsource(AIOKafkaConnection._handle_frame)
    assert "            request_struct,\n        )" in logged
    assert AIOKafkaConnection.send.__globals__["log"].name == "aiokafka.conn"


def test_a_request_is_asked_to_prepare_itself() -> None:
    """A connection calls `prepare` with the broker's versions and nothing else of a request."""
    source = inspect.getsource(AIOKafkaConnection.send)
    assert "request.prepare(self._versions)" in source
    assert source.count("request.") == 1


async def test_attributes_of_a_client() -> None:
    """The client's metadata and its tracked topics are where they are looked for."""
    client = AIOKafkaClient(bootstrap_servers=["127.0.0.1:1"], client_id="contract")
    assert client._client_id == "contract"
    assert [(host, port) for host, port, _ in client.hosts] == [("127.0.0.1", 1)]
    assert client._topics == set()
    assert (client._conns, client._sync_task) == ({}, None)
    assert client.cluster._partitions == {}
    assert client._conns == {}
    assert client.cluster.unauthorized_topics == set()
    assert (ConnectionGroup.COORDINATION, CoordinationType.GROUP, CoordinationType.TRANSACTION) == (1, 0, 1)


def test_a_connection_notes_when_it_was_answered() -> None:
    """`_last_action` is set in seconds of the monotonic clock when a response has come, and never by a request."""
    assert "self._last_action = time.monotonic()" in inspect.getsource(AIOKafkaConnection._handle_frame)
    assert "_last_action" not in inspect.getsource(AIOKafkaConnection.send)


async def test_requests_that_wait_for_others() -> None:
    """A third group of connections can be had, and a connection's deadline for answers can be set."""
    assert 2 not in list(ConnectionGroup)
    assert "conn_id = (node_id, group)" in inspect.getsource(AIOKafkaClient._get_conn)
    assert "wait_for(fut, self._request_timeout)" in inspect.getsource(AIOKafkaConnection.send)


def test_metadata_is_told() -> None:
    """Every update of the metadata is told to listeners, and no topic means every topic."""
    cluster, told = ClusterMetadata(), []
    cluster.add_listener(told.append)
    assert "for listener in self._listeners" in inspect.getsource(ClusterMetadata.update_metadata)
    assert (cluster.topics(), cluster.unauthorized_topics) == (set(), set())
    assert "list(topics) if topics else None" in inspect.getsource(AIOKafkaClient._metadata_update)


def test_a_batch() -> None:
    """A batch is read out of a memoryview, and tells its checksum, its producer and its records."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1_000)
    assert builder.append(0, 5, b"k", b"v", []) is not None
    batch = DefaultRecordBatch(memoryview(b"...." + bytes(builder.build()))[4:])
    assert (batch.validate_crc(), batch.is_transactional, batch.producer_id) == (True, False, -1)
    (record,) = batch
    assert (record.offset, record.timestamp, record.key, record.value, record.headers) == (0, 5, b"k", b"v", [])


def test_a_legacy_batch() -> None:
    """So is one of the formats before, which knows its magic from whoever reads it."""
    builder = LegacyRecordBatchBuilder(1, 0, 1_000)
    assert builder.append(0, 5, b"k", b"v") is not None
    batch = LegacyRecordBatch(memoryview(bytes(builder.build())), 1)
    assert batch.validate_crc()
    assert [(r.offset, r.timestamp, r.key, r.value) for r in batch] == [(0, 5, b"k", b"v")]


def test_what_reading_in_place_stands_on() -> None:
    """A connection's open requests, its stream and its protocol are where they are looked for."""
    source = inspect.getsource(AIOKafkaConnection)
    for used in (
        "correlation_id, request, fut = self._requests[0]",
        "self._requests.popleft()",
        "self._reader, self._writer, self._protocol = reader, writer, protocol",
        "def close(self, reason=None, exc=None)",
        "def _handle_frame(self, resp)",
    ):
        assert used in source
