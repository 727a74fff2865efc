"""The handler function of each API. The connection itself handles the two APIs of SASL: see `node_server`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from penstock.shared.testing.fake_broker import handle_groups, handle_logs, handle_topics, handle_transactions
from penstock.shared.testing.fake_broker.cluster_state import ClusterState
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.handler_responses import Response
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS, Api, ErrorCode
from penstock.shared.testing.fake_broker.request import Request

SOFTWARE_NAMED_SINCE = 3
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")

Handler = Callable[[ClusterState, Request], Response]


LISTED_FROM: Mapping[Api, int] = {Api.PRODUCE: 0}
"""By API: the lowest version that ApiVersions lists, if Kafka 4 lists versions that it rejects. librdkafka compresses
only if Produce is listed from version 0 on (KAFKA-18659)."""


def api_versions(_: ClusterState, request: Request) -> Response:
    """The supported APIs; from version 3 on, INVALID_REQUEST for a client without a valid software name and version."""
    named = (request.body.client_software_name, request.body.client_software_version)
    if request.version >= SOFTWARE_NAMED_SINCE and not all(map(_SOFTWARE.fullmatch, named)):
        return Message(error_code=ErrorCode.INVALID_REQUEST)
    return supported_versions(ErrorCode.NONE)


def supported_versions(code: ErrorCode) -> Message:
    """The response to ApiVersions: the supported APIs and their versions, with this error code."""
    rows = [
        Message(
            api_key=int(one.api),
            min_version=LISTED_FROM.get(one.api, one.min_version),
            max_version=one.max_version,
        )
        for one in SUPPORTED_APIS.values()
    ]
    return Message(error_code=code, api_keys=rows)


HANDLERS: Mapping[Api, Handler] = {
    Api.PRODUCE: handle_logs.produce,
    Api.FETCH: handle_logs.fetch,
    Api.LIST_OFFSETS: handle_logs.list_offsets,
    Api.METADATA: handle_topics.metadata,
    Api.OFFSET_COMMIT: handle_groups.offset_commit,
    Api.OFFSET_FETCH: handle_groups.offset_fetch,
    Api.FIND_COORDINATOR: handle_groups.find_coordinator,
    Api.JOIN_GROUP: handle_groups.join_group,
    Api.HEARTBEAT: handle_groups.heartbeat,
    Api.LEAVE_GROUP: handle_groups.leave_group,
    Api.SYNC_GROUP: handle_groups.sync_group,
    Api.DESCRIBE_GROUPS: handle_groups.describe_groups,
    Api.LIST_GROUPS: handle_groups.list_groups,
    Api.API_VERSIONS: api_versions,
    Api.CREATE_TOPICS: handle_topics.create_topics,
    Api.DELETE_TOPICS: handle_topics.delete_topics,
    Api.DELETE_RECORDS: handle_logs.delete_records,
    Api.INIT_PRODUCER_ID: handle_transactions.init_producer_id,
    Api.ADD_PARTITIONS_TO_TXN: handle_transactions.add_partitions_to_txn,
    Api.ADD_OFFSETS_TO_TXN: handle_transactions.add_offsets_to_txn,
    Api.END_TXN: handle_transactions.end_txn,
    Api.TXN_OFFSET_COMMIT: handle_transactions.txn_offset_commit,
    Api.DESCRIBE_CONFIGS: handle_topics.describe_configs,
    Api.CREATE_PARTITIONS: handle_topics.create_partitions,
    Api.DELETE_GROUPS: handle_groups.delete_groups,
    Api.INCREMENTAL_ALTER_CONFIGS: handle_topics.incremental_alter_configs,
}
