"""Examples for the OpenAPI document, by method and path: a cluster with the topic `flights` and the group `banks`.

A test compares the answers with those of the routes.
"""

from __future__ import annotations

from typing import Any

BASE = "http://localhost:8080"
V3 = "/v3/clusters/{cluster_id}"
GROUP = V3 + "/consumer-groups/{group}"
Example = dict[tuple[str, str], Any]

PARAMETERS: dict[str, Any] = {
    "topic": "flights",
    "cluster_id": "lkc-1",
    "group": "banks",
    "partition": 0,
    "number": 0,
    "broker_id": 1,
    "config": "cleanup.policy",
    "offset_type": "earliest_and_latest",
    "consumer": "member-1",
    "store": "sessions",
    "name": "files",
    "task": 0,
    "key": "UA",
    "key_from": "A",
    "key_to": "Z",
    "key_base64": "_wE=",
    "key_from_base64": "AA==",
    "key_to_base64": "_w==",
    "from_ms": 1357016400000,
    "to_ms": 1357020000000,
    "rows_max": 100,
    "continuation": "ksQIvFdNQITdTE6TAMQDYW5uBQ",
    "limit": 50,
    "status": "all",
    "stage": "process",
    "local": False,
    "partial": False,
    "offsets": True,
    "atomic": False,
    "ack": "all",
    "Idempotency-Key": "order-7",
}
PROBLEM: dict[str, Any] = {
    "type": "about:blank",
    "title": "No such topic or partition",
    "status": 404,
    "detail": "flights: no such topic",
    "error_code": "UNKNOWN_TOPIC_OR_PARTITION",
    "message": "flights: no such topic",
}
REST_ERROR: dict[str, Any] = {"error_code": 40401, "message": "flights: no such topic"}
CONNECT_ERROR: dict[str, Any] = {"error_code": 404, "message": "Connector files not found"}


def _list(kind: str, path: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"self": BASE + path, "next": None}, "data": list(rows)}


def _one(kind: str, path: str, name: str, /, **fields: Any) -> dict[str, Any]:
    metadata = {"self": BASE + path, "resource_name": f"crn:///kafka=lkc-1{name}"}
    return {"kind": kind, "metadata": metadata, "cluster_id": "lkc-1"} | fields


def _at(path: str) -> dict[str, str]:
    return {"related": BASE + path}


