"""The fake cluster as a test uses it, through clients; and its leaders, coordinators and topics."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import AuthenticationFailed
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Action, Api, Drop, ErrorCode, Fail, FakeCluster, Message, Request
from penstock.shared.testing.fake_broker.api_handlers import HANDLERS
from penstock.shared.testing.fake_broker.cluster_state import ClusterState, Node
from penstock.shared.testing.fake_broker.handler_responses import DelayedResponse
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS
from tests.shared.testing.fake_broker.test_faults import PATIENCE_S, connected
from tests.shared.testing.fake_broker.test_partition_logs import built


def settings(cluster: FakeCluster, **more: object) -> KafkaSettings:
    quick = {"request_timeout_ms": 2_000, "retry_backoff_ms": 5, "reconnect_backoff_ms": 5}
    return KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, **{**quick, **more})


async def test_clients_can_administrate_the_cluster() -> None:
    """Topics that a client creates are the cluster's, and vice versa."""
    async with FakeCluster(3) as cluster, Admin(settings(cluster)) as admin:
        cluster.create_topic("mine", 2, configs={"retention.ms": "-1"})
        await admin.create_topics([NewTopic("theirs", 3, 2)])
        assert await admin.list_topics() == ["mine", "theirs"]
        assert (await admin.describe_configs("mine"))["retention.ms"] == "-1"
        described = (await admin.describe_topics(["mine", "theirs"])).values()
        assert [[len(row.replicas) for row in one.partitions] for one in described] == [[3, 3], [2, 2, 2]]
        assert [node.node_id for node in (await admin.cluster()).brokers] == cluster.nodes
        cluster.delete_topic("mine")
        await admin.delete_topics(["theirs"])
        assert await admin.list_topics() == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("a/b", {}),
        ("t", {"partitions": 0}),
        ("t", {"replication_factor": 4}),
        ("t", {"configs": {"retention.ms": "x"}}),
        ("t", {"configs": {"retention.ms": "1_000"}}),
        ("t", {"configs": {"min.cleanable.dirty.ratio": "0.1_5"}}),
    ],
)
async def test_topics_that_kafka_rejects_are_a_value_error(name: str, more: dict[str, object]) -> None:
    """A topic that Kafka would reject is a ValueError."""
    cluster = FakeCluster(3)
    with pytest.raises(ValueError, match=name):
        cluster.create_topic(name, **more)  # type: ignore[arg-type]


async def test_a_restarted_node_has_its_port_and_data() -> None:
    """A stopped node's port is closed and the next replicas lead; after a restart it has its port and its data."""
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t")
        async with connected(cluster) as wire:
            assert await wire.produce() == {0: "NONE"}
            before = cluster.bootstrap_servers
            await cluster.stop_node(1)
            assert await wire.is_closed()
        assert cluster.leader("t") == 2
        with pytest.raises(ConnectionError):
            async with connected(cluster):
                pass
        await cluster.start_node(1)
        assert cluster.bootstrap_servers == before
        cluster.move_leader(TopicPartition("t", 0), 1)
        async with connected(cluster) as wire:
            assert await wire.produce() == {0: "NONE"}
        assert [record.offset for record in cluster.records("t")] == [0, 1]


async def test_a_hook_can_stop_its_own_node() -> None:
    """A hook may stop its own node, whose request is then lost without effect."""
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t")

        async def stop(request: Request) -> Action | None:
            await cluster.stop_node(request.node)
            return None

        cluster.control(Api.PRODUCE, stop, node=1)
        async with connected(cluster) as wire, connected(cluster) as other:
            wire.send_records()
            assert await wire.is_closed()
            assert await other.is_closed()
        assert (cluster.leader("t"), cluster.end_offset("t")) == (2, 0)


