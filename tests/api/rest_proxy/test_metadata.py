"""Topics, brokers, configs, groups and lags over REST Proxy's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.api.http.app import create_app
from penstock.api.rest_proxy.routes import metadata_routers
from penstock.shared.clients.admin import MemberDescription
from tests.api.admin.test_administration import F0, F1, MemoryAdmin

GROUP = "/v3/clusters/c-1/consumer-groups/banks"


@pytest.fixture(scope="module")
def app() -> Any:
    """The API over an admin in memory. No test changes it."""
    admin = MemoryAdmin()
    admin.members = [MemberDescription("m-1", "client", "/host", None, frozenset({F0}))]
    return create_app(rest_proxy=metadata_routers(admin))


@pytest.fixture
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


async def test_v2_metadata(client: httpx.AsyncClient) -> None:
    """v2 describes topics, partitions, offsets and brokers."""
    assert (await client.get("/topics")).json() == ["flights", "other"]
    partition = {"partition": 1, "leader": 1, "replicas": [{"broker": 1, "leader": True, "in_sync": True}]}
    assert (await client.get("/topics/flights")).json()["partitions"][1] == partition
    assert (await client.get("/topics/flights/partitions")).json()[1] == partition
    assert (await client.get("/topics/flights/partitions/1")).json() == partition
    assert (await client.get("/brokers")).json() == {"brokers": [1]}
    offsets = (await client.get("/topics/flights/partitions/1/offsets")).json()
    assert offsets == {"beginning_offset": 0, "end_offset": 10}
    assert (await client.get("/topics/flights/partitions/5/offsets")).json()["error_code"] == 40402
    assert (await client.get("/topics/none")).json()["error_code"] == 40401
    assert (await client.get("/topics/flights/partitions/5")).json()["error_code"] == 40402


async def test_v3_resources_have_kind_and_metadata(client: httpx.AsyncClient) -> None:
    """v3 resources have kind, metadata and links that can be fetched."""
    (cluster,) = (await client.get("/v3/clusters")).json()["data"]
    assert (cluster["kind"], cluster["cluster_id"]) == ("KafkaCluster", "c-1")
    assert (await client.get("/v3/clusters/c-1")).json() == cluster
    topics = (await client.get("/v3/clusters/c-1/topics")).json()
    assert topics["kind"] == "KafkaTopicList"
    assert [(t["topic_name"], t["partitions_count"]) for t in topics["data"]] == [("flights", 2), ("other", 1)]
    partitions = (await client.get(topics["data"][0]["partitions"]["related"])).json()["data"]
    assert [p["partition_id"] for p in partitions] == [0, 1]
    assert (await client.get(partitions[1]["metadata"]["self"])).json() == partitions[1]
    assert (await client.get("/v3/clusters/c-1/topics/none")).json()["error_code"] == 40403
    assert (await client.get("/v3/clusters/c-1/topics/flights/partitions/9")).json()["error_code"] == 40402


async def test_v3_groups_and_lag(client: httpx.AsyncClient) -> None:
    """v3 describes groups, consumers, assignments, lags and the lag summary."""
    group = (await client.get(GROUP)).json()
    assert (group["kind"], group["state"], group["partition_assignor"]) == ("KafkaConsumerGroup", "STABLE", "range")
    assert [g["consumer_group_id"] for g in (await client.get(GROUP.rpartition("/")[0])).json()["data"]] == ["banks"]
    (consumer,) = (await client.get(group["consumers"]["related"])).json()["data"]
    (assignment,) = (await client.get(consumer["assignments"]["related"])).json()["data"]
    assert (assignment["topic_name"], assignment["partition_id"]) == ("flights", 0)
    lag = (await client.get(assignment["lag"]["related"])).json()
    assert (lag["current_offset"], lag["log_end_offset"], lag["lag"], lag["consumer_id"]) == (4, 10, 6, "m-1")
    assert len((await client.get(GROUP + "/lags")).json()["data"]) == 2
    summary = (await client.get(group["lag_summary"]["related"])).json()
    assert (summary["kind"], summary["max_lag"], summary["total_lag"]) == ("KafkaConsumerGroupLagSummary", 6, 12)
    assert summary["max_lag_consumer_id"] == "m-1"
    assert (await client.get(GROUP.replace("banks", "none"))).status_code == 404


async def test_v3_links_of_ids_with_special_characters() -> None:
    """The links of a group and a consumer whose ids have slashes and other special characters lead to them."""
    admin = MemoryAdmin()
    admin.groups["team/a?p #1%"] = admin.groups.pop("banks")
    admin.members = [MemberDescription("team/app-1", "team/app", "/host", None, frozenset({F0}))]
    transport = httpx.ASGITransport(create_app(rest_proxy=metadata_routers(admin)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def follow(url: str) -> Any:
            response = await client.get(url)
            assert (response.status_code, response.json()["metadata"]["self"]) == (200, url)
            return response.json()

        (group,) = (await follow("http://localhost" + GROUP.rpartition("/")[0]))["data"]
        assert group["consumer_group_id"] == "team/a?p #1%"
        own = await follow(group["metadata"]["self"])
        assert own == group
        (consumer,) = (await follow(group["consumers"]["related"]))["data"]
        assert (await follow(consumer["metadata"]["self"]))["consumer_id"] == "team/app-1"
        (assignment,) = (await follow(consumer["assignments"]["related"]))["data"]
        assert await follow(assignment["metadata"]["self"]) == assignment
        assert (await follow(assignment["lag"]["related"]))["consumer_id"] == "team/app-1"
        summary = await follow(group["lag_summary"]["related"])
        assert summary["total_lag"] == 12
        assert len((await follow(own["metadata"]["self"] + "/lags"))["data"]) == 2


async def test_v3_has_no_lag_in_a_partition_without_a_committed_offset() -> None:
    """v3 lists and sums lags only of partitions with a committed offset. Without any of them it answers 404."""
    admin = MemoryAdmin()
    admin.members = [MemberDescription("m-1", "client", "/host", None, frozenset({F0, F1}))]
    admin.groups["banks"] = {F0: 4}
    app = create_app(rest_proxy=metadata_routers(admin))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert [row["partition_id"] for row in (await client.get(GROUP + "/lags")).json()["data"]] == [0]
        assert (await client.get(GROUP + "/lag-summary")).json()["total_lag"] == 6
        assert (await client.get(GROUP + "/lags/flights/partitions/1")).status_code == 404
        admin.groups["banks"] = {}
        for path in ("/lags", "/lags/flights/partitions/0", "/lag-summary"):
            assert (await client.get(GROUP + path)).status_code == 404, path


async def test_v3_has_no_lag_in_a_partition_without_a_leader() -> None:
    """v3 lists and sums lags only of partitions with a leader. Without any of them it answers 404."""
    admin = MemoryAdmin()
    admin.groups["banks"] = {F0: 4, F1: 2}
    admin.offline = {F1}
    app = create_app(rest_proxy=metadata_routers(admin))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert [row["partition_id"] for row in (await client.get(GROUP + "/lags")).json()["data"]] == [0]
        assert (await client.get(GROUP + "/lag-summary")).json()["total_lag"] == 6
        assert (await client.get(GROUP + "/lags/flights/partitions/1")).status_code == 404
        admin.offline = {F0, F1}
        assert (await client.get(GROUP + "/lag-summary")).status_code == 404


RESOURCE = {"kind": str, "metadata": {"self": str, "resource_name": str}, "cluster_id": str}
RELATED = {"related": str}
NULLABLE_STRING = (str, type(None))
OF_GROUP = {**RESOURCE, "consumer_group_id": str}
OF_PARTITION = {**RESOURCE, "topic_name": str, "partition_id": int}
LAG_OF = {"current_offset": int, "log_end_offset": int, "lag": int, "consumer_id": str, "client_id": str}
BROKER = {**RESOURCE, "broker_id": int, "host": NULLABLE_STRING, "port": int, "rack": NULLABLE_STRING}
SYNONYM = {"name": str, "value": NULLABLE_STRING, "source": str}
CONFIG = {
    **RESOURCE, "topic_name": str, "name": str, "value": NULLABLE_STRING, "is_default": bool, "is_read_only": bool,
    "is_sensitive": bool, "source": str, "synonyms": [SYNONYM],
}  # fmt: skip
TOPIC = {
    **RESOURCE, "topic_name": str, "is_internal": bool, "replication_factor": int, "partitions_count": int,
    "partitions": RELATED, "configs": RELATED,
}  # fmt: skip
CLUSTER = {**RESOURCE, "controller": RELATED, "brokers": RELATED, "consumer_groups": RELATED, "topics": RELATED}
GROUP_DATA = {
    **OF_GROUP, "is_simple": bool, "partition_assignor": str, "state": str, "coordinator": RELATED,
    "consumers": RELATED, "lag_summary": RELATED,
}  # fmt: skip
CONSUMER = {
    **OF_GROUP, "consumer_id": str, "instance_id": NULLABLE_STRING, "client_id": str, "assignments": RELATED,
}  # fmt: skip
ASSIGNMENT = {**OF_GROUP, **OF_PARTITION, "consumer_id": str, "partition": RELATED, "lag": RELATED}
LAG = {**OF_GROUP, **OF_PARTITION, **LAG_OF, "instance_id": NULLABLE_STRING}
SUMMARY = {
    **OF_GROUP, "max_lag_consumer_id": str, "max_lag_instance_id": NULLABLE_STRING, "max_lag_client_id": str,
    "max_lag_topic_name": str, "max_lag_partition_id": int, "max_lag": int, "total_lag": int,
    "max_lag_partition": RELATED,
}  # fmt: skip
OFFSETS = {**OF_PARTITION, "earliest_offset": int, "latest_offset": int}


def listed(row: Any) -> dict[str, Any]:
    return {"kind": str, "metadata": {"self": str, "next": type(None)}, "data": [row]}


OPERATIONS: dict[str, tuple[str, Any]] = {
    "ClustersGet": ("", listed(CLUSTER)),
    "GetKafkaCluster": ("/c-1", CLUSTER),
    "ClustersClusterIdBrokersGet": ("/c-1/brokers", listed(BROKER)),
    "ClustersClusterIdBrokersBrokerIdGet": ("/c-1/brokers/1", BROKER),
    "ListKafkaTopics": ("/c-1/topics", listed(TOPIC)),
    "GetKafkaTopic": ("/c-1/topics/flights", TOPIC),
    "ListKafkaAllTopicConfigs": ("/c-1/topics/-/configs", listed(CONFIG)),
    "ListKafkaTopicConfigs": ("/c-1/topics/flights/configs", listed(CONFIG)),
    "GetKafkaTopicConfig": ("/c-1/topics/flights/configs/cleanup.policy", CONFIG),
    "ListKafkaPartitions": ("/c-1/topics/flights/partitions", listed(OF_PARTITION)),
    "GetKafkaPartition": ("/c-1/topics/flights/partitions/1", OF_PARTITION),
    "PartitionWithOffsets": ("/c-1/topics/flights/partitions/1/offset", OFFSETS),
    "ListKafkaConsumerGroups": ("/c-1/consumer-groups", listed(GROUP_DATA)),
    "GetKafkaConsumerGroup": ("/c-1/consumer-groups/banks", GROUP_DATA),
    "ListKafkaConsumers": ("/c-1/consumer-groups/banks/consumers", listed(CONSUMER)),
    "GetKafkaConsumer": ("/c-1/consumer-groups/banks/consumers/m-1", CONSUMER),
    "ListKafkaConsumerAssignment": ("/c-1/consumer-groups/banks/consumers/m-1/assignments", listed(ASSIGNMENT)),
    "GetKafkaConsumerAssignment": (
        "/c-1/consumer-groups/banks/consumers/m-1/assignments/flights/partitions/0",
        ASSIGNMENT,
    ),
    "ListKafkaConsumerLags": ("/c-1/consumer-groups/banks/lags", listed(LAG)),
    "GetKafkaConsumerLag": ("/c-1/consumer-groups/banks/lags/flights/partitions/0", LAG),
    "GetKafkaConsumerGroupLagSummary": ("/c-1/consumer-groups/banks/lag-summary", SUMMARY),
}
"""The read operations of the Go client `kafkarestv3`, with the members of its models and their types."""


def misfits(found: Any, wanted: Any, where: str) -> list[str]:
    """The differences between a response and a model."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [f"{where}: {found!r}"]
        lacking = [f"{where} has no {name}" for name in wanted.keys() - found.keys()]
        return lacking + [m for name in wanted.keys() & found.keys() for m in misfits(found[name], wanted[name], name)]
    if isinstance(wanted, list):
        rows = found if isinstance(found, list) else [None]
        return [m for i, row in enumerate(rows) for m in misfits(row, wanted[0], f"{where}[{i}]")]
    exact = type(found) is wanted if isinstance(wanted, type) else type(found) in wanted
    return [] if exact else [f"{where}: {found!r}"]


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_v3_has_the_operations_of_the_go_client(client: httpx.AsyncClient, operation: str) -> None:
    """Each operation returns all members of the client's model, and its links can be fetched."""
    path, model = OPERATIONS[operation]
    response = await client.get(f"/v3/clusters{path}")
    assert response.status_code == 200, response.text
    body = response.json()
    assert misfits(body, model, operation) == []
    rows = body.get("data", [body])
    assert rows
    assert body["metadata"]["self"] == str(response.url)
    for row in rows[:1]:
        assert (await client.get(row["metadata"]["self"])).status_code == 200
        for name, value in row.items():
            if isinstance(value, dict) and "related" in value:
                assert (await client.get(value["related"])).status_code == 200, name


