"""What is used of aiokafka beyond its documentation: this fails when a release changes it."""

from __future__ import annotations

import inspect
from typing import Any

import aiokafka
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, OAuthAuthenticator
from aiokafka.consumer import fetcher
from aiokafka.consumer.fetcher import Fetcher, FetchError, FetchResult, PartitionRecords
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import Assignment, SubscriptionState, TopicPartitionState
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

SIGNATURES: list[tuple[Any, list[str]]] = [
    (AIOKafkaClient.send, ["self", "node_id", "request", "group"]),
    (AIOKafkaClient.ready, ["self", "node_id", "group"]),
    (AIOKafkaClient.coordinator_lookup, ["self", "coordinator_type", "coordinator_key"]),
    (AIOKafkaClient.force_metadata_update, ["self"]),
    (AIOKafkaClient.get_random_node, ["self"]),
    (AIOKafkaClient.add_topic, ["self", "topic"]),
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
    (Fetcher._notify, ["self", "future"]),
    (Fetcher._create_fetch_waiter, ["self"]),
    (Fetcher.seek_to, ["self", "tp", "offset"]),
    (Fetcher.request_offset_reset, ["self", "tps", "strategy"]),
    (PartitionRecords._consume_aborted_up_to, ["self", "batch_offset"]),
    (PartitionRecords._contains_abort_marker, ["self", "next_batch"]),
    (GroupCoordinator.check_errors, ["self"]),
    (GroupCoordinator.request_rejoin, ["self"]),
    (GroupCoordinator._do_fetch_commit_offsets, ["self", "partitions"]),
    (SubscriptionState.is_assigned, ["self", "tp"]),
    (SubscriptionState.partitions_auto_assigned, ["self"]),
    (Assignment.state_value, ["self", "tp"]),
    (TopicPartitionState.consumed_to, ["self", "position"]),
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


async def test_attributes_of_a_consumer() -> None:
    """The consumer's client, subscription, coordinator and fetcher are where they are looked for."""
    consumer = AIOKafkaConsumer(group_id=None)
    subscription = consumer._subscription
    subscription.assign_from_user([TopicPartition("t", 0)])
    state = subscription.subscription.assignment.state_value(TopicPartition("t", 0))
    assert (state.has_valid_position, state.paused, state.highwater, state.lso) == (False, False, None, None)
    assert subscription._subscription_type.value != 1
    assert SubscriptionState()._subscription_type.value == 1
    assert (subscription._fetch_count, subscription.reassignment_in_progress) == (0, False)
    assert subscription._last_fetch_ended > 0
    assert subscription.fetcher_idle_time >= 0
    assert (consumer._coordinator, consumer._fetcher) == (None, None)
    assert isinstance(consumer._client, AIOKafkaClient)
    source = inspect.getsource(Fetcher.__init__)
    for attribute in ("_records", "_fetch_waiters", "_wait_consume_future", "_fetch_task", "_pending_tasks"):
        assert f"self.{attribute} = " in source
    source = inspect.getsource(GroupCoordinator.__init__)
    assert "self.generation = " in source
    assert "self.member_id = " in source
    consumer._closed = True


def test_a_fetched_piece() -> None:
    """A fetch result holds its assignment and its records, these what is decoded; an error holds its error."""
    tp = TopicPartition("t", 0)
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1_000)
    assert builder.append(0, 5, b"k", b"v", []) is not None
    records = PartitionRecords(
        tp, MemoryRecords(bytes(builder.build())), None, 0, None, None, True, fetcher.READ_COMMITTED
    )
    result = FetchResult(tp, assignment="assignment", partition_records=records, backoff=0)
    assert result._assignment == "assignment"
    assert result._partition_records is records
    assert (records.next_fetch_offset, records._isolation_level, records._aborted_producers) == (
        0,
        fetcher.READ_COMMITTED,
        set(),
    )
    batch = records._records.next_batch()
    assert (batch.validate_crc(), batch.is_control_batch, batch.is_transactional, batch.next_offset) == (
        True,
        False,
        False,
        1,
    )
    (record,) = batch
    assert (record.offset, record.timestamp, record.key, record.value, record.headers) == (0, 5, b"k", b"v", [])
    error = ValueError()
    assert FetchError(error=error, backoff=0)._error is error
