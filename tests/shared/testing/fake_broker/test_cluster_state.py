"""The state of the fake cluster: leaders, coordinators, and errors of nodes that are neither."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.api_handlers import HANDLERS
from penstock.shared.testing.fake_broker.cluster_state import ClusterState, Node
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.handler_responses import DelayedResponse
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS, Api, ErrorCode
from penstock.shared.testing.fake_broker.request import Request
from tests.shared.testing.fake_broker.test_broker_batches import built

T0 = TopicPartition("t", 0)


def cluster(nodes: int = 3, **configs: str) -> ClusterState:
    state = ClusterState({key.replace("_", "."): value for key, value in configs.items()})
    for node_id in range(1, nodes + 1):
        state.nodes[node_id] = Node(node_id, "host", 9_000 + node_id)
    return state


def send_request(
    state: ClusterState, api: Api, node: int = 1, version: int | None = None, now_ms: int = 0, **body: Any
) -> Any:
    """A node's response; request and answer are encoded and decoded."""
    supported = SUPPORTED_APIS[api]
    version = supported.max_version if version is None else version
    body_read, _ = supported.request.decode(supported.request.encode(Message(**body), version), version)
    answer = HANDLERS[api](state, Request(api, version, node, "client", "/host", body_read, now_ms))
    if isinstance(answer, Message):
        return supported.response.decode(supported.response.encode(answer, version), version)[0]
    return answer


def produce(state: ClusterState, node: int, data: bytes, acks: int = -1, **more: Any) -> Any:
    topics = [Message(name="t", partitions=[Message(partition=0, records=data)])]
    return send_request(state, Api.PRODUCE, node, acks=acks, timeout_ms=1, topics=topics, **more)


def fetch(state: ClusterState, node: int, *, now_ms: int = 0, wait_ms: int = 0, **row: Any) -> Any:
    rows = [Message(**{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20, **row})]
    topics = [Message(name="t", partitions=rows)]
    return send_request(state, Api.FETCH, node, now_ms=now_ms, max_wait_ms=wait_ms, min_bytes=1, topics=topics)


def test_leaders_are_spread() -> None:
    """Partitions of one topic, and the first ones of several, have different leaders."""
    state = cluster()
    state.create_topic("t", 6, 2, {})
    state.create_topic("u", 1, 1, {})
    leaders = [one.leader for one in state.topics["t"].partitions]
    assert sorted(leaders) == [1, 1, 2, 2, 3, 3]
    assert all(one.replicas[0] == one.leader and len(set(one.replicas)) == 2 for one in state.topics["t"].partitions)
    assert state.topics["u"].partitions[0].leader == 2


def test_only_the_leader_serves() -> None:
    """Another node answers that it is not the leader, in newer versions with the leader's address."""
    state = cluster()
    state.create_topic("t", 1, 3, {})
    answer = produce(state, 2, built(b"v"))
    row = answer.topics[0].partitions[0]
    assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (row.current_leader.leader_id, row.current_leader.leader_epoch) == (1, 0)
    assert [(one.node_id, one.host, one.port) for one in answer.node_endpoints] == [(1, "host", 9_001)]
    fetched = fetch(state, 3).topics[0].partitions[0]
    assert (fetched.error_code, fetched.current_leader.leader_id) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, 1)


def test_a_moved_leader_takes_over_the_log() -> None:
    """A new leader has the whole log and writes with the next epoch, and the old epoch is fenced."""
    state = cluster()
    state.create_topic("t", 1, 1, {})
    produce(state, 1, built(b"a"))
    state.move_leader(T0, 3)
    assert state.topics["t"].partitions[0].replicas == [1, 3]
    assert produce(state, 3, built(b"b")).topics[0].partitions[0].base_offset == 1
    batches = state.topics["t"].partitions[0].log.batches
    assert [int.from_bytes(batch.data[12:16], "big") for batch in batches] == [0, 1]
    code = fetch(state, 3, current_leader_epoch=0).topics[0].partitions[0].error_code
    assert code == ErrorCode.FENCED_LEADER_EPOCH


def test_an_unknown_leader_is_a_key_error() -> None:
    """A leader must be a node of the cluster, and the partition must exist."""
    state = cluster()
    state.create_topic("t", 1, 1, {})
    with pytest.raises(KeyError, match="node 9"):
        state.move_leader(T0, 9)
    with pytest.raises(KeyError, match="t-1"):
        state.move_leader(TopicPartition("t", 1), 1)


def test_the_next_replica_leads() -> None:
    """The next replica leads when a node stops, and without any there is no leader until one is started."""
    state = cluster(2)
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
    state = cluster(2)
    state.create_topic("t", 1, 2, {"min.insync.replicas": "2"})
    assert produce(state, 1, built(b"v")).topics[0].partitions[0].error_code == ErrorCode.NONE
    state.node_stopped(2)
    assert produce(state, 1, built(b"v")).topics[0].partitions[0].error_code == ErrorCode.NOT_ENOUGH_REPLICAS
    assert produce(state, 1, built(b"v"), acks=1).topics[0].partitions[0].error_code == ErrorCode.NONE


