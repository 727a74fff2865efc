"""Validation of requests to alter offsets, and how the offsets of sinks are altered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import ConfigError, KafkaTimeout
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.errors import BadRequest, ConnectError
from penstock.shared.connect.herder.connector_offsets import (
    ALTERED,
    ConnectorOffsets,
    rows_of,
    sink_offsets,
)
from penstock.shared.connect.runtime.worker_config import WorkerConfig
from penstock.shared.connect.storage.offset_store import MemoryOffsetStore
from penstock.shared.testing.fake_broker import Api, FakeCluster
from tests.shared.connect.harness import STRING, TP, Store


def sink_row(partition: object = 0, offset: object = 1) -> dict[str, object]:
    return {"partition": {"kafka_topic": "t", "kafka_partition": partition}, "offset": {"kafka_offset": offset}}


def test_rows_are_partitions_with_offsets() -> None:
    """Rows are pairs of a partition and an offset; an offset of null deletes the partition's."""
    assert rows_of({"offsets": [{"partition": {"f": 1}, "offset": {"p": 2}}, {"partition": {}, "offset": None}]}) == [
        ({"f": 1}, {"p": 2}),
        ({}, None),
    ]


@pytest.mark.parametrize("body", [{}, {"offsets": []}, {"offsets": None}, [], {"offsets": [1]},
                                  {"offsets": [{"partition": 1}]}, {"offsets": [{"partition": {}, "offset": 3}]},
                                  {"offsets": "all"}, {"offsets": [{"partition": {}, "ofset": {"p": 1}}]},
                                  {"offsets": [{"partition": {}}], "x": 1}])  # fmt: skip
def test_requests_without_rows_are_bad_requests(body: object) -> None:
    """A request without valid rows, or with an unknown field, is a BadRequest."""
    with pytest.raises(BadRequest):
        rows_of(body)


def test_a_sinks_rows_are_kafkas() -> None:
    """A sink's rows have topic, partition and offset; numbers may be strings."""
    rows = rows_of({"offsets": [sink_row(), sink_row("1", "7"), {**sink_row(2), "offset": None}]})
    assert sink_offsets(rows) == {
        TopicPartition("t", 0): 1,
        TopicPartition("t", 1): 7,
        TopicPartition("t", 2): None,
    }


@pytest.mark.parametrize(
    "row",
    [
        {"partition": {"topic": "t"}, "offset": {"kafka_offset": 1}},
        sink_row("first"),
        sink_row(True),
        sink_row(0, "now"),
        sink_row(-1),
        sink_row(2**31),
        sink_row(0, -1),
        sink_row(0, str(2**63)),
        {**sink_row(), "offset": {"position": 1}},
    ],
)
def test_invalid_rows_of_a_sink_are_bad_requests(row: dict[str, object]) -> None:
    """A source's names and invalid numbers in a sink's rows are BadRequests."""
    with pytest.raises(BadRequest):
        sink_offsets(rows_of({"offsets": [row]}))


def worker_config(servers: str, **more: str) -> WorkerConfig:
    return WorkerConfig({"bootstrap.servers": servers, "key.converter": STRING, "value.converter": STRING, **more})


class Committed:
    """A fake Admin with one group's offsets; requests named by `refused` fail."""

    def __init__(self, offsets: dict[TopicPartition, int]) -> None:
        self.offsets = offsets
        self.failing = ""

    def _check(self, request: str) -> None:
        if request == self.failing:
            raise KafkaTimeout(f"{request}: no response")

    async def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        return dict(self.offsets)

    async def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        self._check("alter")
        self.offsets |= offsets

    async def delete_group_offsets(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self._check("delete")
        for tp in partitions:
            del self.offsets[tp]

    async def delete_group(self, group: str) -> None:
        self.offsets.clear()


async def test_offsets_of_other_partitions_are_unchanged() -> None:
    """Altering a sink's offsets changes only the named partitions, whichever request fails."""
    kept, moved, gone, unknown = (TopicPartition("t", number) for number in range(4))
    for failing in ("alter", "delete", ""):
        admin = Committed({kept: 1, moved: 2, gone: 3})
        admin.failing = failing
        offsets = ConnectorOffsets(cast(Any, admin), MemoryOffsetStore(), worker_config("none:1"))
        wanted: dict[TopicPartition, int | None] = {gone: None, moved: 7, unknown: None}
        if failing:
            with pytest.raises(KafkaTimeout):
                await offsets.keep("snk", {}, [], wanted, altered=True)
            assert admin.offsets == {kept: 1, moved: 2 if failing == "alter" else 7, gone: 3}
        else:
            assert await offsets.keep("snk", {}, [], wanted, altered=True) == ALTERED
            assert admin.offsets == {kept: 1, moved: 7}


async def test_offsets_are_altered_once_the_group_is_empty() -> None:
    """Offsets are not altered while the group has members.

    After the members left during the initial rebalance, the change is retried until the broker accepts it.
    """
    wanted: dict[TopicPartition, int | None] = {TP: 7}
    async with FakeCluster(configs={"group.initial.rebalance.delay.ms": "500"}) as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin:
            offsets = ConnectorOffsets(admin, Store(), worker_config(cluster.bootstrap_servers))
            joins = cluster.control(Api.JOIN_GROUP, lambda request: seen.append(request.body.member_id))
            seen: list[str] = []
            async with Consumer(kafka, ConsumerSettings(group_id="connect-c")) as consumer:
                consumer.subscribe(["t"])
                while len(seen) < 2:
                    await consumer.poll(20)
                with pytest.raises(ConnectError, match="still has members"):
                    await offsets.keep("c", {}, None, wanted, altered=False)
            joins.remove()
            await offsets.keep("c", {}, [({}, {})], wanted, altered=False)
            assert cluster.committed("connect-c") == {TP: OffsetAndMetadata(7)}
            await offsets.keep("c", {}, None, wanted, altered=False)
            assert cluster.committed("connect-c") == {}


async def test_a_sinks_group_may_be_in_another_cluster() -> None:
    """A sink's offsets are read, altered and reset with the connector's `admin.override.*` settings, or else the
    worker's `admin.*`, if the policy allows them."""
    async with FakeCluster() as first, FakeCluster() as second:
        second.create_topic("t")
        other = {"bootstrap.servers": second.bootstrap_servers}
        override = {f"admin.override.{name}": value for name, value in other.items()}
        async with Admin(first.bootstrap_servers) as admin:
            for config, more in ((override, {}), ({}, {f"admin.{name}": value for name, value in other.items()})):
                of_all = ConnectorOffsets(admin, Store(), worker_config(first.bootstrap_servers, **more))
                async with of_all.connected("c", config, is_sink=True) as offsets:
                    await offsets.keep("c", config, [({}, {})], {TP: 7}, altered=False)
                    assert second.committed("connect-c") == {TP: OffsetAndMetadata(7)}
                    assert len((await offsets.read("c", config, is_sink=True))["offsets"]) == 1
                    wanted = await offsets.wanted("c", config, None, is_sink=True)
                    assert wanted == {TP: None}
                    await offsets.keep("c", config, None, wanted, altered=False)
                    assert second.committed("connect-c") == {}
            none = {"connector.client.config.override.policy": "None"}
            of_all = ConnectorOffsets(admin, Store(), worker_config(first.bootstrap_servers, **none))
            with pytest.raises(ConfigError, match="override policy None"):
                async with of_all.connected("c", override, is_sink=True):
                    pass