@pytest.mark.parametrize("turns", [3, 4])
async def test_a_stopped_node_keeps_no_new_connection(turns: int) -> None:
    """A connection that was accepted a few turns of the event loop before a node is stopped ends with the node."""
    async with FakeCluster() as cluster:
        host, port = cluster.bootstrap_servers.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await cluster.stop_node(1)
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_connections_can_be_closed() -> None:
    """After `close_connections` clients have lost their connection and may connect again."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        async with connected(cluster) as wire:
            assert await wire.produce() == {0: "NONE"}
            await cluster.close_connections()
            assert await wire.is_closed()
        async with connected(cluster) as wire:
            assert await wire.produce() == {0: "NONE"}


async def test_a_group_reads_through_faults() -> None:
    """A consumer group reads every record once, although requests fail and its coordinator is stopped."""
    async with FakeCluster(3, configs={"group.min.session.timeout.ms": "100"}) as cluster:
        cluster.create_topic("t", 4)
        async with connected(cluster, cluster.leader("t", 1) or 0) as wire:
            for _ in range(10):
                await wire.produce(1)
        for api in (Api.FIND_COORDINATOR, Api.JOIN_GROUP, Api.SYNC_GROUP, Api.OFFSET_FETCH, Api.OFFSET_COMMIT):
            cluster.control(api, Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE), times=1)
        cluster.control(Api.FETCH, Fail(ErrorCode.NOT_LEADER_OR_FOLLOWER), times=1)
        cluster.control(Api.LIST_OFFSETS, Fail(ErrorCode.LEADER_NOT_AVAILABLE), times=1)
        group = ConsumerSettings(group_id="g", auto_offset_reset="earliest")
        async with Consumer(settings(cluster), group) as consumer:
            consumer.subscribe(["t"])
            seen: list[int] = []
            async with asyncio.timeout(20):
                while len(seen) < 10:
                    for columns in (await consumer.poll(50)).values():
                        seen += columns.offsets.tolist()
            await cluster.stop_node(cluster.coordinator("g"))
            await consumer.commit()
        assert seen == list(range(10))
        assert cluster.committed("g")[TopicPartition("t", 1)] == OffsetAndMetadata(10, "")
        assert cluster.committed("nobody") == {}


async def test_clients_authenticate() -> None:
    """A client with the right password works, and one with another gets AuthenticationFailed."""
    async with FakeCluster(users={"ann": "secret"}) as cluster:
        cluster.create_topic("t")
        sasl = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": "ann"}
        async with Admin(settings(cluster, **sasl, sasl_password=SecretStr("secret"))) as admin:
            assert await admin.list_topics() == ["t"]
        with pytest.raises(AuthenticationFailed):
            await Admin(settings(cluster, **sasl, sasl_password=SecretStr("wrong"))).__aenter__()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by openssl")
async def test_clients_use_tls(certificate: tuple[Path, Path]) -> None:
    """With a TLS context a client that trusts the certificate can connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    async with FakeCluster(ssl_context=context) as cluster:
        cluster.create_topic("t")
        async with Admin(settings(cluster, security_protocol="SSL", ssl_cafile=str(certificate[0]))) as admin:
            assert await admin.list_topics() == ["t"]


async def test_controls_are_for_their_node() -> None:
    """A control of one node does not affect the others."""
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", 2)
        cluster.control(Api.METADATA, Drop(), node=1)
        async with connected(cluster, 1) as one, connected(cluster, 2) as two:
            one.send(Api.METADATA)
            assert (await two.request(Api.METADATA)).brokers
            assert await one.is_silent()


async def test_many_nodes_and_time() -> None:
    """Node ids count from one, and the cluster's time is the wall clock's."""
    async with FakeCluster(5) as cluster:
        seen: list[Request] = []
        cluster.control(None, seen.append)
        async with connected(cluster, 5) as wire:
            await wire.request(Api.METADATA)
        assert cluster.nodes == [1, 2, 3, 4, 5]
        assert [(one.node, one.client_id, one.client_host) for one in seen] == [(5, "wire", "/127.0.0.1")]
        assert abs(seen[0].now_ms - cluster.now_ms()) < 10_000
    with pytest.raises(ValueError, match="nodes: 0"):
        FakeCluster(0)


async def test_unknown_partitions_are_a_key_error() -> None:
    """A query for an unknown partition is a KeyError."""
    async with FakeCluster() as cluster:
        with pytest.raises(KeyError, match="t-0"):
            cluster.leader("t")
        with pytest.raises(KeyError, match="t-0"):
            cluster.end_offset("t")
        with pytest.raises(KeyError):
            cluster.records("t")


def test_a_coordinator_moves_only_if_its_own_node_stops() -> None:
    """Groups of other nodes keep their coordinator while a node stops and starts again."""
    state = state_of()
    before = {f"g{n}": state.coordinator(f"g{n}") for n in range(60)}
    state.node_stopped(3)
    during = {group: state.coordinator(group) for group in before}
    assert {group: node for group, node in before.items() if node != 3}.items() <= during.items()
    assert set(before.values()) == {1, 2, 3}
    assert set(during.values()) == {1, 2}
    state.node_started(3)
    assert {group: state.coordinator(group) for group in before} == before
    for node in state.nodes:
        state.node_stopped(node)
    assert state.coordinator("g0") == -1