def test_metadata_lists_running_nodes() -> None:
    """Stopped nodes are not listed, and a partition without a leader has an error and leader -1."""
    state = cluster(2)
    state.create_topic("t", 2, 1, {})
    state.node_stopped(1)
    answer = send_request(state, Api.METADATA, 2, topics=None)
    assert [(one.node_id, one.port) for one in answer.brokers] == [(2, 9_002)]
    assert answer.controller_id == 2
    rows = {one.partition: (one.error_code, one.leader_id) for one in answer.topics[0].partitions}
    assert rows == {0: (ErrorCode.LEADER_NOT_AVAILABLE, -1), 1: (ErrorCode.NONE, 2)}


def test_topics_are_created_automatically() -> None:
    """With `auto.create.topics.enable` a metadata request creates a topic, unless the client disallows it."""
    state = cluster(auto_create_topics_enable="true", num_partitions="3")
    rows = [Message(name="t")]
    answer = send_request(state, Api.METADATA, topics=rows, allow_auto_topic_creation=False)
    assert answer.topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    answer = send_request(state, Api.METADATA, topics=rows, allow_auto_topic_creation=True)
    assert (answer.topics[0].error_code, len(answer.topics[0].partitions)) == (ErrorCode.NONE, 3)


def test_only_the_controller_creates_topics() -> None:
    """Another node rejects the creation, change and deletion of topics."""
    state = cluster()
    row = Message(name="t", num_partitions=1, replication_factor=1)
    for api, body in (
        (Api.CREATE_TOPICS, {"topics": [row]}),
        (Api.DELETE_TOPICS, {"topic_names": ["t"]}),
        (Api.CREATE_PARTITIONS, {"topics": [Message(name="t", count=2, assignments=None)]}),
    ):
        assert send_request(state, api, 2, timeout_ms=1, **body).topics[0].error_code == ErrorCode.NOT_CONTROLLER
    assert state.topics == {}
    assert send_request(state, Api.CREATE_TOPICS, 1, timeout_ms=1, topics=[row]).topics[0].error_code == ErrorCode.NONE


def test_replicas_can_be_chosen() -> None:
    """A topic that is created with assignments has those leaders and replicas."""
    state = cluster()
    assignments = [Message(partition=0, broker_ids=[3, 1]), Message(partition=1, broker_ids=[2])]
    row = Message(name="t", num_partitions=-1, replication_factor=-1, assignments=assignments)
    assert send_request(state, Api.CREATE_TOPICS, timeout_ms=1, topics=[row]).topics[0].num_partitions == 2
    assert [(one.leader, one.replicas) for one in state.topics["t"].partitions] == [(3, [3, 1]), (2, [2])]


def test_only_the_coordinator_coordinates() -> None:
    """Another node answers every request for a group or transaction that it is not the coordinator."""
    state = cluster()
    found = send_request(state, Api.FIND_COORDINATOR, key="k", key_type=0).node_id
    other = next(node for node in state.nodes if node != found)
    group = {"group_id": "k", "generation_id": -1, "member_id": "", "group_instance_id": None}
    for api in (Api.HEARTBEAT, Api.LEAVE_GROUP, Api.SYNC_GROUP, Api.JOIN_GROUP):
        assert send_request(state, api, other, **group).error_code == ErrorCode.NOT_COORDINATOR, api
    assert (
        send_request(state, Api.OFFSET_FETCH, other, group_id="k", topics=None).error_code == ErrorCode.NOT_COORDINATOR
    )
    answer = send_request(state, Api.INIT_PRODUCER_ID, other, transactional_id="k", transaction_timeout_ms=1)
    assert answer.error_code == ErrorCode.NOT_COORDINATOR
    for api in (Api.DESCRIBE_GROUPS, Api.DELETE_GROUPS):
        assert send_request(state, api, other, groups=["k"]).groups[0].error_code == ErrorCode.NOT_COORDINATOR
    send_request(state, Api.OFFSET_COMMIT, found, **group)
    assert [len(send_request(state, Api.LIST_GROUPS, node).groups) for node in (found, other)] == [1, 0]
    state.node_stopped(found)
    assert send_request(state, Api.FIND_COORDINATOR, other, key="k", key_type=0).node_id != found


def test_a_waiting_fetch_is_woken() -> None:
    """A waiting fetch is answered on new data, a new leader, a deletion, and after its time."""
    for wake in ("data", "leader", "deletion", "time"):
        state = cluster()
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
    state = cluster(1)
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
