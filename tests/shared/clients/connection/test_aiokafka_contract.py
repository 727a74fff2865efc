"""The undocumented parts of aiokafka that the clients use. These tests fail if a release changes them."""

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
    (AIOKafkaClient.set_topics, ["self", "topics"]),
    (ClusterMetadata.add_listener, ["self", "listener"]),
    (ClusterMetadata.topics, ["self", "exclude_internal_topics"]),
    (AIOKafkaClient.bootstrap, ["self"]),
    (AIOKafkaClient._get_conn, ["self", "node_id", "group", "no_hint"]),
    (AIOKafkaClient._on_connection_closed, ["self", "conn", "reason"]),
    (AIOKafkaClient._md_synchronizer, ["self"]),
    (AIOKafkaClient._metadata_update, ["self", "cluster_metadata", "topics"]),
    (AIOKafkaConnection.authenticator_oauth, ["self"]),
    (OAuthAuthenticator.__init__, ["self", "sasl_oauth_token_provider"]),
    (OAuthAuthenticator.step, ["self", "payload"]),
    (ClusterMetadata.update_metadata, ["self", "metadata"]),
    (ClusterMetadata.leader_for_partition, ["self", "partition"]),
    (ClusterMetadata.partitions_for_topic, ["self", "topic"]),
    (ClusterMetadata.available_partitions_for_topic, ["self", "topic"]),
    (ProduceRequest.__init__, ["self", "transactional_id", "required_acks", "timeout", "topics"]),
]


def test_the_checked_version_of_aiokafka_is_installed() -> None:
    """The parts below were checked against aiokafka 0.14. Another version must be reviewed before it is used."""
    assert aiokafka.__version__.split(".")[:2] == ["0", "14"]


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES, ids=lambda f: getattr(f, "__qualname__", ""))
def test_signatures(function: Any, parameters: list[str]) -> None:
    """Every function that the clients call accepts the parameters they pass."""
    assert list(inspect.signature(function).parameters) == parameters


def test_options_of_a_connection() -> None:
    """A connection accepts the options from `aiokafka_options` and an idle limit."""
    wanted = {"client_id", "request_timeout_ms", "security_protocol", "ssl_context", "max_idle_ms", "on_close"}
    wanted |= {"sasl_mechanism", "sasl_plain_username", "sasl_plain_password", "sasl_oauth_token_provider"}
    assert wanted <= set(inspect.signature(AIOKafkaConnection).parameters)


def test_sockets_are_created_only_in_overridden_methods() -> None:
    """Sockets are created only in `bootstrap` and `_get_conn`. A request is logged as the last argument."""
    client = inspect.getsource(AIOKafkaClient)
    assert client.count("create_conn(") == 2
    for method in (AIOKafkaClient.bootstrap, AIOKafkaClient._get_conn):
        assert "create_conn(" in inspect.getsource(method)
    assert "self.authenticator_oauth()" in inspect.getsource(AIOKafkaConnection._do_sasl_handshake)
    logged = inspect.getsource(AIOKafkaConnection.send) + inspect.getsource(AIOKafkaConnection._handle_frame)
    assert "            request_struct,\n        )" in logged
    assert AIOKafkaConnection.send.__globals__["log"].name == "aiokafka.conn"


def test_a_connection_calls_only_prepare_of_a_request() -> None:
    """A connection calls only `prepare` of a request, with the broker's versions."""
    source = inspect.getsource(AIOKafkaConnection.send)
    assert "request.prepare(self._versions)" in source
    assert source.count("request.") == 1


async def test_attributes_of_a_client() -> None:
    """The client has its metadata and its tracked topics in the expected attributes."""
    client = AIOKafkaClient(bootstrap_servers=["127.0.0.1:1"], client_id="contract")
    assert client._client_id == "contract"
    assert [(host, port) for host, port, _ in client.hosts] == [("127.0.0.1", 1)]
    assert client._topics == set()
    assert (client._conns, client._sync_task, client._md_update_fut) == ({}, None, None)
    assert client.cluster._partitions == {}
    assert client._conns == {}
    assert client.cluster.unauthorized_topics == set()
    assert (ConnectionGroup.COORDINATION, CoordinationType.GROUP, CoordinationType.TRANSACTION) == (1, 0, 1)


def test_a_connection_notes_when_it_was_answered() -> None:
    """A response sets `_last_action`, in seconds of the monotonic clock. A request does not change it."""
    assert "self._last_action = time.monotonic()" in inspect.getsource(AIOKafkaConnection._handle_frame)
    assert "_last_action" not in inspect.getsource(AIOKafkaConnection.send)


async def test_requests_that_wait_for_others() -> None:
    """A third group of connections is available, and the request timeout of a connection can be set."""
    assert 2 not in list(ConnectionGroup)
    assert "conn_id = (node_id, group)" in inspect.getsource(AIOKafkaClient._get_conn)
    assert "wait_for(fut, self._request_timeout)" in inspect.getsource(AIOKafkaConnection.send)


def test_metadata_updates_reach_listeners() -> None:
    """Every metadata update is passed to listeners."""
    cluster, notified = ClusterMetadata(), []
    cluster.add_listener(notified.append)
    assert "for listener in self._listeners" in inspect.getsource(ClusterMetadata.update_metadata)
    assert (cluster.topics(), cluster.unauthorized_topics) == (set(), set())


def test_a_batch() -> None:
    """A batch is decoded from a memoryview, with its checksum, producer id and records."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1_000)
    assert builder.append(0, 5, b"k", b"v", []) is not None
    batch = DefaultRecordBatch(memoryview(b"...." + bytes(builder.build()))[4:])
    assert (batch.validate_crc(), batch.is_transactional, batch.producer_id) == (True, False, -1)
    (record,) = batch
    assert (record.offset, record.timestamp, record.key, record.value, record.headers) == (0, 5, b"k", b"v", [])


def test_a_legacy_batch() -> None:
    """A batch of a legacy format is decoded from a memoryview if its magic is given."""
    builder = LegacyRecordBatchBuilder(1, 0, 1_000)
    assert builder.append(0, 5, b"k", b"v") is not None
    batch = LegacyRecordBatch(memoryview(bytes(builder.build())), 1)
    assert batch.validate_crc()
    assert [(r.offset, r.timestamp, r.key, r.value) for r in batch] == [(0, 5, b"k", b"v")]


def test_attributes_for_in_place_decoding_exist() -> None:
    """A connection has its open requests, stream and protocol in the expected attributes."""
    source = inspect.getsource(AIOKafkaConnection)
    for used in (
        "correlation_id, request, fut = self._requests[0]",
        "self._requests.popleft()",
        "self._reader, self._writer, self._protocol = reader, writer, protocol",
        "def close(self, reason=None, exc=None)",
        "def _handle_frame(self, resp)",
    ):
        assert used in source
