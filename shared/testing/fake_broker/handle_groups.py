"""The responses of a group's coordinator: membership, committed offsets, and the admin client's requests."""

from __future__ import annotations

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.cluster_state import ClusterState
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.group import BrokerGroupState
from penstock.shared.testing.fake_broker.group_coordinator import Committed
from penstock.shared.testing.fake_broker.handle_logs import respond_for_partitions
from penstock.shared.testing.fake_broker.handler_responses import Response
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from penstock.shared.testing.fake_broker.request import Request

MEMBERS_LISTED_SINCE = 3


def find_coordinator(state: ClusterState, request: Request) -> Response:
    """Handle FindCoordinator: return the node that coordinates a group or a transactional id."""
    node = state.nodes.get(state.coordinator(request.body.key))
    if node is None:
        return Message(error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return Message(
        error_code=ErrorCode.NONE, error_message="NONE", node_id=node.node_id, host=node.host, port=node.port
    )


def _group_error(state: ClusterState, request: Request) -> ErrorCode:
    if not request.body.group_id:
        return ErrorCode.INVALID_GROUP_ID
    return state.coordinator_error(request.node, request.body.group_id)


def join_group(state: ClusterState, request: Request) -> Response:
    """Handle JoinGroup: join a group; see `BrokerGroup.join` for the time of the response."""
    body = request.body
    code = _group_error(state, request)
    low, high = (int(state.configs[f"group.{end}.session.timeout.ms"]) for end in ("min", "max"))
    if code is ErrorCode.NONE and not low <= body.session_timeout_ms <= high:
        code = ErrorCode.INVALID_SESSION_TIMEOUT
    if code is ErrorCode.NONE and body.member_id and body.group_id not in state.groups.known:
        code = ErrorCode.UNKNOWN_MEMBER_ID
    if code is not ErrorCode.NONE:
        return Message(error_code=code, member_id=body.member_id, protocol_name="")
    group = state.groups.get(body.group_id)
    return group.join(request.version, (request.client_id, request.client_host), body, request.now_ms)


def sync_group(state: ClusterState, request: Request) -> Response:
    """Handle SyncGroup: receive the leader's assignment, and return the member's part."""
    code = _group_error(state, request)
    group = state.groups.known.get(request.body.group_id)
    if code is ErrorCode.NONE and group is None:
        code = ErrorCode.UNKNOWN_MEMBER_ID
    if code is not ErrorCode.NONE or group is None:
        return Message(error_code=code)
    return group.sync(request.version, request.body, request.now_ms)


def heartbeat(state: ClusterState, request: Request) -> Response:
    """Handle Heartbeat: record that a member is alive."""
    code = _group_error(state, request)
    group = state.groups.known.get(request.body.group_id)
    if code is ErrorCode.NONE:
        code = ErrorCode.UNKNOWN_MEMBER_ID if group is None else group.heartbeat(request.body, request.now_ms)
    return Message(error_code=code)


def leave_group(state: ClusterState, request: Request) -> Response:
    """Handle LeaveGroup: leave a group."""
    body = request.body
    code = _group_error(state, request)
    if code is not ErrorCode.NONE:
        return Message(error_code=code)
    group = state.groups.known.get(body.group_id)
    rows = body.members if request.version >= MEMBERS_LISTED_SINCE else [Message(member_id=body.member_id)]
    left = []
    for row in rows:
        instance_id = getattr(row, "group_instance_id", None)
        code = ErrorCode.UNKNOWN_MEMBER_ID if group is None else group.leave(row.member_id, instance_id, request.now_ms)
        left.append(Message(member_id=row.member_id, group_instance_id=instance_id, error_code=code))
    if request.version >= MEMBERS_LISTED_SINCE:
        return Message(error_code=ErrorCode.NONE, members=left)
    return Message(error_code=left[0].error_code)


def commit_one(
    state: ClusterState, code: ErrorCode, into: dict[TopicPartition, Committed], tp: TopicPartition, row: Message
) -> Message:
    """Put one offset into `into`, unless it is rejected or `code` is an error.

    Returns the partition's row of the response.
    """
    metadata = row.metadata or ""
    if code is ErrorCode.NONE and state.partition(tp) is None:
        code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if code is ErrorCode.NONE and len(metadata.encode()) > int(state.configs["offset.metadata.max.bytes"]):
        return Message(partition=tp.partition, error_code=ErrorCode.OFFSET_METADATA_TOO_LARGE)
    if code is ErrorCode.NONE:
        into[tp] = Committed(row.offset, row.leader_epoch, metadata)
    return Message(partition=tp.partition, error_code=code)


def offset_commit(state: ClusterState, request: Request) -> Response:
    """Handle OffsetCommit: commit offsets, as a member or for a group without members."""
    body = request.body
    code = _group_error(state, request)
    group = state.groups.known.get(body.group_id)
    if code is ErrorCode.NONE:
        if group is not None:
            code = group.commit_error(body, request.now_ms, transactional=False)
        elif body.generation_id >= 0:
            code = ErrorCode.ILLEGAL_GENERATION
        else:
            state.groups.get(body.group_id)
    into = state.groups.offsets[body.group_id].committed if code is ErrorCode.NONE else {}
    return Message(topics=respond_for_partitions(request, lambda tp, row: commit_one(state, code, into, tp, row)))


def offset_fetch(state: ClusterState, request: Request) -> Response:
    """Handle OffsetFetch: return the committed offsets of a group.

    With `require_stable`, a partition with an offset in an open transaction gets an error.
    """
    body = request.body
    code = _group_error(state, request)
    if code is not ErrorCode.NONE:
        rows = [
            Message(name=t.name, partitions=[_no_committed_offset(p, code) for p in t.partitions])
            for t in body.topics or ()
        ]
        return Message(topics=rows, error_code=code)
    offsets = state.groups.offsets.get(body.group_id)
    if body.topics is None:
        wanted: dict[str, list[int]] = {}
        for tp in sorted(offsets.committed if offsets else ()):
            wanted.setdefault(tp.topic, []).append(tp.partition)
    else:
        wanted = {topic.name: topic.partitions for topic in body.topics}

    def find_committed_offset(tp: TopicPartition) -> Message:
        if offsets is not None and body.require_stable and not offsets.is_stable(tp):
            return _no_committed_offset(tp.partition, ErrorCode.UNSTABLE_OFFSET_COMMIT)
        found = offsets.committed.get(tp) if offsets is not None else None
        if found is None:
            return _no_committed_offset(tp.partition, ErrorCode.NONE)
        return Message(
            partition=tp.partition,
            offset=found.offset,
            leader_epoch=found.leader_epoch,
            metadata=found.metadata,
            error_code=ErrorCode.NONE,
        )

    topics = [
        Message(name=name, partitions=[find_committed_offset(TopicPartition(name, p)) for p in partitions])
        for name, partitions in wanted.items()
    ]
    return Message(topics=topics, error_code=ErrorCode.NONE)


def _no_committed_offset(partition: int, code: ErrorCode) -> Message:
    return Message(partition=partition, offset=-1, leader_epoch=-1, metadata="", error_code=code)


def list_groups(state: ClusterState, request: Request) -> Response:
    """Handle ListGroups: return the groups that this node coordinates."""
    wanted = set(request.body.states_filter)
    rows = [
        Message(group_id=group.group_id, protocol_type=group.protocol_type, group_state=str(group.state))
        for group in state.groups.known.values()
        if state.coordinator(group.group_id) == request.node and (not wanted or str(group.state) in wanted)
    ]
    return Message(error_code=ErrorCode.NONE, groups=rows)


def describe_groups(state: ClusterState, request: Request) -> Response:
    """Handle DescribeGroups: return state and members of groups. A group that does not exist is Dead."""
    return Message(groups=[_describe_group(state, request, group_id) for group_id in request.body.groups])


def _describe_group(state: ClusterState, request: Request, group_id: str) -> Message:
    code = state.coordinator_error(request.node, group_id)
    found = Message(error_code=code, group_id=group_id, group_state="")
    if code is not ErrorCode.NONE:
        return found
    group = state.groups.known.get(group_id)
    if group is None:
        found.group_state = str(BrokerGroupState.DEAD)
        return found
    found.group_state = str(group.state)
    is_stable = group.state is BrokerGroupState.STABLE
    found.protocol_type = group.protocol_type
    found.protocol_data = group.protocol if is_stable else ""
    found.members = [
        Message(
            member_id=one.member_id,
            group_instance_id=one.instance_id,
            client_id=one.client_id,
            client_host=one.client_host,
            member_metadata=one.metadata(group.protocol) if is_stable else b"",
            member_assignment=one.assignment if is_stable else b"",
        )
        for one in group.members.values()
    ]
    return found


def delete_groups(state: ClusterState, request: Request) -> Response:
    """Handle DeleteGroups: delete groups that have no members, with their offsets."""

    def delete_group(group_id: str) -> ErrorCode:
        code = state.coordinator_error(request.node, group_id)
        if code is not ErrorCode.NONE:
            return code
        group = state.groups.known.get(group_id)
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if group.members:
            return ErrorCode.NON_EMPTY_GROUP
        state.groups.delete(group_id)
        return ErrorCode.NONE

    return Message(groups=[Message(group_id=one, error_code=delete_group(one)) for one in request.body.groups])
