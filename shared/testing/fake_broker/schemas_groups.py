"""The messages that clients exchange with the coordinators of groups and of transactions; see `schemas`."""

from __future__ import annotations

FIND_COORDINATOR = (
    "key string\nkey_type int8 1+",
    """
throttle_time_ms int32 1+
error_code int16
error_message ?string 1+
node_id int32 = -1
host string
port int32 = -1
""",
)

JOIN_GROUP = (
    """
group_id string
session_timeout_ms int32
rebalance_timeout_ms int32 1+ = -1
member_id string
group_instance_id ?string 5+
protocol_type string
protocols []
  name string
  metadata bytes
reason ?string 8+
""",
    """
throttle_time_ms int32 2+
error_code int16
generation_id int32 = -1
protocol_type ?string 7+
protocol_name ?string
leader string
skip_assignment bool 9+
member_id string
members []
  member_id string
  group_instance_id ?string 5+
  metadata bytes
""",
)

SYNC_GROUP = (
    """
group_id string
generation_id int32
member_id string
group_instance_id ?string 3+
protocol_type ?string 5+
protocol_name ?string 5+
assignments []
  member_id string
  assignment bytes
""",
    """
throttle_time_ms int32 1+
error_code int16
protocol_type ?string 5+
protocol_name ?string 5+
assignment bytes
""",
)

HEARTBEAT = (
    """
group_id string
generation_id int32
member_id string
group_instance_id ?string 3+
""",
    "throttle_time_ms int32 1+\nerror_code int16",
)

LEAVE_GROUP = (
    """
group_id string
member_id string 0-2
members [] 3+
  member_id string
  group_instance_id ?string
  reason ?string 5+
""",
    """
throttle_time_ms int32 1+
error_code int16
members [] 3+
  member_id string
  group_instance_id ?string
  error_code int16
""",
)

OFFSET_COMMIT = (
    """
group_id string
generation_id int32 1+ = -1
member_id string 1+
group_instance_id ?string 7+
retention_time_ms int64 2-4 = -1
topics []
  name string
  partitions []
    partition int32
    offset int64
    leader_epoch int32 6+ = -1
    metadata ?string
""",
    """
throttle_time_ms int32 3+
topics []
  name string
  partitions []
    partition int32
    error_code int16
""",
)

OFFSET_FETCH = (
    """
group_id string
topics ?[]
  name string
  partitions []int32
require_stable bool 7+
""",
    """
throttle_time_ms int32 3+
topics []
  name string
  partitions []
    partition int32
    offset int64 = -1
    leader_epoch int32 5+ = -1
    metadata ?string
    error_code int16
error_code int16 2+
""",
)

DESCRIBE_GROUPS = (
    "groups []string\ninclude_authorized_operations bool 3+",
    """
throttle_time_ms int32 1+
groups []
  error_code int16
  group_id string
  group_state string
  protocol_type string
  protocol_data string
  members []
    member_id string
    group_instance_id ?string 4+
    client_id string
    client_host string
    member_metadata bytes
    member_assignment bytes
  authorized_operations int32 3+ = -2147483648
""",
)

LIST_GROUPS = (
    "states_filter []string 4+",
    """
throttle_time_ms int32 1+
error_code int16
groups []
  group_id string
  protocol_type string
  group_state string 4+
""",
)

DELETE_GROUPS = (
    "groups []string",
    """
throttle_time_ms int32
groups []
  group_id string
  error_code int16
""",
)

INIT_PRODUCER_ID = (
    """
transactional_id ?string
transaction_timeout_ms int32
producer_id int64 3+ = -1
producer_epoch int16 3+ = -1
""",
    """
throttle_time_ms int32
error_code int16
producer_id int64 = -1
producer_epoch int16
""",
)

_TRANSACTION = """
transactional_id string
producer_id int64
producer_epoch int16
"""

_TOPIC_ERRORS = """
throttle_time_ms int32
topics []
  name string
  partitions []
    partition int32
    error_code int16
"""

ADD_PARTITIONS_TO_TXN = (f"{_TRANSACTION}topics []\n  name string\n  partitions []int32", _TOPIC_ERRORS)
ADD_OFFSETS_TO_TXN = (f"{_TRANSACTION}group_id string", "throttle_time_ms int32\nerror_code int16")
END_TXN = (f"{_TRANSACTION}committed bool", "throttle_time_ms int32\nerror_code int16")

TXN_OFFSET_COMMIT = (
    """
transactional_id string
group_id string
producer_id int64
producer_epoch int16
generation_id int32 3+ = -1
member_id string 3+
group_instance_id ?string 3+
topics []
  name string
  partitions []
    partition int32
    offset int64
    leader_epoch int32 2+ = -1
    metadata ?string
""",
    _TOPIC_ERRORS,
)
