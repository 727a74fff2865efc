"""The messages that clients exchange with brokers and with the coordinators of groups and transactions.

In every response, topics are `topics` with a `name`, partitions are `partitions` with a `partition`, and errors are
`error_code`. In requests this is the same, but names or numbers without a struct are plain lists: `topic_names`, or
`partitions`. Kafka's own definitions use several names for one concept. With one name, the same code can put a fault
into any response. The oldest version of each message is the oldest that Kafka 4 supports.
"""

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

API_VERSIONS = (
    """
client_software_name string 3+
client_software_version string 3+
""",
    """
error_code int16
api_keys []
  api_key int16
  min_version int16
  max_version int16
throttle_time_ms int32 1+
supported_features [] 3+ tag 0
  name string
  min_version int16
  max_version int16
finalized_features_epoch int64 3+ tag 1 = -1
finalized_features [] 3+ tag 2
  name string
  max_version_level int16
  min_version_level int16
""",
)

SASL_HANDSHAKE = ("mechanism string", "error_code int16\nmechanisms []string")

SASL_AUTHENTICATE = (
    "auth_bytes bytes",
    """
error_code int16
error_message ?string
auth_bytes bytes
session_lifetime_ms int64 1+
""",
)

METADATA = (
    """
topics ?[]
  topic_id uuid 10+
  name ?string
allow_auto_topic_creation bool 4+
include_cluster_authorized_operations bool 8-10
include_topic_authorized_operations bool 8+
""",
    """
throttle_time_ms int32 3+
brokers []
  node_id int32
  host string
  port int32
  rack ?string 1+
cluster_id ?string 2+
controller_id int32 1+ = -1
topics []
  error_code int16
  name ?string
  topic_id uuid 10+
  is_internal bool 1+
  partitions []
    error_code int16
    partition int32
    leader_id int32
    leader_epoch int32 7+ = -1
    replica_nodes []int32
    isr_nodes []int32
    offline_replicas []int32 5+
  topic_authorized_operations int32 8+ = -2147483648
cluster_authorized_operations int32 8-10 = -2147483648
""",
)

PRODUCE = (
    """
transactional_id ?string 3+
acks int16
timeout_ms int32
topics []
  name string
  partitions []
    partition int32
    records ?bytes
""",
    """
topics []
  name string
  partitions []
    partition int32
    error_code int16
    base_offset int64 = -1
    log_append_time_ms int64 2+ = -1
    log_start_offset int64 5+ = -1
    record_errors [] 8+
      batch_index int32
      batch_index_error_message ?string
    error_message ?string 8+
    current_leader {} 10+ tag 0
      leader_id int32 = -1
      leader_epoch int32 = -1
throttle_time_ms int32 1+
node_endpoints [] 10+ tag 0
  node_id int32
  host string
  port int32
  rack ?string
""",
)

FETCH = (
    """
replica_id int32 = -1
max_wait_ms int32
min_bytes int32
max_bytes int32 3+ = 2147483647
isolation_level int8 4+
session_id int32 7+
session_epoch int32 7+ = -1
topics []
  name string
  partitions []
    partition int32
    current_leader_epoch int32 9+ = -1
    fetch_offset int64
    last_fetched_epoch int32 12+ = -1
    log_start_offset int64 5+ = -1
    partition_max_bytes int32
forgotten_topics [] 7+
  name string
  partitions []int32
rack_id string 11+
cluster_id ?string 12+ tag 0
""",
    """
throttle_time_ms int32 1+
error_code int16 7+
session_id int32 7+
topics []
  name string
  partitions []
    partition int32
    error_code int16
    high_watermark int64 = -1
    last_stable_offset int64 4+ = -1
    log_start_offset int64 5+ = -1
    diverging_epoch {} 12+ tag 0
      epoch int32 = -1
      end_offset int64 = -1
    current_leader {} 12+ tag 1
      leader_id int32 = -1
      leader_epoch int32 = -1
    aborted_transactions ?[] 4+
      producer_id int64
      first_offset int64
    preferred_read_replica int32 11+ = -1
    records bytes
""",
)

LIST_OFFSETS = (
    """
replica_id int32 = -1
isolation_level int8 2+
topics []
  name string
  partitions []
    partition int32
    current_leader_epoch int32 4+ = -1
    timestamp int64
""",
    """
throttle_time_ms int32 2+
topics []
  name string
  partitions []
    partition int32
    error_code int16
    timestamp int64 = -1
    offset int64 = -1
    leader_epoch int32 4+ = -1
""",
)

DELETE_RECORDS = (
    """
topics []
  name string
  partitions []
    partition int32
    offset int64
timeout_ms int32
""",
    """
throttle_time_ms int32
topics []
  name string
  partitions []
    partition int32
    low_watermark int64 = -1
    error_code int16
""",
)

CREATE_TOPICS = (
    """
topics []
  name string
  num_partitions int32
  replication_factor int16
  assignments []
    partition int32
    broker_ids []int32
  configs []
    name string
    value ?string
timeout_ms int32
validate_only bool 1+
""",
    """
throttle_time_ms int32 2+
topics []
  name string
  topic_id uuid 7+
  error_code int16
  error_message ?string 1+
  topic_config_error_code int16 5+ tag 0
  num_partitions int32 5+ = -1
  replication_factor int16 5+ = -1
  configs ?[] 5+
    name string
    value ?string
    read_only bool
    config_source int8 = -1
    is_sensitive bool
""",
)

DELETE_TOPICS = (
    "topic_names []string\ntimeout_ms int32",
    """
throttle_time_ms int32 1+
topics []
  name string
  error_code int16
  error_message ?string 5+
""",
)

CREATE_PARTITIONS = (
    """
topics []
  name string
  count int32
  assignments ?[]
    broker_ids []int32
timeout_ms int32
validate_only bool
""",
    """
throttle_time_ms int32
topics []
  name string
  error_code int16
  error_message ?string
""",
)

DESCRIBE_CONFIGS = (
    """
resources []
  resource_type int8
  resource_name string
  configuration_keys ?[]string
include_synonyms bool 1+
include_documentation bool 3+
""",
    """
throttle_time_ms int32
resources []
  error_code int16
  error_message ?string
  resource_type int8
  resource_name string
  configs []
    name string
    value ?string
    read_only bool
    config_source int8 1+ = -1
    is_sensitive bool
    synonyms [] 1+
      name string
      value ?string
      source int8
    config_type int8 3+
    documentation ?string 3+
""",
)

INCREMENTAL_ALTER_CONFIGS = (
    """
resources []
  resource_type int8
  resource_name string
  configs []
    name string
    config_operation int8
    value ?string
validate_only bool
""",
    """
throttle_time_ms int32
resources []
  error_code int16
  error_message ?string
  resource_type int8
  resource_name string
""",
)
