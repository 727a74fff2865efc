"""The administration of topics, groups and dead letters over HTTP, with implementations in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import pytest

from penstock.api.admin.dead_letters import dead_letters_router
from penstock.api.admin.routes import admin_router
from penstock.api.http.app import create_app
from penstock.shared.clients.admin import (
    ClusterDescription,
    ConfigEntry,
    ConfigSynonym,
    GroupDescription,
    GroupListing,
    MemberDescription,
    OffsetChange,
    PartitionLag,
    ShiftBy,
    TopicDescription,
)
from penstock.shared.clients.admin.types import BrokerDescription, PartitionDescription
from penstock.shared.common.errors import (
    GroupNotEmpty,
    GroupNotFound,
    NotLeaderOrFollower,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

F0, F1, OTHER = TopicPartition("flights", 0), TopicPartition("flights", 1), TopicPartition("other", 0)


class MemoryAdmin:
    """An admin with a topic `flights` of two partitions with ten records each, and a group
    `banks` at offset four of each.
    """

    def __init__(self) -> None:
        self.topics = {"flights": 2, "other": 1}
        self.groups = {"banks": dict.fromkeys([F0, F1], 4)}
        self.members: list[MemberDescription] = []
        self.offline: set[TopicPartition] = set()
        """Partitions without a leader."""

    async def cluster(self) -> ClusterDescription:
        return ClusterDescription("c-1", 1, (BrokerDescription(1, "localhost", 9092, None),))

    async def list_topics(self) -> list[str]:
        return sorted(self.topics)

    async def describe_topics(self, names: Iterable[str]) -> dict[str, TopicDescription]:
        found = {}
        for name in names:
            if name not in self.topics:
                raise UnknownTopicOrPartition(f"topic {name}")
            partitions = tuple(
                PartitionDescription(p, None if TopicPartition(name, p) in self.offline else 1, (1,), (1,))
                for p in range(self.topics[name])
            )
            found[name] = TopicDescription(name, "id", False, partitions)
        return found

    async def describe_configs(self, topic: str) -> dict[str, str | None]:
        return {"retention.ms": "-1", "cleanup.policy": "delete"}

    async def topic_configs(self, topics: Iterable[str]) -> dict[str, list[ConfigEntry]]:
        await self.describe_topics(topics)
        value = ConfigSynonym("cleanup.policy", "compact", "DYNAMIC_TOPIC_CONFIG")
        default = ConfigSynonym("log.cleanup.policy", "delete", "DEFAULT_CONFIG")
        own = ConfigEntry("cleanup.policy", "compact", "DYNAMIC_TOPIC_CONFIG", synonyms=(value, default))
        return {topic: [own, ConfigEntry("retention.ms", "-1", "DEFAULT_CONFIG")] for topic in topics}

    async def list_offsets(self, specs: Mapping[TopicPartition, Any]) -> dict[TopicPartition, int]:
        if self.offline & specs.keys():
            raise NotLeaderOrFollower("no leader")
        return {tp: {"earliest": 0, "latest": 10}.get(spec, 7) for tp, spec in specs.items()}

    async def list_groups(self) -> list[GroupListing]:
        return [GroupListing(group, "Empty", "consumer") for group in self.groups]

    async def describe_group(self, group_id: str) -> GroupDescription:
        if group_id not in self.groups:
            return GroupDescription(group_id, "Dead", "", "", 1, ())
        state = "Stable" if self.members else "Empty"
        return GroupDescription(group_id, state, "consumer", "range", 1, tuple(self.members))

    async def group_offsets(self, group_id: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return {tp: OffsetAndMetadata(offset) for tp, offset in self.groups.get(group_id, {}).items()}

    async def group_lag(self, group_id: str) -> list[PartitionLag]:
        committed = self.groups.get(group_id, {})
        members = (await self.describe_group(group_id)).members
        partitions = sorted(set(committed).union(*(member.assignment for member in members)))
        ends = {tp: None if tp in self.offline else 10 for tp in partitions}
        return [
            PartitionLag(tp, committed.get(tp), end, None if end is None else end - committed.get(tp, 0))
            for tp, end in ends.items()
        ]

    async def reset_group_offsets(
        self, group_id: str, to: Any, partitions: Iterable[TopicPartition] | None = None, dry_run: bool = False
    ) -> dict[TopicPartition, OffsetChange]:
        if self.members and not dry_run:
            raise GroupNotEmpty(f"group {group_id} has members: {self.members[0]}")
        committed = self.groups.get(group_id, {})
        wanted = list(committed) if partitions is None else list(partitions)
        if not wanted:
            raise GroupNotFound(f"group {group_id}: nothing committed")
        targets = {"earliest": 0, "latest": 10}
        changes = {}
        for tp in wanted:
            if isinstance(to, ShiftBy):
                after = committed[tp] + to.records
            elif isinstance(to, Mapping):
                after = to[tp]
            else:
                after = targets.get(to, 7)
            changes[tp] = OffsetChange(committed.get(tp), after)
        if not dry_run:
            self.groups[group_id] = committed | {tp: change.after for tp, change in changes.items()}
        return changes

    async def delete_group(self, group_id: str) -> None:
        if group_id not in self.groups:
            raise GroupNotFound(f"group {group_id}")
        del self.groups[group_id]


@pytest.fixture
def admin() -> MemoryAdmin:
    return MemoryAdmin()


async def send_request(admin: MemoryAdmin, method: str, path: str, body: Any = None) -> httpx.Response:
    app = create_app(admin=admin_router(admin))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.request(method, path, **({} if body is None else {"json": body}))


async def test_the_cluster_is_described(admin: MemoryAdmin) -> None:
    """The cluster is described with its id, controller and brokers."""
    assert (await send_request(admin, "GET", "/v1/cluster")).json() == {
        "cluster_id": "c-1",
        "controller": 1,
        "brokers": [{"node_id": 1, "host": "localhost", "port": 9092, "rack": None}],
    }


async def test_topics_are_listed_and_described(admin: MemoryAdmin) -> None:
    """Topics are described with offsets and configs; an unknown topic is a 404."""
    assert (await send_request(admin, "GET", "/v1/topics")).json() == {"topics": ["flights", "other"]}
    found = (await send_request(admin, "GET", "/v1/topics/flights")).json()
    assert [(p["partition"], p["earliest_offset"], p["latest_offset"]) for p in found["partitions"]] == [
        (0, 0, 10),
        (1, 0, 10),
    ]
    assert found["configs"] == {"cleanup.policy": "delete", "retention.ms": "-1"}
    assert (await send_request(admin, "GET", "/v1/topics/none")).status_code == 404


async def test_a_partition_without_a_leader_is_described_without_offsets(admin: MemoryAdmin) -> None:
    """The leader and the offsets of a partition without a leader are null. The others are described as always."""
    admin.offline = {F1}
    found = (await send_request(admin, "GET", "/v1/topics/flights")).json()
    assert [(p["leader"], p["earliest_offset"], p["latest_offset"]) for p in found["partitions"]] == [
        (1, 0, 10),
        (None, None, None),
    ]


async def test_groups_are_listed_and_described(admin: MemoryAdmin) -> None:
    """Groups are described with members, their partitions, and lag in total and by partition.

    A partition without a leader has no lag. An unknown group is a 404.
    """
    admin.members = [MemberDescription("m-1", "client", "/10.0.0.1", None, frozenset([F1, F0]))]
    assert (await send_request(admin, "GET", "/v1/groups")).json()["groups"][0]["group"] == "banks"
    found = (await send_request(admin, "GET", "/v1/groups/banks")).json()
    assert (found["state"], found["lag"]) == ("Stable", 12)
    assert found["members"][0]["partitions"] == [
        {"topic": "flights", "partition": 0},
        {"topic": "flights", "partition": 1},
    ]
    assert found["partitions"][0] == {"topic": "flights", "partition": 0, "committed": 4, "end": 10, "lag": 6}
    admin.offline = {F0}
    without_leader = (await send_request(admin, "GET", "/v1/groups/banks")).json()
    assert without_leader["lag"] == found["partitions"][1]["lag"]
    assert without_leader["partitions"] == [found["partitions"][0] | {"end": None, "lag": None}, found["partitions"][1]]
    missing = await send_request(admin, "GET", "/v1/groups/none")
    assert (missing.status_code, missing.json()["error_code"]) == (404, "GROUP_ID_NOT_FOUND")


async def test_a_group_whose_id_has_slashes_is_described_reset_and_deleted(admin: MemoryAdmin) -> None:
    """A group whose id has slashes is described, reset and deleted. A trailing slash is not part of an id."""
    admin.groups["team/app"] = {F0: 4}
    group = "/v1/groups/team%2Fapp"
    assert (await send_request(admin, "GET", group)).json()["group"] == "team/app"
    reset = await send_request(admin, "POST", f"{group}/offsets", {"to": "earliest"})
    assert (reset.status_code, reset.json()["group"]) == (200, "team/app")
    assert (await send_request(admin, "DELETE", group)).status_code == 204
    assert admin.groups.keys() == {"banks"}
    for path in ("/v1/groups/", "/v1/groups/banks/"):
        assert (await send_request(admin, "GET", path)).headers["location"] == "http://x" + path.rstrip("/")


@pytest.mark.parametrize(
    ("to", "after"),
    [
        ("earliest", 0),
        ("latest", 10),
        ({"offset": 3}, 3),
        ({"timestamp_ms": 1_000}, 7),
        ({"shift_by": -2}, 2),
    ],
)
async def test_offsets_are_reset(admin: MemoryAdmin, to: Any, after: int) -> None:
    """Each kind of reset is applied and returns the offsets before and after."""
    response = await send_request(admin, "POST", "/v1/groups/banks/offsets", {"to": to})
    assert response.status_code == 200
    assert response.json() == {
        "group": "banks",
        "dry_run": False,
        "partitions": [
            {"topic": "flights", "partition": 0, "before": 4, "after": after},
            {"topic": "flights", "partition": 1, "before": 4, "after": after},
        ],
    }
    assert admin.groups["banks"] == {F0: after, F1: after}


async def test_a_dry_run_changes_nothing(admin: MemoryAdmin) -> None:
    """A dry run returns the changes and applies none."""
    response = await send_request(admin, "POST", "/v1/groups/banks/offsets", {"to": "latest", "dry_run": True})
    assert [p["after"] for p in response.json()["partitions"]] == [10, 10]
    assert admin.groups["banks"] == {F0: 4, F1: 4}


async def test_topics_and_partitions_can_be_chosen(admin: MemoryAdmin) -> None:
    """A reset may name topics or partitions; a missing partition is a 404."""
    await send_request(admin, "POST", "/v1/groups/banks/offsets", {"to": {"offset": 9}, "topics": {"flights": [1]}})
    assert admin.groups["banks"] == {F0: 4, F1: 9}
    await send_request(admin, "POST", "/v1/groups/new/offsets", {"to": "earliest", "topics": ["flights", "other"]})
    assert admin.groups["new"] == {F0: 0, F1: 0, OTHER: 0}
    response = await send_request(
        admin, "POST", "/v1/groups/banks/offsets", {"to": "earliest", "topics": {"flights": [2]}}
    )
    assert response.status_code == 404
    assert "flights-2" in response.json()["detail"]


async def test_resetting_an_active_group_is_a_409(admin: MemoryAdmin) -> None:
    """Resetting a group with members is a 409 that names them, and changes nothing."""
    admin.members = [MemberDescription("m-1", "client", "/10.0.0.1", None, frozenset([F0]))]
    response = await send_request(admin, "POST", "/v1/groups/banks/offsets", {"to": "earliest"})
    assert (response.status_code, response.json()["error_code"]) == (409, "NON_EMPTY_GROUP")
    assert "m-1" in response.json()["detail"]
    assert admin.groups["banks"] == {F0: 4, F1: 4}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"to": "somewhere"},
        {"to": {"offset": -1}},
        {"to": {"offset": 2**63}},
        {"to": {"shift_by": "x"}},
        {"to": {"offset": 1, "shift_by": 1}},
        {"to": {}},
        {"to": 5},
        {"to": "latest", "topics": []},
        {"to": "latest", "topics": {"flights": []}},
        {"to": "latest", "dryrun": True},
        [],
    ],
)
async def test_an_invalid_reset_is_a_400(admin: MemoryAdmin, body: Any) -> None:
    """An invalid reset, also one with a misspelt dry_run, is a 400 and changes nothing."""
    response = await send_request(admin, "POST", "/v1/groups/banks/offsets", body)
    assert response.status_code == 400, response.text
    assert admin.groups["banks"] == {F0: 4, F1: 4}


async def test_a_group_is_deleted(admin: MemoryAdmin) -> None:
    """Deleting a group is a 204 and then a 404, and so is resetting a missing group."""
    assert (await send_request(admin, "DELETE", "/v1/groups/banks")).status_code == 204
    assert (await send_request(admin, "DELETE", "/v1/groups/banks")).status_code == 404
    assert (await send_request(admin, "POST", "/v1/groups/banks/offsets", {"to": {"offset": 1}})).status_code == 404


class MemoryDeadLetters:
    """Implements `DeadLetters`; `request` holds the arguments of the last replay."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {}

    async def topics(self) -> list[dict[str, Any]]:
        return [{"topic": "t-dlq", "kind": "dead_letters", "source": "t", "records": 3, "exact": True}]

    async def read_newest(self, topic: str, limit: int, stage: str | None) -> dict[str, Any]:
        row = {"partition": 0, "written_ms": 1, "key": None, "value": "{", "headers": [], "stage": stage or "process"}
        return {"records": [row | {"offset": i} for i in range(limit)], "scanned": 7}

    async def replay(self, topic: str, **request: Any) -> dict[str, Any]:
        self.request = request
        return {"sent": 2, "failed": 0}