_C = "/v3/clusters/lkc-1"
_G, _T = f"{_C}/consumer-groups/banks", f"{_C}/topics/flights"
_CLUSTER = _one(
    "KafkaCluster",
    _C,
    "",
    controller=_at(f"{_C}/brokers/1"),
    brokers=_at(f"{_C}/brokers"),
    consumer_groups=_at(f"{_C}/consumer-groups"),
    topics=_at(f"{_C}/topics"),
)
_BROKER = _one("KafkaBroker", f"{_C}/brokers/1", "/broker=1", broker_id=1, host="localhost", port=9092, rack=None)
_TOPIC = _one(
    "KafkaTopic",
    _T,
    "/topic=flights",
    topic_name="flights",
    is_internal=False,
    replication_factor=1,
    partitions_count=2,
    partitions=_at(f"{_T}/partitions"),
    configs=_at(f"{_T}/configs"),
    authorized_operations=[],
)
_PARTITION = _one(
    "KafkaPartition",
    f"{_T}/partitions/0",
    "/topic=flights/partition=0",
    topic_name="flights",
    partition_id=0,
    leader_id=1,
    replica_ids=[1],
    isr_ids=[1],
)
_PARTITION_OFFSETS = _one(
    "KafkaPartitionWithOffsets",
    f"{_T}/partitions/0/offset",
    "/topic=flights/partition=0/offset_type=earliest_and_latest",
    topic_name="flights",
    partition_id=0,
    earliest_offset=0,
    latest_offset=10,
)
_CONFIG_OF_TOPIC = _one(
    "KafkaTopicConfig",
    f"{_T}/configs/cleanup.policy",
    "/topic=flights/config=cleanup.policy",
    topic_name="flights",
    name="cleanup.policy",
    value="compact",
    is_default=False,
    is_read_only=False,
    is_sensitive=False,
    source="DYNAMIC_TOPIC_CONFIG",
    synonyms=[
        {"name": "cleanup.policy", "value": "compact", "source": "DYNAMIC_TOPIC_CONFIG"},
        {"name": "log.cleanup.policy", "value": "delete", "source": "DEFAULT_CONFIG"},
    ],
)
_GROUP = _one(
    "KafkaConsumerGroup",
    _G,
    "/consumer-group=banks",
    consumer_group_id="banks",
    is_simple=False,
    partition_assignor="range",
    state="STABLE",
    coordinator_id=1,
    coordinator=_at(f"{_C}/brokers/1"),
    consumers=_at(f"{_G}/consumers"),
    lag_summary=_at(f"{_G}/lag-summary"),
)
_WHO = {"consumer_group_id": "banks", "consumer_id": "member-1"}
_CONSUMER = _one(
    "KafkaConsumer",
    f"{_G}/consumers/member-1",
    "/consumer-group=banks/consumer=member-1",
    **_WHO,
    instance_id=None,
    client_id="penstock",
    assignments=_at(f"{_G}/consumers/member-1/assignments"),
)
_ASSIGNMENT = _one(
    "KafkaConsumerAssignment",
    f"{_G}/consumers/member-1/assignments/flights/partitions/0",
    "/consumer-group=banks/consumer=member-1/assignment=flights/partition=0",
    **_WHO,
    topic_name="flights",
    partition_id=0,
    partition=_at(f"{_T}/partitions/0"),
    lag=_at(f"{_G}/lags/flights/partitions/0"),
)
_LAG = _one(
    "KafkaConsumerLag",
    f"{_G}/lags/flights/partitions/0",
    "/consumer-group=banks/lag=flights/partition=0",
    **_WHO,
    topic_name="flights",
    partition_id=0,
    current_offset=4,
    log_end_offset=10,
    lag=6,
    instance_id=None,
    client_id="penstock",
)
_LAG_SUMMARY = _one(
    "KafkaConsumerGroupLagSummary",
    f"{_G}/lag-summary",
    "/consumer-group=banks/lag-summary",
    consumer_group_id="banks",
    max_lag_consumer_id="member-1",
    max_lag_instance_id=None,
    max_lag_client_id="penstock",
    max_lag_topic_name="flights",
    max_lag_partition_id=0,
    max_lag=6,
    total_lag=12,
    max_lag_partition=_at(f"{_T}/partitions/0"),
)
_V2_PARTITION = {"partition": 0, "leader": 1, "replicas": [{"broker": 1, "leader": True, "in_sync": True}]}
_V2_STORED = {
    "offsets": [{"partition": 0, "offset": 17, "error_code": None, "error": None}],
    "key_schema_id": None,
    "value_schema_id": None,
}
_SIZES = {"key": {"type": "STRING", "size": 3}, "value": {"type": "JSON", "size": 8}}
_REPORT = {
    "cluster_id": "lkc-1",
    "topic_name": "flights",
    "partition_id": 0,
    "offset": 17,
    "timestamp": "2013-01-01T05:15:00Z",
} | _SIZES
_LETTER = {
    "partition": 0,
    "offset": 3,
    "written_ms": 1357020000000,
    "key": "UA",
    "value": "{",
    "source": {"topic": "flights", "partition": 0, "offset": 17},
    "timestamp_ms": 1357016400000,
    "stage": "process",
    "message": "not JSON",
    "headers": [],
    "exception": "ValueError",
    "attempts": 3,
    "group": "banks",
}
_WINDOW = {
    "store": "sessions",
    "partition": 0,
    "key": "UA",
    "start_ms": 1357016400000,
    "end_ms": 1357016700000,
    "states": [3],
}
_TASK = {
    "partition": 0,
    "state": "running",
    "stream_time_ms": 1357016700000,
    "operator_times_ms": {"sessions": 1357016700000},
    "open_sessions": 2,
    "closed_sessions": 40,
    "late_records": 1,
    "dead_letters": 0,
    "restore_ms": 120,
    "instance": "host:8083",
}
_RUN = {"started_at_ms": 1357020000000, "seconds": 12.5, "status": "done", "rows": 42, "detail": ""}
_POSITION = {"0": {"flights": 17}}
_CUT = {"is_cut": True, "continuation": PARAMETERS["continuation"]}
_FOUND = {
    "partition": 0,
    "key": "UA",
    "start_ms": 1357016400000,
    "end_ms": 1357016700000,
    "status": "closed",
    "results": {"events": 3},
}
_STATUS = {"state": "RUNNING", "worker_id": "host:8085"}
_CONFIG = {"name": "files", "connector.class": "FileStreamSource", "file": "in.txt", "topic": "lines"}
_INFO = {"name": "files", "config": _CONFIG, "tasks": [{"connector": "files", "task": 0}], "type": "source"}
_OFFSETS = {"offsets": [{"partition": {"filename": "in.txt"}, "offset": {"position": 42}}]}
_C_STATUS = {"name": "files", "connector": _STATUS, "tasks": [{"id": 0} | _STATUS], "type": "source"}
_PLUGIN = {"class": "FileStreamSource", "type": "source", "version": "1.0"}

