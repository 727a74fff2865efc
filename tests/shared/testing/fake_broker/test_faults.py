"""Controls of requests and the responses that they produce, without sockets."""

from __future__ import annotations

import pytest

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.faults import (
    Close,
    Control,
    failed_response,
    merge_failures,
    without_partitions,
)
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS, Api, ErrorCode
from penstock.shared.testing.fake_broker.request import Request


def request(api: Api, node: int = 1, **body: object) -> Request:
    supported = SUPPORTED_APIS[api]
    version = supported.max_version
    decoded, _ = supported.request.decode(supported.request.encode(Message(**body), version), version)
    return Request(api, version, node, "client", "/host", decoded, 0)


def about(api: Api) -> Request:
    """A request for two partitions of a topic and one of another."""
    numbers = api in (Api.OFFSET_FETCH, Api.ADD_PARTITIONS_TO_TXN)
    rows = [0, 1] if numbers else [Message(partition=0), Message(partition=1)]
    return request(api, topics=[Message(name="t", partitions=rows), Message(name="u", partitions=rows[:1])])


def test_a_control_is_for_its_requests() -> None:
    """A control applies to its API and node, or to all."""
    controls: list[Control] = []
    one = Control(controls, Api.FETCH, Close(), None, 2)
    assert one.is_for(request(Api.FETCH, node=2))
    assert not one.is_for(request(Api.FETCH, node=1))
    assert not one.is_for(request(Api.PRODUCE, node=2))
    assert Control(controls, None, Close(), None, None).is_for(request(Api.METADATA))


def test_a_control_ends() -> None:
    """A control ends after its number of times, at the end of its block, or when it is removed."""
    controls: list[Control] = []
    twice = Control(controls, None, Close(), 2, None)
    twice.count()
    assert twice.is_on
    twice.count()
    assert repr(twice) == "<Control of every api, acted 2 of 2 times, removed>"
    with Control(controls, None, Close(), None, None) as block:
        assert block.is_on
    assert not block.is_on
    block.remove()
    assert controls == []


PARTITIONED = [
    Api.PRODUCE,
    Api.FETCH,
    Api.LIST_OFFSETS,
    Api.OFFSET_COMMIT,
    Api.OFFSET_FETCH,
    Api.DELETE_RECORDS,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.TXN_OFFSET_COMMIT,
]


@pytest.mark.parametrize("api", PARTITIONED, ids=lambda api: api.name.lower())
def test_partitions_fail_alone(api: Api) -> None:
    """Failures of some partitions are merged into the response for the others."""
    sent, wanted = about(api), {TopicPartition("t", 1), TopicPartition("u", 0)}
    rest = without_partitions(sent, wanted)
    assert rest.partitions() == [TopicPartition("t", 0)]
    assert len(sent.partitions()) == 3
    response = merge_failures(
        Message(topics=[Message(name="t", partitions=[Message(partition=0, error_code=0)])]),
        failed_response(sent, 7, wanted),
    )
    codes = {(t.name, p.partition): p.error_code for t in response.topics for p in t.partitions}
    assert codes == {("t", 0): 0, ("t", 1): 7, ("u", 0): 7}
    assert getattr(response, "error_code", 0) == 0


@pytest.mark.parametrize("api", list(Api), ids=lambda api: api.name.lower())
def test_every_api_can_fail(api: Api) -> None:
    """A failed response can be encoded in every version of every API, and has the error."""
    bodies: dict[Api, dict[str, object]] = {
        Api.METADATA: {"topics": [Message(name="t")]},
        Api.CREATE_TOPICS: {"topics": [Message(name="t")]},
        Api.CREATE_PARTITIONS: {"topics": [Message(name="t")]},
        Api.DELETE_TOPICS: {"topic_names": ["t"]},
        Api.DESCRIBE_GROUPS: {"groups": ["g"]},
        Api.DELETE_GROUPS: {"groups": ["g"]},
        Api.DESCRIBE_CONFIGS: {"resources": [Message(resource_type=2, resource_name="t")]},
        Api.INCREMENTAL_ALTER_CONFIGS: {"resources": [Message(resource_type=2, resource_name="t")]},
    }
    sent = about(api) if api in PARTITIONED else request(api, **bodies.get(api, {}))
    response = failed_response(sent, ErrorCode.BROKER_NOT_AVAILABLE)
    supported = SUPPORTED_APIS[api]
    for version in range(supported.min_version, supported.max_version + 1):
        read, _ = supported.response.decode(supported.response.encode(response, version), version)
        rows = [*(getattr(read, "topics", None) or ()), *(getattr(read, "groups", None) or ())]
        rows += getattr(read, "resources", None) or ()
        rows += [p for t in getattr(read, "topics", None) or () for p in getattr(t, "partitions", None) or ()]
        assert ErrorCode.BROKER_NOT_AVAILABLE in [getattr(row, "error_code", 0) for row in [read, *rows]]
