"""The fake broker's tables of the wire format, compared with Apache Kafka's bytes."""

from __future__ import annotations

import pytest

from penstock.shared.testing.fake_broker import Api, ErrorCode, Message
from penstock.shared.testing.fake_broker.api_handlers import supported_versions
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS, encode_response
from tests.contract.conftest import Wire, batch, connected, created, error_of
from tests.shared.testing.fake_broker.frames import decode_response
from tests.shared_broker import Broker

SASL = (Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE)
APIS = [api for api in Api if api not in SASL]


async def body_of(wire: Wire, api: Api, topic: str, version: int) -> Message:
    """A request whose response has as much content as possible."""
    group = {"group_id": topic, "generation_id": -1, "member_id": "", "group_instance_id": None}
    transaction = {"transactional_id": topic, "producer_id": 1, "producer_epoch": 0}

    def partitions(**row: object) -> list[Message]:
        return [Message(name=topic, partitions=[Message(partition=0, **row)])]

    numbers = [Message(name=topic, partitions=[0])]
    bodies: dict[Api, dict[str, object]] = {
        Api.PRODUCE: {"acks": 1, "timeout_ms": 100, "topics": partitions(records=batch(b"v"))},
        Api.FETCH: {"min_bytes": 1, "topics": partitions(fetch_offset=0, partition_max_bytes=1 << 20)},
        Api.LIST_OFFSETS: {"topics": partitions(timestamp=-2)},
        Api.METADATA: {"topics": [Message(name=topic)], "allow_auto_topic_creation": True},
        Api.OFFSET_COMMIT: {**group, "topics": partitions(offset=1, metadata="m")},
        Api.OFFSET_FETCH: {**group, "topics": numbers},
        Api.FIND_COORDINATOR: {"key": topic},
        Api.JOIN_GROUP: {
            **group,
            "session_timeout_ms": 1_000,
            "rebalance_timeout_ms": 1_000,
            "protocol_type": "consumer",
            "protocols": [Message(name="range", metadata=b"m")],
        },
        Api.HEARTBEAT: group,
        Api.LEAVE_GROUP: {**group, "members": [Message(member_id="m", group_instance_id=None)]},
        Api.SYNC_GROUP: group,
        Api.DESCRIBE_GROUPS: {"groups": [topic, f"{topic}-none"]},
        Api.LIST_GROUPS: {},
        Api.API_VERSIONS: {"client_software_name": "contract", "client_software_version": "1"},
        Api.CREATE_TOPICS: {
            "topics": [Message(name=f"{topic}-{version}", num_partitions=1, replication_factor=1)],
            "timeout_ms": 1_000,
            "validate_only": True,
        },
        Api.DELETE_TOPICS: {"topic_names": [f"{topic}-none"], "timeout_ms": 1_000},
        Api.DELETE_RECORDS: {"topics": partitions(offset=0), "timeout_ms": 1_000},
        Api.INIT_PRODUCER_ID: {"transactional_id": None, "transaction_timeout_ms": 1_000},
        Api.ADD_PARTITIONS_TO_TXN: {**transaction, "topics": numbers},
        Api.ADD_OFFSETS_TO_TXN: {**transaction, "group_id": topic},
        Api.END_TXN: {**transaction, "committed": True},
        Api.TXN_OFFSET_COMMIT: {**group, **transaction, "topics": partitions(offset=1)},
        Api.DESCRIBE_CONFIGS: {
            "resources": [Message(resource_type=2, resource_name=topic, configuration_keys=None)],
            "include_synonyms": True,
            "include_documentation": True,
        },
        Api.CREATE_PARTITIONS: {
            "topics": [Message(name=topic, count=2, assignments=None)],
            "timeout_ms": 1_000,
            "validate_only": True,
        },
        Api.DELETE_GROUPS: {"groups": [f"{topic}-none"]},
        Api.INCREMENTAL_ALTER_CONFIGS: {
            "resources": [
                Message(
                    resource_type=2,
                    resource_name=topic,
                    configs=[Message(name="retention.ms", config_operation=0, value="1")],
                )
            ],
            "validate_only": True,
        },
    }
    return Message(**bodies[api])


@pytest.mark.parametrize("api", APIS, ids=[api.name.lower() for api in APIS])
async def test_every_version_reads_as_kafka_writes(kafka: Broker, name: str, api: Api) -> None:
    """In every version Kafka accepts our request, and its response is decoded completely and
    encoded to the same bytes.
    """
    supported = SUPPORTED_APIS[api]
    async with connected(kafka) as wire:
        await created(wire, name)
        for version in range(supported.min_version, supported.max_version + 1):
            response = await wire.frame(api, version, await body_of(wire, api, name, version))
            correlation_id, body, end = decode_response(supported, version, response)
            assert end == len(response), version
            assert encode_response(supported, version, correlation_id, body) == response, version
            assert error_of(body) not in (ErrorCode.INVALID_REQUEST, ErrorCode.UNKNOWN_SERVER_ERROR), (version, body)


async def test_every_version_is_one_of_kafkas(kafka: Broker) -> None:
    """The fake broker supports only versions of Apache Kafka, and lists the same lowest ones, except of JoinGroup."""
    async with connected(kafka) as wire:
        theirs = {row.api_key: row for row in (await wire.request(Api.API_VERSIONS, 0)).api_keys}
    for api, supported in SUPPORTED_APIS.items():
        assert theirs[api].min_version <= supported.min_version <= supported.max_version <= theirs[api].max_version, (
            supported.api
        )
    lowest = {row.api_key: row.min_version for row in supported_versions(ErrorCode.NONE).api_keys}
    assert {api for api, version in lowest.items() if version != theirs[api].min_version} == {Api.JOIN_GROUP}