ANSWERS: Example = {
    ("get", "/topics"): ["flights"],
    ("get", "/topics/{topic}"): {
        "name": "flights",
        "configs": {"cleanup.policy": "delete"},
        "partitions": [_V2_PARTITION],
    },
    ("get", "/topics/{topic}/partitions"): [_V2_PARTITION],
    ("get", "/topics/{topic}/partitions/{partition}"): _V2_PARTITION,
    ("get", "/topics/{topic}/partitions/{partition}/offsets"): {"beginning_offset": 0, "end_offset": 10},
    ("get", "/brokers"): {"brokers": [1]},
    ("post", "/topics/{topic}"): _V2_STORED,
    ("post", "/topics/{topic}/partitions/{partition}"): _V2_STORED,
    ("get", "/v3/clusters"): _list("KafkaClusterList", "/v3/clusters", _CLUSTER),
    ("get", V3): _CLUSTER,
    ("get", V3 + "/topics"): _list("KafkaTopicList", f"{_C}/topics", _TOPIC),
    ("get", V3 + "/brokers"): _list("KafkaBrokerList", f"{_C}/brokers", _BROKER),
    ("get", V3 + "/brokers/{broker_id}"): _BROKER,
    ("get", V3 + "/topics/{topic}"): _TOPIC,
    ("get", V3 + "/topics/-/configs"): _list("KafkaTopicConfigList", f"{_C}/topics/-/configs", _CONFIG_OF_TOPIC),
    ("get", V3 + "/topics/{topic}/configs"): _list("KafkaTopicConfigList", f"{_T}/configs", _CONFIG_OF_TOPIC),
    ("get", V3 + "/topics/{topic}/configs/{config}"): _CONFIG_OF_TOPIC,
    ("get", V3 + "/topics/{topic}/partitions/{number}/offset"): _PARTITION_OFFSETS,
    ("get", V3 + "/topics/{topic}/partitions"): _list("KafkaPartitionList", f"{_T}/partitions", _PARTITION),
    ("get", V3 + "/topics/{topic}/partitions/{number}"): _PARTITION,
    ("post", V3 + "/topics/{topic}/records"): {"error_code": 200} | _REPORT,
    ("post", V3 + "/topics/{topic}/records:batch"): {"successes": [{"id": "1"} | _REPORT], "failures": []},
    ("get", V3 + "/consumer-groups"): _list("KafkaConsumerGroupList", f"{_C}/consumer-groups", _GROUP),
    ("get", GROUP): _GROUP,
    ("get", GROUP + "/consumers"): _list("KafkaConsumerList", f"{_G}/consumers", _CONSUMER),
    ("get", GROUP + "/consumers/{consumer}"): _CONSUMER,
    ("get", GROUP + "/consumers/{consumer}/assignments"): _list(
        "KafkaConsumerAssignmentList", f"{_G}/consumers/member-1/assignments", _ASSIGNMENT
    ),
    ("get", GROUP + "/consumers/{consumer}/assignments/{topic}/partitions/{partition}"): _ASSIGNMENT,
    ("get", GROUP + "/lags"): _list("KafkaConsumerLagList", f"{_G}/lags", _LAG),
    ("get", GROUP + "/lags/{topic}/partitions/{partition}"): _LAG,
    ("get", GROUP + "/lag-summary"): _LAG_SUMMARY,
    ("get", "/v1/cluster"): {
        "cluster_id": "lkc-1",
        "controller": 1,
        "brokers": [{"node_id": 1, "host": "localhost", "port": 9092, "rack": None}],
    },
    ("get", "/v1/topics"): {"topics": ["flights"]},
    ("get", "/v1/topics/{topic}"): {
        "topic": "flights",
        "topic_id": "8sJ0Yh2aQF6kR3m0u2Zb1g",
        "internal": False,
        "partitions": [
            {"partition": 0, "leader": 1, "replicas": [1], "isr": [1], "earliest_offset": 0, "latest_offset": 10}
        ],
        "configs": {"cleanup.policy": "delete"},
    },
    ("get", "/v1/groups"): {"groups": [{"group": "banks", "state": "Stable", "protocol_type": "consumer"}]},
    ("get", "/v1/groups/{group}"): {
        "group": "banks",
        "state": "Stable",
        "protocol": "range",
        "coordinator": 1,
        "members": [
            {
                "member_id": "member-1",
                "client_id": "penstock",
                "host": "/127.0.0.1",
                "group_instance_id": None,
                "partitions": [{"topic": "flights", "partition": 0}],
            }
        ],
        "lag": 6,
        "partitions": [{"topic": "flights", "partition": 0, "committed": 4, "end": 10, "lag": 6}],
    },
    ("post", "/v1/groups/{group}/offsets"): {
        "group": "banks",
        "dry_run": True,
        "partitions": [{"topic": "flights", "partition": 0, "before": 4, "after": 0}],
    },
    ("get", "/v1/dead-letters"): {
        "topics": [{"topic": "flights-dlq", "kind": "dead_letters", "source": "flights", "records": 3, "exact": True}]
    },
    ("get", "/v1/dead-letters/{topic}"): {"topic": "flights-dlq", "records": [_LETTER], "scanned": 3},
    ("post", "/v1/dead-letters/{topic}/replay"): {
        "topic": "flights-dlq",
        "dry_run": False,
        "sent": 3,
        "failed": 0,
        "skipped": 0,
        "faults": 0,
        "errors": [],
    },
    ("get", "/v1/streams"): {"application_id": "banks", "tasks": [_TASK], "compactions": [_RUN], "missing": []},
    ("get", "/v1/streams/topology"): {
        "application_id": "banks",
        "topology": {"nodes": []},
        "processing_guarantee": "exactly_once",
    },
    ("get", "/v1/streams/tasks"): {"tasks": [_TASK], "missing": []},
    ("get", "/v1/streams/stores"): {"stores": [{"store": "sessions", "rows": {"0": 2}, "total": 2}], "missing": []},
    ("get", "/v1/streams/stores/{store}"): {
        "store": "sessions",
        "kind": "session",
        "key_type": "string",
        "rows": [{"partition": 0, "key": "UA", "start": 1357016400000, "end": 1357020000000, "events": 3}],
        "position": _POSITION,
        **_CUT,
        "missing": [],
    },
    ("get", "/v1/streams/stores/{store}/windows"): {
        "store": "sessions",
        "windows": [_FOUND],
        **_CUT,
        "position": _POSITION,
    },
    ("get", "/v1/streams/windows"): {"windows": [_WINDOW], **_CUT, "unseen": 0, "missing": []},
    ("get", "/v1/compactions"): {"compactions": [_RUN], "last": _RUN},
    ("post", "/v1/compactions"): {"started": True},
    ("get", "/v1/overview"): {
        "now_ms": 1357020000000,
        "services": [{"name": "producer", "url": "", "status": "ok", "detail": "", "checks": {}}],
        "kafka": {"cluster_id": "lkc-1", "brokers": 1, "error": ""},
    },
    ("get", "/v1/history"): {"points": [{"at_ms": 1357020000000, "records_per_second": 1200.0, "lag": 6}]},
    ("get", "/health"): {"status": "ok", "service": "gateway", "checks": {"kafka": {"status": "ok"}}},
    ("get", "/metrics"): 'penstock_ingest_stored_records_total{topic="flights"} 40.0\n',
    ("get", "/connectors"): ["files"],
    ("post", "/connectors"): _INFO,
    ("get", "/connectors/{name}"): _INFO,
    ("get", "/connectors/{name}/config"): _CONFIG,
    ("put", "/connectors/{name}/config"): _INFO,
    ("patch", "/connectors/{name}/config"): _INFO,
    ("get", "/connectors/{name}/topics"): {"files": {"topics": ["lines"]}},
    ("get", "/connectors/{name}/status"): _C_STATUS,
    ("post", "/connectors/{name}/restart"): _C_STATUS,
    ("get", "/connectors/{name}/offsets"): _OFFSETS,
    ("patch", "/connectors/{name}/offsets"): {"message": "The offsets for this connector have been altered"},
    ("delete", "/connectors/{name}/offsets"): {"message": "The offsets for this connector have been reset"},
    ("get", "/connectors/{name}/tasks"): [{"id": {"connector": "files", "task": 0}, "config": {"file": "in.txt"}}],
    ("get", "/connectors/{name}/tasks/{task}/status"): {"id": 0} | _STATUS,
    ("get", "/connector-plugins"): [_PLUGIN],
    ("get", "/connector-plugins/{name}/config"): [{"name": "file", "type": "STRING", "required": True}],
    ("put", "/connector-plugins/{name}/config/validate"): {"name": "files", "error_count": 0, "configs": []},
}
BODIES: Example = {
    ("post", "/v1/groups/{group}/offsets"): {"to": "earliest", "dry_run": True},
    ("post", "/v1/dead-letters/{topic}/replay"): {"dry_run": True},
    ("post", "/connectors"): {"name": "files", "config": _CONFIG},
    ("put", "/connectors/{name}/config"): _CONFIG,
    ("patch", "/connectors/{name}/config"): {"file": "other.txt", "topic": None},
    ("patch", "/connectors/{name}/offsets"): _OFFSETS,
    ("put", "/connector-plugins/{name}/config/validate"): _CONFIG,
}