async def test_dead_letters_are_listed_scanned_and_replayed() -> None:
    """Dead letters are listed, read and replayed; invalid limits and stages and unknown fields are 400s."""
    dead_letters = MemoryDeadLetters()
    app = create_app(more=[dead_letters_router(dead_letters)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/v1/dead-letters")).json()["topics"][0]["records"] == 3
        assert len((await client.get("/v1/dead-letters/t-dlq?limit=2")).json()["records"]) == 2
        assert (await client.get("/v1/dead-letters/t-dlq?stage=produce")).json()["records"][0]["stage"] == "produce"
        for query in ("limit=0", "stage=nowhere"):
            assert (await client.get(f"/v1/dead-letters/t-dlq?{query}")).status_code == 400
        await client.post("/v1/dead-letters/t-late/replay", json={"to": "corrections"})
        assert dead_letters.request["to"] == "corrections"
        response = await client.post("/v1/dead-letters/t-dlq/replay", json={"stage": "process", "limit": 5})
        assert response.json() == {"topic": "t-dlq", "dry_run": False, "sent": 2, "failed": 0}
        request = dead_letters.request
        assert (request["stage"], request["limit"], request["include_replayed"]) == ("process", 5, False)
        assert (await client.post("/v1/dead-letters/t-dlq/replay", json={"stages": 1})).status_code == 400