async def test_v3_configs_have_their_source(client: httpx.AsyncClient) -> None:
    """A topic's own value overrides the broker's, and an unset config is a default."""
    configs = {row["name"]: row for row in (await client.get("/v3/clusters/c-1/topics/flights/configs")).json()["data"]}
    assert (configs["cleanup.policy"]["value"], configs["cleanup.policy"]["is_default"]) == ("compact", False)
    assert [s["source"] for s in configs["cleanup.policy"]["synonyms"]] == ["DYNAMIC_TOPIC_CONFIG", "DEFAULT_CONFIG"]
    assert configs["retention.ms"]["is_default"]
    everything = (await client.get("/v3/clusters/c-1/topics/-/configs")).json()["data"]
    assert [row["topic_name"] for row in everything] == ["flights", "flights", "other", "other"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v3", 404, 404),
        ("/v3/none", 404, 404),
        ("/v3/clusters/c-1/brokers/7", 404, 404),
        ("/v3/clusters/c-1/brokers/one", 400, 400),
        ("/v3/clusters/c-1/topics/none/configs", 404, 40403),
        ("/v3/clusters/c-1/topics/flights/configs/none", 404, 404),
        ("/v3/clusters/c-1/topics/flights/partitions/7/offset", 404, 40402),
        ("/v3/clusters/c-1/topics/none/partitions/0/offset", 404, 40403),
        ("/v3/clusters/c-1/topics/flights/partitions/0/offset?offset_type=first", 400, 400),
        (f"{GROUP}/consumers/m-1/assignments/flights/partitions/1", 404, 404),
        (f"{GROUP}/consumers/m-2/assignments/flights/partitions/0", 404, 404),
        ("/consumers", 404, 404),
        ("/consumers/group/instances/one/records", 404, 404),
    ],
)
async def test_errors_have_numbers(client: httpx.AsyncClient, path: str, status: int, code: int) -> None:
    """Errors below /v3 and /consumers have REST Proxy's form, also for unknown routes."""
    response = await client.get(path)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert (response.json()["error_code"], set(response.json())) == (code, {"error_code", "message"})
