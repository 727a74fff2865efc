"""The requests of a group's members, each in the first version with the instance id of static members (KIP-345)."""

from __future__ import annotations

from aiokafka.protocol.types import Array, Bytes, Int32

from penstock.shared.clients.connection.wire import ERROR, THROTTLE
from penstock.shared.clients.connection.wire_types import TEXT, Api

_MEMBER = (("group_id", TEXT), ("generation_id", Int32), ("member_id", TEXT), ("group_instance_id", TEXT))

JOIN_GROUP = Api(
    "JoinGroup",
    11,
    5,
    (
        ("group_id", TEXT),
        ("session_timeout_ms", Int32),
        ("rebalance_timeout_ms", Int32),
        ("member_id", TEXT),
        ("group_instance_id", TEXT),
        ("protocol_type", TEXT),
        ("protocols", Array(("name", TEXT), ("metadata", Bytes))),
    ),
    (
        THROTTLE,
        ERROR,
        ("generation_id", Int32),
        ("protocol_name", TEXT),
        ("leader", TEXT),
        ("member_id", TEXT),
        ("members", Array(("member_id", TEXT), ("group_instance_id", TEXT), ("metadata", Bytes))),
    ),
)

SYNC_GROUP = Api(
    "SyncGroup",
    14,
    3,
    (*_MEMBER, ("assignments", Array(("member_id", TEXT), ("assignment", Bytes)))),
    (THROTTLE, ERROR, ("assignment", Bytes)),
)

HEARTBEAT = Api("Heartbeat", 12, 3, _MEMBER, (THROTTLE, ERROR))

LEAVE_GROUP = Api(
    "LeaveGroup",
    13,
    3,
    (("group_id", TEXT), ("members", Array(("member_id", TEXT), ("group_instance_id", TEXT)))),
    (THROTTLE, ERROR, ("members", Array(("member_id", TEXT), ("group_instance_id", TEXT), ERROR))),
)