def test_an_ipv6_host_is_in_brackets() -> None:
    """The addresses of a cluster at an IPv6 host are valid bootstrap servers."""
    servers = FakeCluster(2, host="::1").bootstrap_servers
    assert servers == "[::1]:0,[::1]:0"
    KafkaSettings(bootstrap_servers=servers.replace(":0", ":1"))


T0 = TopicPartition("t", 0)


def state_of(nodes: int = 3, **configs: str) -> ClusterState:
    state = ClusterState({key.replace("_", "."): value for key, value in configs.items()})
    for node_id in range(1, nodes + 1):
        state.nodes[node_id] = Node(node_id, "host", 9_000 + node_id)
    return state


def send_request(
    state: ClusterState, api: Api, node: int = 1, version: int | None = None, now_ms: int = 0, **body: Any
) -> Any:
    """A node's response; request and response are encoded and decoded."""
    supported = SUPPORTED_APIS[api]
    version = supported.max_version if version is None else version
    body_read, _ = supported.request.decode(supported.request.encode(Message(**body), version), version)
    response = HANDLERS[api](state, Request(api, version, node, "client", "/host", body_read, now_ms))
    if isinstance(response, Message):
        return supported.response.decode(supported.response.encode(response, version), version)[0]
    return response


def produce(state: ClusterState, node: int, data: bytes, acks: int = -1, **more: Any) -> Any:
    topics = [Message(name="t", partitions=[Message(partition=0, records=data)])]
    return send_request(state, Api.PRODUCE, node, acks=acks, timeout_ms=1, topics=topics, **more)


def fetch(state: ClusterState, node: int, *, now_ms: int = 0, wait_ms: int = 0, **row: Any) -> Any:
    rows = [Message(**{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20, **row})]
    topics = [Message(name="t", partitions=rows)]
    return send_request(state, Api.FETCH, node, now_ms=now_ms, max_wait_ms=wait_ms, min_bytes=1, topics=topics)


def test_leaders_are_spread() -> None:
    """Partitions of one topic, and the first ones of several, have different leaders."""
    state = state_of()
    state.create_topic("t", 6, 2, {})
    state.create_topic("u", 1, 1, {})
    leaders = [one.leader for one in state.topics["t"].partitions]
    assert sorted(leaders) == [1, 1, 2, 2, 3, 3]
    assert all(one.replicas[0] == one.leader and len(set(one.replicas)) == 2 for one in state.topics["t"].partitions)
    assert state.topics["u"].partitions[0].leader == 2


def test_only_the_leader_serves() -> None:
    """Another node answers that it is not the leader, in newer versions of Produce with the leader's address."""
    state = state_of()
    state.create_topic("t", 1, 3, {})
    response = produce(state, 2, built(b"v"))
    row = response.topics[0].partitions[0]
    assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (row.current_leader.leader_id, row.current_leader.leader_epoch) == (1, 0)
    assert [(one.node_id, one.host, one.port) for one in response.node_endpoints] == [(1, "host", 9_001)]
    fetched = fetch(state, 3).topics[0].partitions[0]
    assert fetched.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_moved_leader_takes_over_the_log() -> None:
    """A new leader has the whole log and writes with the next epoch, and the old epoch is fenced."""
    state = state_of()
    state.create_topic("t", 1, 1, {})
    produce(state, 1, built(b"a"))
    state.move_leader(T0, 3)
    assert state.topics["t"].partitions[0].replicas == [1, 3]
    assert produce(state, 3, built(b"b")).topics[0].partitions[0].base_offset == 1
    batches = state.topics["t"].partitions[0].log.batches
    assert [int.from_bytes(batch.data[12:16], "big") for batch in batches] == [0, 1]
    for wait_ms in (0, 60_000):  # an error is returned at once
        code = (
            fetch(state, 3, wait_ms=wait_ms, fetch_offset=2, current_leader_epoch=0).topics[0].partitions[0].error_code
        )
        assert code == ErrorCode.FENCED_LEADER_EPOCH


