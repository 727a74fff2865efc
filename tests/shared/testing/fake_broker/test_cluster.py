"""The fake cluster as a test uses it, through clients."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from pydantic import SecretStr

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import AuthenticationFailed
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Action, Api, Drop, Fail, FakeCluster, Request
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from tests.shared.testing.fake_broker.test_node_server import connected


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