@pytest.mark.parametrize(
    ("node", "codes"),
    [
        (1, ["NOT_LEADER_OR_FOLLOWER", "FENCED_LEADER_EPOCH", "NOT_LEADER_OR_FOLLOWER", "UNKNOWN_LEADER_EPOCH"]),
        (2, ["NONE", "FENCED_LEADER_EPOCH", "NONE", "UNKNOWN_LEADER_EPOCH"]),
        (3, ["NOT_LEADER_OR_FOLLOWER"] * 4),
    ],
    ids=["old leader", "leader", "no replica"],
)
def test_replicas_compare_the_epoch_first(node: int, codes: list[str]) -> None:
    """A replica compares a client's leader epoch (none, old, current, future) before it checks whether it leads."""
    state = state_of()
    state.create_topic("t", 1, 1, {})
    state.move_leader(T0, 2)
    epochs = (-1, 0, 1, 2)
    fetched = [fetch(state, node, current_leader_epoch=epoch).topics[0].partitions[0] for epoch in epochs]
    rows = [Message(partition=0, current_leader_epoch=epoch, timestamp=-1) for epoch in epochs]
    found = [send_request(state, Api.LIST_OFFSETS, node, topics=[Message(name="t", partitions=[row])]) for row in rows]
    assert [ErrorCode(row.error_code).name for row in fetched] == codes
    assert [ErrorCode(one.topics[0].partitions[0].error_code).name for one in found] == codes


def test_an_unknown_leader_is_a_key_error() -> None:
    """A leader must be a node of the cluster, and the partition must exist."""
    state = state_of()
    state.create_topic("t", 1, 1, {})
    with pytest.raises(KeyError, match="node 9"):
        state.move_leader(T0, 9)
    with pytest.raises(KeyError, match="t-1"):
        state.move_leader(TopicPartition("t", 1), 1)


def test_the_next_replica_leads() -> None:
    """The next replica leads when a node stops, and without any there is no leader until one is started."""
    state = state_of(2)
    state.create_topic("t", 1, 2, {})
    partition = state.topics["t"].partitions[0]
    state.node_stopped(1)
    assert (partition.leader, partition.isr, partition.leader_epoch) == (2, [2], 1)
    state.node_stopped(2)
    assert (partition.leader, partition.isr) == (-1, [2])
    state.node_started(1)
    assert (partition.leader, partition.isr, partition.leader_epoch) == (1, [1], 3)
    state.node_started(2)
    assert (partition.leader, partition.isr) == (1, [1, 2])


def test_acks_all_needs_replicas() -> None:
    """With fewer replicas than `min.insync.replicas`, acks=all is an error and acks=1 is not."""
    state = state_of(2)
    state.create_topic("t", 1, 2, {"min.insync.replicas": "2"})
    assert produce(state, 1, built(b"v")).topics[0].partitions[0].error_code == ErrorCode.NONE
    state.node_stopped(2)
    assert produce(state, 1, built(b"v")).topics[0].partitions[0].error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert produce(state, 1, built(b"v"), acks=1).topics[0].partitions[0].error_code == ErrorCode.NONE


def test_metadata_lists_running_nodes() -> None:
    """Stopped nodes are not listed. Their replicas are offline, and a partition without a leader has an error."""
    state = state_of(2)
    state.create_topic("t", 2, 1, {})
    state.node_stopped(1)
    response = send_request(state, Api.METADATA, 2, topics=None)
    assert [(one.node_id, one.port) for one in response.brokers] == [(2, 9_002)]
    assert response.controller_id == 2
    rows = {p.partition: (p.error_code, p.leader_id, p.offline_replicas) for p in response.topics[0].partitions}
    assert rows == {0: (ErrorCode.LEADER_NOT_AVAILABLE, -1, [1]), 1: (ErrorCode.NONE, 2, [])}


def test_topics_are_created_automatically() -> None:
    """With `auto.create.topics.enable` a metadata request creates a topic, unless the client disallows it."""
    state = state_of(auto_create_topics_enable="true", num_partitions="3")
    rows = [Message(name="t")]
    response = send_request(state, Api.METADATA, topics=rows, allow_auto_topic_creation=False)
    assert response.topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    response = send_request(state, Api.METADATA, topics=rows, allow_auto_topic_creation=True)
    assert (response.topics[0].error_code, len(response.topics[0].partitions)) == (ErrorCode.NONE, 3)


@pytest.mark.parametrize("node", [1, 2])
def test_every_node_creates_topics(node: int) -> None:
    """Every node accepts the creation, change and deletion of topics, not only the controller."""
    state = state_of()
    row = Message(name="t", num_partitions=1, replication_factor=1)
    for api, body, partitions in (
        (Api.CREATE_TOPICS, {"topics": [row]}, 1),
        (Api.CREATE_PARTITIONS, {"topics": [Message(name="t", count=2, assignments=None)]}, 2),
        (Api.DELETE_TOPICS, {"topic_names": ["t"]}, 0),
    ):
        assert send_request(state, api, node, timeout_ms=1, **body).topics[0].error_code == ErrorCode.NONE
        assert len(list(state.all_partitions())) == partitions


def test_replicas_can_be_chosen() -> None:
    """A topic that is created with assignments has those leaders and replicas, each partition as many."""
    state = state_of()

    def create(*replicas: list[int]) -> Message:
        assignments = [Message(partition=index, broker_ids=ids) for index, ids in enumerate(replicas)]
        row = Message(name="t", num_partitions=-1, replication_factor=-1, assignments=assignments)
        return send_request(state, Api.CREATE_TOPICS, timeout_ms=1, topics=[row]).topics[0]

    assert create([3, 1], [2]).error_code == ErrorCode.INVALID_REPLICA_ASSIGNMENT
    created = create([3, 1], [2, 3])
    assert (created.num_partitions, created.replication_factor) == (2, 2)
    assert [(one.leader, one.replicas) for one in state.topics["t"].partitions] == [(3, [3, 1]), (2, [2, 3])]


def test_only_the_coordinator_coordinates() -> None:
    """Another node answers every request for a group or transaction that it is not the coordinator."""
    state = state_of()
    found = send_request(state, Api.FIND_COORDINATOR, key="k", key_type=0).node_id
    other = next(node for node in state.nodes if node != found)
    group = {"group_id": "k", "generation_id": -1, "member_id": "", "group_instance_id": None}
    for api in (Api.HEARTBEAT, Api.LEAVE_GROUP, Api.SYNC_GROUP, Api.JOIN_GROUP):
        assert send_request(state, api, other, **group).error_code == ErrorCode.NOT_COORDINATOR, api
    assert (
        send_request(state, Api.OFFSET_FETCH, other, group_id="k", topics=None).error_code == ErrorCode.NOT_COORDINATOR
    )
    response = send_request(state, Api.INIT_PRODUCER_ID, other, transactional_id="k", transaction_timeout_ms=1)
    assert response.error_code == ErrorCode.NOT_COORDINATOR
    for api in (Api.DESCRIBE_GROUPS, Api.DELETE_GROUPS):
        assert send_request(state, api, other, groups=["k"]).groups[0].error_code == ErrorCode.NOT_COORDINATOR
    send_request(state, Api.OFFSET_COMMIT, found, **group)
    assert [len(send_request(state, Api.LIST_GROUPS, node).groups) for node in (found, other)] == [1, 0]
    state.node_stopped(found)
    assert send_request(state, Api.FIND_COORDINATOR, other, key="k", key_type=0).node_id != found


def test_a_waiting_fetch_is_woken() -> None:
    """A waiting fetch is answered on new data, a new leader, a deletion, and after its time."""
    for wake in ("data", "leader", "deletion", "time"):
        state = state_of()
        state.create_topic("t", 1, 1, {})
        later = fetch(state, 1, wait_ms=100)
        assert isinstance(later, DelayedResponse)
        state.timers.run(99)
        assert not later.is_done
        if wake == "data":
            produce(state, 1, built(b"v"))
        elif wake == "leader":
            state.move_leader(T0, 2)
        elif wake == "deletion":
            state.delete_topic("t")
        else:
            state.timers.run(100)
        assert later.is_done, wake
        codes = {"leader": ErrorCode.NOT_LEADER_OR_FOLLOWER, "deletion": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        assert later.value.topics[0].partitions[0].error_code == codes.get(wake, ErrorCode.NONE)
        assert state.timers.next_ms is None


def test_offsets_of_a_deleted_topic_are_deleted() -> None:
    """Offsets of a deleted topic are deleted too."""
    state = state_of(1)
    state.create_topic("t", 1, 1, {})
    topics = [Message(name="t", partitions=[Message(partition=0, offset=5, metadata="")])]
    send_request(
        state, Api.OFFSET_COMMIT, group_id="g", generation_id=-1, member_id="", group_instance_id=None, topics=topics
    )
    assert T0 in state.groups.offsets["g"].committed
    state.delete_topic("t")
    assert state.groups.offsets["g"].committed == {}


def test_unknown_configs_are_an_error() -> None:
    """A broker config without an effect is a ValueError."""
    with pytest.raises(ValueError, match=r"log\.dirs"):
        ClusterState({"log.dirs": "x"})
