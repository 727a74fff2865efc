"""Distributed mode on a fake broker: one worker, and two workers of one group.

The work runner, the pending changes of the config topic and the worker's settings are also tested alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import (
    BrokerError,
    ConfigError,
    DeliveryTimeout,
    KafkaTimeout,
    PenstockError,
    ProducerFenced,
    TransactionAborted,
)
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.connector import Props
from penstock.shared.connect.errors import BadRequest, ConnectError, ConnectorNotFound
from penstock.shared.connect.group.connect_protocol import COMPATIBLE, EAGER, SESSIONED, ConnectorsAndTasks
from penstock.shared.connect.herder import distributed
from penstock.shared.connect.herder.base_herder import BaseHerder, Stores
from penstock.shared.connect.herder.distributed import ConfigChanges, DistributedHerder
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.herder.errors import AlreadyExists, Forbidden, NotHere
from penstock.shared.connect.herder.leader_client import LeaderRequestFailed
from penstock.shared.connect.herder.session_keys import new_key, sign
from penstock.shared.connect.herder.work_runner import WorkRunner
from penstock.shared.connect.runtime.exactly_once_source_task import transactional_id
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.worker import TaskMaker, Worker
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.connect.storage.cluster_config_state import (
    ConfigSnapshot,
    ConfigState,
    ConnectorChanged,
    ConnectorRemoved,
    TargetStateChanged,
    TasksChanged,
)
from penstock.shared.connect.storage.config_records import Config, LoggerLevel, RestartRequest, SessionKey, decode
from penstock.shared.connect.storage.config_store import KafkaConfigStore
from penstock.shared.connect.storage.offset_store import KafkaOffsetStore
from penstock.shared.connect.storage.status_store import KafkaStatusStore
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from tests.shared.connect.harness import RecordingSink, StatusRecorder, turns
from tests.shared.connect.herder.test_standalone import (
    CONVERTER,
    MultiTaskSource,
    NoOpWorkerTask,
    going,
    until,
    validating,
)

NAMES = ("config", "offset", "status")

X_TASK = ConnectorTaskId("x", 0)

TASK = ConnectorTaskId("c", 0)

REQUIRED = {
    "bootstrap.servers": "a:9092",
    "group.id": "g",
    "config.storage.topic": "configs",
    "offset.storage.topic": "offsets",
    "status.storage.topic": "statuses",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
}


class InProcessClient:
    """Sends a follower's requests to the leader, which runs in this process."""

    leaders: ClassVar[dict[str, DistributedHerder]] = {}
    """Herders by URL."""

    async def put_tasks(self, url: str, connector: str, configs: Sequence[Config], key: SessionKey | None) -> None:
        data = msgspec.json.encode(configs)
        with self._signing_key("put_tasks", key) as used:
            await self.leaders[url].put_task_configs(connector, configs, data, sign(used, data, used.algorithm))

    async def fence(self, url: str, connector: str, key: SessionKey | None) -> None:
        with self._signing_key("fence", key) as used:
            await self.leaders[url].fence(connector, b"", sign(used, b"", used.algorithm))

    @contextlib.contextmanager
    def _signing_key(self, kind: str, key: SessionKey | None) -> Iterator[SessionKey]:
        """Yields the key that signs a request, and raises `LeaderRequestFailed` if the leader rejects the request."""
        assert key is not None
        try:
            yield key
        except ConnectError as e:
            raise LeaderRequestFailed(str(e)) from None

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def running_herder(
    cluster: FakeCluster, host: str, make: TaskMaker = NoOpWorkerTask, **settings: str
) -> AsyncIterator[DistributedHerder]:
    """Run a worker until it has joined its group. In names of settings underscores stand for dots."""
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    config = DistributedConfig(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "key.converter": CONVERTER,
            "value.converter": CONVERTER,
            "group.id": "g",
            "heartbeat.interval.ms": "50",
            "scheduled.rebalance.max.delay.ms": "0",
            **{f"{name}.storage.topic": name for name in NAMES},
            **{f"{name}.storage.replication.factor": "1" for name in NAMES},
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )
    herder: DistributedHerder
    async with Admin(kafka) as admin, Producer(kafka, ProducerSettings(linger_ms=0)) as producer:
        connection = Connection(kafka)
        await connection.open()
        shared = (kafka, admin, producer)
        stores = Stores(
            KafkaConfigStore(
                *shared,
                config.topic("config"),
                lambda change: herder.on_config_change(change),
                transactional_id=config.leader_transactional_id if config.transactional_leader else None,
            ),
            KafkaStatusStore(*shared, config.topic("status")),
            KafkaOffsetStore(*shared, config.topic("offset")),
        )
        plugins = Plugins([("Divided", MultiTaskSource), ("Hanging", Hanging), ("Sink", RecordingSink)])
        worker = Worker(config, plugins, stores.offsets, make)
        herder = DistributedHerder(config, worker, admin, connection, stores, url=f"http://{host}/", worker_id=host)
        await herder._leader_client.close()
        herder._leader_client = cast(Any, InProcessClient())
        InProcessClient.leaders[herder.url] = herder
        await herder.startup()
        working = asyncio.ensure_future(herder.main_loop())
        try:
            await until(lambda: herder.is_ready or working.done())
            yield herder
        finally:
            working.cancel()
            await asyncio.wait([working])
            await herder.shutdown()
            del InProcessClient.leaders[herder.url]
            await connection.close()


class Hanging(MultiTaskSource):
    """A connector whose second and later starts wait for `going`."""

    starts: ClassVar[int] = 0
    going: ClassVar[asyncio.Event]

    async def start(self, props: Props) -> None:
        await super().start(props)
        Hanging.starts += 1
        if Hanging.starts > 1:
            await Hanging.going.wait()

    @classmethod
    def prepare(cls) -> None:
        cls.starts, cls.going = 0, asyncio.Event()


def states(herder: DistributedHerder, name: str = "c") -> list[str]:
    shown = herder.connector_status(name)
    return [part["state"] for part in (shown["connector"], *shown["tasks"])]


def config(name: str = "c", **more: str) -> dict[str, str]:
    return {"name": name, "connector.class": "Divided", "tasks.max": "2", **more}


async def test_connectors_follow_the_config_topic() -> None:
    """A connector is created, rejected a second time, changed, paused, stopped, resumed and
    deleted, and its statuses follow.
    """
    async with FakeCluster() as cluster, running_herder(cluster, "a:1") as herder:
        created, info = await herder.put_connector("c", config(), replace=False)
        assert (created, info["type"]) == (True, "source")
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        with pytest.raises(AlreadyExists):
            await herder.put_connector("c", config(), replace=False)
        with pytest.raises(BadRequest, match=r"tasks\.max"):
            await herder.put_connector("d", config("d", **{"tasks.max": "many"}), replace=False)
        await herder.patch_connector("c", {"tasks.max": "1", "word": "x"})
        await until(lambda: [task["config"]["word"] for task in herder.task_infos("c")] == ["x"])
        await until(lambda: states(herder) == ["RUNNING"] * 2)
        for target, wanted in ((TargetState.PAUSED, ["PAUSED"] * 2), (TargetState.STOPPED, ["STOPPED"])):
            await herder.set_target_state("c", target)
            await until(lambda wanted=wanted: states(herder) == wanted)  # type: ignore[misc]
        await herder.set_target_state("c", TargetState.STARTED)
        await until(lambda: states(herder) == ["RUNNING"] * 2)
        await herder.delete_connector("c")
        await until(lambda: not herder.connectors() and not herder.worker.connector_names())
        await until(lambda: not herder.worker.task_ids())


async def test_a_config_that_changes_no_task_config_reaches_the_tasks() -> None:
    """Tasks restart with a changed connector config, such as another converter, also if their own configs are equal.
    Another tasks.max alone restarts none."""
    made: list[str] = []

    def make(spec: TaskSpec, listener: StatusListener) -> NoOpWorkerTask:
        made.append(f"{spec.id.task}:{spec.connector_config.get('errors.tolerance')}")
        return NoOpWorkerTask(spec, listener)

    async with FakeCluster() as cluster, running_herder(cluster, "a:1", make) as herder:
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        await herder.patch_connector("c", {"tasks.max": "3"})
        await until(lambda: states(herder) == ["RUNNING"] * 4)
        assert made == ["0:None", "1:None", "2:None"]
        await herder.patch_connector("c", {"errors.tolerance": "all"})
        await until(lambda: len(made) == 6)
        assert made[3:] == ["0:all", "1:all", "2:all"]


def compacted_configs(cluster: FakeCluster) -> ConfigSnapshot:
    """Return the configs that a worker reads from the config topic after a compaction."""
    newest = {record.key: record for record in cluster.records("config")}
    state = ConfigState()
    for record in sorted(newest.values(), key=lambda record: record.offset):
        if (decoded := decode(record.key, record.value)) is not None:
            state.apply(decoded, record.offset)
    return state.snapshot()


async def test_a_put_of_an_unchanged_config_restarts_only_the_connector() -> None:
    """A put of an unchanged config restarts the connector, as in Kafka Connect, but not its tasks, also under
    exactly-once. A worker that reads the compacted topic has the tasks."""
    once = {"exactly_once_source_support": "enabled"}
    made: list[ConnectorTaskId] = []

    def make(spec: TaskSpec, listener: StatusListener) -> NoOpWorkerTask:
        made.append(spec.id)
        return NoOpWorkerTask(spec, listener)

    async with FakeCluster() as cluster, running_herder(cluster, "a:1", make, **once) as herder:
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        started = herder.startup_metrics()["connector_startup_attempts_total"]
        assert await herder.put_connector("c", config(), replace=True) == (False, herder.connector_info("c"))
        await until(lambda: herder.startup_metrics()["connector_startup_attempts_total"] > started)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        # A changed config restarts the tasks after all that the unchanged one has caused.
        await herder.patch_connector("c", {"word": "x"})
        await until(lambda: [task["config"]["word"] for task in herder.task_infos("c")] == ["x"] * 2)
        await until(lambda: states(herder) == ["RUNNING"] * 3 and len(made) >= 4)
        assert len(made) == 4
        assert sum(record.key == b"commit-c" for record in cluster.records("config")) == 2
        assert len(compacted_configs(cluster).tasks("c")) == 2


async def test_a_connector_that_is_deleted_and_created_in_one_turn_runs_with_its_new_config() -> None:
    """If a delete and a create of one connector wait together, the connector runs with its new config afterwards."""
    async with FakeCluster() as cluster, running_herder(cluster, "a:1") as herder:
        await herder.put_connector("c", config(word="old"), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)

        async def delete_and_create() -> None:
            await herder._stores.configs.remove_connector("c")
            await herder._stores.configs.put_connector("c", config(word="new"), None)

        await herder._execute_command(delete_and_create)
        await until(lambda: [task["config"]["word"] for task in herder.task_infos("c")] == ["new"] * 2)
        await until(lambda: states(herder) == ["RUNNING"] * 3 and len(herder.worker.task_ids()) == 2)


async def test_a_later_worker_continues_from_the_topics() -> None:
    """Configs, target states and statuses are in topics, and the group's next worker continues from them."""
    async with FakeCluster() as cluster:
        async with running_herder(cluster, "a:1") as herder:
            await herder.put_connector("c", config(), replace=False)
            await herder.put_connector("p", config("p"), TargetState.PAUSED, replace=False)
            await until(lambda: states(herder) == ["RUNNING"] * 3 and states(herder, "p")[0] == "PAUSED")
        async with running_herder(cluster, "b:1") as later:
            assert later.connectors() == ["c", "p"]
            await until(lambda: states(later) == ["RUNNING"] * 3 and states(later, "p")[0] == "PAUSED")
            await until(lambda: {part["worker_id"] for part in later.connector_status("c")["tasks"]} == {"b:1"})


async def test_two_workers_share_and_one_leads() -> None:
    """Work is shared by two workers.

    The follower rejects requests for the leader with its URL, and neither restarts the other's tasks.
    """
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1") as first,
        running_herder(cluster, "b:1") as second,
    ):
        await until(lambda: first.member.is_leader != second.member.is_leader)
        leader, other = (first, second) if first.member.is_leader else (second, first)
        with pytest.raises(NotHere) as raised:
            await other.put_connector("c", config(), replace=False)
        assert raised.value.url == leader.url
        await leader.put_connector("c", config(**{"tasks.max": "4"}), replace=False)
        await until(lambda: states(other) == ["RUNNING"] * 5)
        await until(lambda: len(first.worker.task_ids()) == len(second.worker.task_ids()) == 2)
        with pytest.raises(NotHere) as raised:
            await leader.restart_task(min(other.worker.task_ids()))
        assert raised.value.url == other.url
        assert other.rebalance_texts() == {"leader_name": leader.url, "connect_protocol": "sessioned"}
        with pytest.raises(ConnectorNotFound):
            await other.restart_task(ConnectorTaskId("c", 9))


class KeyChangeClient(InProcessClient):
    """A client of the leader whose first request of each kind has the signature of an old session key."""

    def __init__(self) -> None:
        self.rejected: list[str] = []

    @contextlib.contextmanager
    def _signing_key(self, kind: str, key: SessionKey | None) -> Iterator[SessionKey]:
        try:
            yield key if kind in self.rejected and key is not None else new_key("HmacSHA256", 0)
        except Forbidden as e:
            self.rejected.append(kind)
            raise LeaderRequestFailed(str(e)) from None


async def test_requests_are_sent_again_after_a_change_of_the_session_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the leader rejects task configs, or a request to fence, because the session key has just changed, the worker
    sends the request again.
    """
    once = {"exactly_once_source_support": "enabled"}
    monkeypatch.setattr(BaseHerder, "_retry_backoff", ExponentialBackoff(0, 0))
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1", **once) as first,
        running_herder(cluster, "b:1", **once) as second,
    ):
        await until(lambda: first.member.is_leader != second.member.is_leader)
        leader, other = (first, second) if first.member.is_leader else (second, first)
        client = KeyChangeClient()
        other._leader_client = cast(Any, client)
        for name in ("c", "d"):
            await leader.put_connector(name, config(name), replace=False)
            await until(lambda name=name: states(leader, name) == ["RUNNING"] * 3)  # type: ignore[misc]
        assert sorted(client.rejected) == ["fence", "put_tasks"]


async def test_the_work_of_a_leaving_worker_is_reassigned() -> None:
    """When a worker leaves, the other gets all work, and nothing runs twice."""
    async with FakeCluster() as cluster, running_herder(cluster, "a:1") as first:
        async with running_herder(cluster, "b:1") as second:
            await until(lambda: first.member.is_leader != second.member.is_leader)
            leader = first if first.member.is_leader else second
            await leader.put_connector("c", config(**{"tasks.max": "4"}), replace=False)
            await until(lambda: len(first.worker.task_ids()) == len(second.worker.task_ids()) == 2)
            assert not first.worker.task_ids() & second.worker.task_ids()
        await until(lambda: len(first.worker.task_ids()) == 4 and first.member.is_leader)
        await until(lambda: {part["worker_id"] for part in first.connector_status("c")["tasks"]} == {"a:1"})


async def test_the_first_change_after_a_restart_is_applied() -> None:
    """A worker that has just started applies a new config of a connector that it has read from the topic."""
    async with FakeCluster() as cluster:
        async with running_herder(cluster, "a:1") as herder:
            await herder.put_connector("c", config(), replace=False)
            await until(lambda: states(herder) == ["RUNNING"] * 3)
        async with running_herder(cluster, "a:1") as herder:
            await until(lambda: states(herder) == ["RUNNING"] * 3)
            await herder.patch_connector("c", {"tasks.max": "1"})
            await until(lambda: states(herder) == ["RUNNING"] * 2)


async def test_restarts_and_levels_reach_every_worker() -> None:
    """Restart requests and logger levels reach every worker through the config topic."""
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1") as first,
        running_herder(cluster, "b:1") as second,
    ):
        await until(lambda: first.member.is_leader != second.member.is_leader)
        leader = first if first.member.is_leader else second
        await leader.put_connector("c", config(), replace=False)
        await until(lambda: states(first) == ["RUNNING"] * 3)
        before = sum(herder.startup_metrics()["task_startup_attempts_total"] for herder in (first, second))
        shown = await leader.restart(RestartRequest("c", only_failed=False, include_tasks=True))
        assert [task["state"] for task in shown["tasks"]] == ["RESTARTING", "RESTARTING"]
        await until(
            lambda: sum(h.startup_metrics()["task_startup_attempts_total"] for h in (first, second)) >= before + 2
        )
        await until(lambda: states(second) == ["RUNNING"] * 3)
        level = LoggerLevel("penstock.test.levels", "DEBUG")
        await first.set_cluster_level(level.logger, level.level)
        for herder in (first, second):
            await until(lambda herder=herder: level.logger in herder.loggers.levels())  # type: ignore[misc]


async def test_a_connector_that_could_not_be_created_can_be_restarted(tmp_path: Path) -> None:
    """A connector whose secret could not be read starts with the next restart of either kind, or with its next
    config.
    """
    secret = tmp_path / "secret.properties"
    only_connector = RestartRequest("c", only_failed=False, include_tasks=False)
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", config_providers="file") as herder:
        secret.write_text("word=x")
        await herder.put_connector("c", config(word=f"${{file:{secret}:word}}"), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        for start in (
            lambda: herder.restart(RestartRequest("c", only_failed=True, include_tasks=True)),
            lambda: herder.restart_connector("c"),
            lambda: herder.patch_connector("c", {"x": "1"}),
        ):
            secret.unlink()
            await herder.restart(only_connector)
            await until(lambda: states(herder)[0] == "FAILED")
            assert herder.worker.connector_names() == frozenset()
            secret.write_text("word=x")
            await start()
            await until(lambda: states(herder) == ["RUNNING"] * 3)


async def test_a_hanging_restart_blocks_nothing() -> None:
    """While a restart hangs, other connectors are created, and delayed work of a lost worker is assigned in time."""
    Hanging.prepare()
    slow = {"name": "a-slow", "connector.class": "Hanging", "tasks.max": "1"}
    async with FakeCluster() as cluster:
        delayed = {"scheduled_rebalance_max_delay_ms": "300"}
        async with running_herder(cluster, "a:1", **delayed) as herder:
            await herder.put_connector("a-slow", slow, replace=False)
            await herder.put_connector("c", config(**{"tasks.max": "4"}), replace=False)
            await until(lambda: states(herder, "a-slow") == ["RUNNING"] * 2 and states(herder) == ["RUNNING"] * 5)
            async with running_herder(cluster, "b:1", **delayed) as second:
                await until(lambda: len(second.worker.task_ids()) >= 2)
                assert "a-slow" in herder.worker.connector_names()
                restarting = asyncio.ensure_future(herder.restart_connector("a-slow"))
                await until(lambda: Hanging.starts > 1)
                assert await herder.is_healthy()
            await until(lambda: len(herder.worker.task_ids()) == 5)
            assert not restarting.done()
            await herder.put_connector("d", config("d"), replace=False)
            await until(lambda: states(herder, "d") == ["RUNNING"] * 3)
            Hanging.going.set()
            await restarting
            await until(lambda: states(herder, "a-slow") == ["RUNNING"] * 2)


async def test_a_worker_that_missed_a_rebalance_stops_its_work() -> None:
    """If a worker's loop waits for a task during a rebalance, its work is assigned to others, and it stops its own."""
    may_end = asyncio.Event()

    class Lingering(NoOpWorkerTask):
        async def _close_task(self) -> None:
            if self.id.task == 0:
                await may_end.wait()

    def make(spec: TaskSpec, listener: StatusListener) -> NoOpWorkerTask:
        return Lingering(spec, listener)

    short = {"rebalance_timeout_ms": "300", "task_shutdown_graceful_timeout_ms": "60000"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", make, **short) as first:
        await first.put_connector("c", config(**{"tasks.max": "3"}), replace=False)
        await until(lambda: states(first) == ["RUNNING"] * 4)
        restarting = asyncio.ensure_future(first.restart_task(ConnectorTaskId("c", 0)))
        async with running_herder(cluster, "b:1", **short) as second:
            await until(lambda: len(second.worker.task_ids()) == 3)
            await until(lambda: not first.worker.task_ids() and not first.worker.connector_names())
            assert not restarting.done()
            may_end.set()
            await restarting
            await until(lambda: len(first.worker.task_ids()) + len(second.worker.task_ids()) == 3)
            await until(lambda: bool(first.worker.task_ids()) and bool(second.worker.task_ids()))
            assert not first.worker.task_ids() & second.worker.task_ids()


async def test_a_worker_that_was_removed_before_it_started_its_work_joins_again() -> None:
    """If the group has probably removed a worker that has just got an assignment, the worker joins again. Until then,
    its loop does not try to start the work once more."""
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1") as first,
        running_herder(cluster, "b:1") as second,
    ):
        await until(lambda: first.member.is_leader != second.member.is_leader)
        leader, other = (first, second) if first.member.is_leader else (second, first)
        await leader.put_connector("c", config(), replace=False)
        await until(lambda: states(leader) == ["RUNNING"] * 3 and not other.rebalance_metrics()["rebalancing"])
        rebalances = other.rebalances
        other._resolved = False
        other.member._heard_ms -= other.member.config.session_timeout_ms
        assert not await other._rebalance_completed()
        assert other.member.needs_to_join
        other.wake()
        await until(lambda: other.rebalances > rebalances and not other.rebalance_metrics()["rebalancing"])
        await until(lambda: states(leader) == ["RUNNING"] * 3)


@pytest.mark.parametrize("protocol", ["eager", "sessioned"])
async def test_a_worker_that_cannot_read_new_configs_leaves_the_group(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """A worker that cannot read the configs of its new assignment keeps its running work until the rebalance timeout
    is over. Then other workers run its work, until the worker has read the configs."""
    monkeypatch.setattr(distributed, "RETRY_MS", 10)
    readable, timeouts = False, 0
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1", connect_protocol=protocol) as first,
        running_herder(cluster, "b:1", connect_protocol=protocol) as second,
    ):
        await until(lambda: first.member.is_leader != second.member.is_leader)
        leader, other = (first, second) if first.member.is_leader else (second, first)
        await leader.put_connector("c", config(), replace=False)
        await until(lambda: len(leader.worker.task_ids()) == len(other.worker.task_ids()) == 1)
        kept, old, configs = other.worker.task_ids(), other.snapshot(), cast(Any, other._stores.configs)
        snapshot, refresh = configs.snapshot, configs.refresh

        async def refresh_if_readable(timeout_ms: int) -> None:
            nonlocal timeouts
            if not readable:
                timeouts += 1
                raise KafkaTimeout("not read")
            await refresh(timeout_ms)

        monkeypatch.setattr(configs, "snapshot", lambda: snapshot() if readable else old)
        monkeypatch.setattr(configs, "refresh", refresh_if_readable)
        await leader.put_connector("d", config("d"), replace=False)
        await until(lambda: timeouts > 2)
        # The protocol `eager` stops all work before each rebalance.
        assert other.worker.task_ids() == (set() if protocol == "eager" else kept)
        other._unread_since_ms = cast(int, other._unread_since_ms) - other._config["rebalance.timeout.ms"]
        await until(lambda: len(leader.worker.task_ids()) == 4)
        timeouts = 0
        await until(lambda: timeouts > 2)
        assert not other.worker.task_ids()
        assert len(leader.worker.task_ids()) == 4
        readable = True
        await until(lambda: len(leader.worker.task_ids()) == len(other.worker.task_ids()) == 2)
        assert not leader.worker.task_ids() & other.worker.task_ids()


async def test_a_slow_patch_blocks_nothing() -> None:
    """While a patch is validated, other changes are made and kept, and a deleted connector is not created again."""
    async with FakeCluster() as cluster, running_herder(cluster, "a:1") as herder:
        await herder.put_connector("c", config(), replace=False)
        for change, wanted in ((herder.put_connector("c", config(b="2"), replace=True), {"b": "2", "slow": "1"}),
                               (herder.delete_connector("c"), None)):  # fmt: skip
            going.clear()
            validating.clear()
            patching = asyncio.ensure_future(herder.patch_connector("c", {"slow": "1"}))
            await until(lambda: validating.is_set())
            assert await herder.is_healthy()
            await change
            assert not patching.done()
            going.set()
            if wanted is None:
                with pytest.raises(ConnectorNotFound):
                    await patching
            else:
                await patching
                assert herder.connector_config("c") == config(**wanted)


async def test_a_sinks_group_may_be_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The offsets of a sink whose group is a variable are those of the variable's value. They can be read also if
    another variable cannot be resolved."""
    secrets = tmp_path / "secrets"
    secrets.write_text("password=x")
    monkeypatch.setenv("PENSTOCK_TEST_GROUP", "own")
    sink = {"name": "snk", "connector.class": "Sink", "topics": "t", "tasks.max": "1"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", config_providers="env,file") as herder:
        cluster.create_topic("t")
        sink["consumer.override.group.id"] = "${env:PENSTOCK_TEST_GROUP}"
        sink["password"] = f"${{file:{secrets}:password}}"
        await herder.put_connector("snk", sink, TargetState.STOPPED, replace=False)
        await herder._admin.alter_group_offsets("own", {TopicPartition("t", 0): 3})
        secrets.unlink()
        assert (await herder.connector_offsets("snk"))["offsets"] == [
            {"partition": {"kafka_topic": "t", "kafka_partition": 0}, "offset": {"kafka_offset": 3}}
        ]


async def test_the_class_cannot_be_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `connector.class` with a variable is rejected, also if the variable has a value."""
    monkeypatch.setenv("PENSTOCK_TEST_CLASS", "Sink")
    sink = {"name": "snk", "connector.class": "${env:PENSTOCK_TEST_CLASS}", "topics": "t"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", config_providers="env") as herder:
        with pytest.raises(ConfigError, match=r"connector\.class cannot contain a variable"):
            await herder.put_connector("snk", sink, replace=False)
        assert herder.connectors() == []


async def test_a_sink_cannot_use_the_workers_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink whose consumer group is the workers' group is a BadRequest when it is created or patched."""
    sink = {"name": "snk", "connector.class": "Sink", "topics": "t", "tasks.max": "1"}
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1", group_id="connect-snk", config_providers="env") as herder,
    ):
        conflict = r"named {} .*group connect-snk$"
        with pytest.raises(BadRequest, match=conflict.format("snk")):
            await herder.put_connector("snk", sink, replace=False)
        other = sink | {"name": "other", "consumer.override.group.id": "connect-snk"}
        with pytest.raises(BadRequest, match=conflict.format("other")):
            await herder.put_connector("other", other, replace=False)
        await herder.put_connector("other", sink | {"name": "other"}, TargetState.STOPPED, replace=False)
        with pytest.raises(BadRequest, match=conflict.format("other")):
            await herder.patch_connector("other", {"consumer.override.group.id": "connect-snk"})
        monkeypatch.setenv("PENSTOCK_TEST_GROUP", "connect-snk")
        other = sink | {"name": "other", "consumer.override.group.id": "${env:PENSTOCK_TEST_GROUP}"}
        with pytest.raises(BadRequest, match=conflict.format("other")):
            await herder.put_connector("other", other, replace=True)
        # a source reads in no group
        await herder.put_connector("snk", config("snk"), TargetState.STOPPED, replace=False)
        assert herder.connectors() == ["other", "snk"]


async def test_under_exactly_once_a_zombie_is_fenced_before_offsets_are_altered() -> None:
    """With exactly-once a zombie task is fenced before offsets are altered, so that it cannot overwrite them."""
    once = {"exactly_once_source_support": "enabled"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", **once) as herder:
        cluster.create_topic("t")
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka, ProducerSettings(transactional_id="g-c-1")) as zombie:
            await zombie.init_transactions()
            await zombie.begin_transaction()
            await zombie.send("t", b"late")
            await herder.set_target_state("c", TargetState.STOPPED)
            await until(lambda: not herder.worker.task_ids() and states(herder) == ["STOPPED"])
            await herder.alter_offsets("c", [({"file": "a"}, {"at": 3})])
            with pytest.raises(ProducerFenced):
                await zombie.commit_transaction()
        assert (await herder.connector_offsets("c"))["offsets"] == [{"partition": {"file": "a"}, "offset": {"at": 3}}]


async def test_a_task_starts_only_once_the_newest_set_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another set of tasks is stored while older tasks are fenced, they are fenced again before a task starts.
    This waits for the backoff, since the leader may not know the set yet."""
    once = {"exactly_once_source_support": "enabled"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", **once) as herder:
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        snapshot, fenced, waits = herder.snapshot(), list[str](), list[int]()

        async def fence(name: str) -> None:
            fenced.append(name)

        def pending() -> ConfigSnapshot:
            return dataclasses.replace(snapshot, pending_fencing=frozenset({"c"} if len(fenced) < 2 else ()))

        class NotedBackoff(ExponentialBackoff):
            def wait_ms(self, failures: int, random: float = 0.5) -> float:
                waits.append(failures)
                return 0

        monkeypatch.setattr(herder, "snapshot", pending)
        monkeypatch.setattr(herder, "_request_fencing", fence)
        monkeypatch.setattr(BaseHerder, "_retry_backoff", NotedBackoff(0, 0))
        assert await herder._fence_before_source_task(TASK)
        assert fenced == ["c", "c"]
        assert waits == [1]


async def test_fencing_is_retried_while_kafka_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Kafka does not answer while the leader fences a source's older tasks, the leader fences them again, and the
    newer tasks start afterwards."""
    init_transactions = Producer.init_transactions
    failures = [KafkaTimeout("no response")]

    async def flaky(producer: Producer) -> None:
        if failures:
            raise failures.pop()
        await init_transactions(producer)

    monkeypatch.setattr(BaseHerder, "_retry_backoff", ExponentialBackoff(0, 0))
    once = {"exactly_once_source_support": "enabled"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", **once) as herder:
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        monkeypatch.setattr(Producer, "init_transactions", flaky)
        await herder.patch_connector("c", {"word": "x"})
        await until(lambda: not failures and states(herder) == ["RUNNING"] * 3)


async def test_older_tasks_are_fenced_with_their_own_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source's older tasks are fenced with the client settings of their producers: the worker's own user may not have
    the permission for their transactional ids."""
    fenced: list[tuple[str | None, list[str]]] = []

    async def fence(kafka: KafkaSettings, ids: Iterable[str]) -> None:
        fenced.append((kafka.sasl_username, list(ids)))

    monkeypatch.setattr(distributed, "fence_producers", fence)
    user = {"producer.override.sasl.jaas.config": 'PlainLoginModule required username="ann" password="x";'}
    once = {"exactly_once_source_support": "enabled"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", **once) as herder:
        await herder.put_connector("c", config(**user), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        await herder.patch_connector("c", {"word": "x"})
        await until(lambda: fenced and states(herder) == ["RUNNING"] * 3)
    assert fenced == [("ann", ["g-c-0", "g-c-1"])]


async def test_the_leader_handles_requests_while_it_fences_older_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the leader waits for Kafka to fence a source's older tasks, it handles other requests. Each producer is
    fenced once, although each new task requests it."""
    init_transactions = Producer.init_transactions
    fenced, may_fence = list[str | None](), asyncio.Event()

    async def slow(producer: Producer) -> None:
        fenced.append(producer._settings.transactional_id)
        await may_fence.wait()
        await init_transactions(producer)

    once = {"exactly_once_source_support": "enabled"}
    async with FakeCluster() as cluster, running_herder(cluster, "a:1", **once) as herder:
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        monkeypatch.setattr(Producer, "init_transactions", slow)
        await herder.patch_connector("c", {"word": "x"})
        await until(lambda: len(fenced) == 2)
        await herder.put_connector("d", config("d"), replace=False)
        await until(lambda: states(herder, "d") == ["RUNNING"] * 3)
        assert TASK not in herder.worker.task_ids()
        may_fence.set()
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        assert sorted(fenced, key=str) == ["g-c-0", "g-c-1"]


async def test_task_configs_that_cannot_be_made_are_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a connector cannot make its task configs for a while, such as without its database, they are requested again.
    Only more of them than tasks.max fail the connector."""
    failures = [ConnectError("no database"), ConnectError("no database")]

    class Flaky(MultiTaskSource):
        async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
            if failures:
                raise failures.pop()
            return await super().task_configs(max_tasks + int(self.props.get("more", "0")))

    monkeypatch.setattr(BaseHerder, "_retry_backoff", ExponentialBackoff(0, 0))
    async with FakeCluster() as cluster, running_herder(cluster, "a:1") as herder:
        herder.worker.plugins.add(Flaky, "Flaky")
        flaky = config() | {"connector.class": "Flaky"}
        await herder.put_connector("c", flaky, replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        await herder.put_connector("c", flaky | {"more": "1"}, replace=True)
        await until(lambda: states(herder)[0] == "FAILED")
        assert "tasks.max" in herder.connector_status("c")["connector"]["trace"]


async def test_writing_the_session_key_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader retries writing the session key after any error that a retry may solve, and requests wait until
    workers have a key.
    """
    write = KafkaConfigStore.put_session_key
    failures: list[PenstockError] = [
        KafkaTimeout("no response"),
        DeliveryTimeout("not acknowledged"),
        TransactionAborted("not committed"),
    ]

    async def flaky(store: KafkaConfigStore, key: SessionKey) -> None:
        if failures:
            raise failures.pop()
        await write(store, key)

    monkeypatch.setattr(KafkaConfigStore, "put_session_key", flaky)
    monkeypatch.setattr(distributed, "RETRY_MS", 1)
    async with FakeCluster() as cluster, running_herder(cluster, "a:1") as herder:
        await herder.put_connector("c", config(), replace=False)
        assert failures == []
        assert herder.snapshot().session_key is not None


async def test_the_leader_writes_again_after_a_commit_of_unknown_outcome() -> None:
    """After a commit whose outcome is unknown the leader claims the config topic again, and makes the next change."""
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1", exactly_once_source_support="preparing") as herder,
    ):
        await until(lambda: herder.snapshot().session_key is not None)
        cluster.control(Api.END_TXN, Fail(-1), times=1)
        with pytest.raises(BrokerError):
            await herder.put_connector("c", config(), replace=False)
        await herder.put_connector("d", config("d"), replace=False)
        await until(lambda: states(herder, "d") == ["RUNNING"] * 3)


@pytest.mark.parametrize("fenced", [2, 3], ids=["task configs", "task count"])
async def test_a_fenced_leader_that_still_leads_starts_its_tasks(fenced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the leader is fenced while it stores configs or the number of its own tasks, it claims the config topic again
    and starts them.
    """
    commits = itertools.count(1)
    monkeypatch.setattr(BaseHerder, "_retry_backoff", ExponentialBackoff(0, 0))
    async with (
        FakeCluster() as cluster,
        running_herder(cluster, "a:1", exactly_once_source_support="enabled") as herder,
    ):
        await until(lambda: herder.snapshot().session_key is not None)
        cluster.control(Api.END_TXN, lambda _: Fail(ErrorCode.PRODUCER_FENCED) if next(commits) == fenced else None)
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)


class SlowToStop:
    """A worker with one connector, which stops once `may_stop` is set."""

    def __init__(self) -> None:
        self.running = {"x"}
        self.starts = 0
        self.may_stop = asyncio.Event()
        self.restart_waits_ms: list[int] = []

    def connector_names(self) -> frozenset[str]:
        return frozenset(self.running)

    def task_ids(self) -> frozenset[ConnectorTaskId]:
        return frozenset()

    async def stop_connector(self, name: str) -> None:
        if name in self.running:
            self.running.discard(name)
            await self.may_stop.wait()

    async def stop_connectors(self, names: Iterable[str]) -> None:
        for name in names:
            await self.stop_connector(name)

    async def stop_tasks(self, ids: Iterable[ConnectorTaskId]) -> None: ...

    def restart_wait_ms(self, id: ConnectorTaskId) -> int | None:
        return self.restart_waits_ms.pop() if self.restart_waits_ms else None

    async def start_connector(self, name: str, *_: object) -> State:
        self.running.add(name)
        self.starts += 1
        return State.RUNNING


def runner(worker: SlowToStop) -> tuple[WorkRunner, list[str]]:
    snapshot = ConfigSnapshot(configs={"x": {}}, target_states={"x": TargetState.STARTED})
    started: list[str] = []
    made = WorkRunner(
        cast(Any, worker), cast(Any, None), lambda: snapshot,
        on_reconfiguration=started.append,
    )  # fmt: skip
    return made, started


async def test_a_connector_revoked_during_its_restart_does_not_start() -> None:
    """A connector that is given up during its restart stops before the call ends, and does not start again."""
    worker = SlowToStop()
    work, started = runner(worker)
    work.beside(work.restart_connector("x"))
    await turns()
    giving_up = asyncio.ensure_future(work.stop(ConnectorsAndTasks({"x"}, ())))
    await turns()
    assert not giving_up.done()
    worker.may_stop.set()
    await giving_up
    await turns()
    assert (worker.running, worker.starts, started) == (set(), 0, [])


async def test_a_reassigned_connector_starts_after_the_old_one_has_stopped() -> None:
    """A connector that is given up and assigned again during its restart starts once, after the old one has stopped."""
    worker = SlowToStop()
    work, started = runner(worker)
    work.beside(work.restart_connector("x"))
    await turns()
    giving_up = asyncio.ensure_future(work.stop(ConnectorsAndTasks({"x"}, ())))
    await turns()
    await work.start(ConnectorsAndTasks({"x"}, ()))
    await turns()
    assert worker.starts == 0
    worker.may_stop.set()
    await giving_up
    await work.until_started("x", 60_000)
    assert (worker.running, worker.starts, started) == ({"x"}, 1, ["x"])


async def test_a_restart_stops_and_starts() -> None:
    """A restart stops and starts the connector, and calls `on_reconfiguration`."""
    worker = SlowToStop()
    worker.may_stop.set()
    work, started = runner(worker)
    await work.restart_connector("x")
    assert (worker.starts, started) == (1, ["x"])


async def test_the_end_waits_for_a_stop_whose_caller_was_cancelled() -> None:
    """`close` returns when all work is stopped, also work whose stop was cancelled, as by a signal in a rebalance."""
    worker = SlowToStop()
    work, _ = runner(worker)
    revoking = asyncio.create_task(work.stop(work.running()))
    await turns()
    revoking.cancel()
    await turns()
    closing = asyncio.create_task(work.close())
    await turns()
    assert (revoking.cancelled(), closing.done()) == (True, False)
    worker.may_stop.set()
    await closing


async def test_a_connector_in_a_restart_is_stopped_at_the_end() -> None:
    """`close` waits for the stop of a connector that is in a restart, and the connector does not start again."""
    worker = SlowToStop()
    work, _ = runner(worker)
    work.beside(work.restart_connector("x"))
    await turns()
    closing = asyncio.create_task(work.close())
    await turns()
    assert not closing.done()
    worker.may_stop.set()
    await closing
    await turns()
    assert (worker.running, worker.starts) == (set(), 0)


@pytest.mark.parametrize("error", [KafkaTimeout("late"), ExceptionGroup("several", [KafkaTimeout("late")]), KeyError()])
async def test_a_task_that_cannot_be_prepared_is_failed(error: Exception) -> None:
    """Any error before a task's start is the task's: its status is FAILED with the trace, and it is restarted as after
    any other failure.
    """
    snapshot = ConfigSnapshot(configs={"x": {}}, task_configs={X_TASK: {}}, task_counts={"x": 1})
    listener = StatusRecorder()
    worker = SlowToStop()
    worker.restart_waits_ms = [0]

    async def before_task(task: ConnectorTaskId) -> bool:
        raise error

    work = WorkRunner(
        cast(Any, worker), cast(Any, listener), lambda: snapshot,
        on_reconfiguration=print, before_task=before_task,
    )  # fmt: skip
    await work.start_task(X_TASK)
    await turns()
    assert listener.of(X_TASK) == ["failure", "restart", "failure"]
    assert type(error).__name__ in listener.traces[0]
    assert work.running().tasks == frozenset()


async def test_a_task_that_is_restarted_while_it_is_prepared_is_still_stopped() -> None:
    """A task whose preparation begins again in a restart belongs to the running work, and `stop` ends it."""
    snapshot = ConfigSnapshot(configs={"x": {}}, task_configs={X_TASK: {}}, task_counts={"x": 1})
    ended = []

    async def before_task(task: ConnectorTaskId) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(task)
        return True

    worker = SlowToStop()
    worker.may_stop.set()
    work = WorkRunner(
        cast(Any, worker), cast(Any, StatusRecorder()), lambda: snapshot,
        on_reconfiguration=print, before_task=before_task,
    )  # fmt: skip
    await work.start_task(X_TASK)
    await turns()
    await work.restart_tasks([X_TASK])
    await turns()
    assert work.running().tasks == {X_TASK}
    await work.stop(work.running())
    await turns()
    assert ended == [X_TASK] * 2


def test_only_a_new_connector_needs_a_rebalance() -> None:
    """A changed connector is restarted; a new one needs a rebalance."""
    changes = ConfigChanges()
    changes.add(ConnectorChanged("c", is_new=False), 1)
    assert (changes.connectors, changes.rejoin) == ({"c"}, None)
    changes.add(ConnectorChanged("d", is_new=True), 2)
    assert (changes.connectors, changes.rejoin) == ({"c"}, ("connector d is new", 2))


def test_a_removed_connector_is_stopped_and_not_restarted() -> None:
    """A removal discards earlier changes of the connector, stops it and needs a rebalance."""
    changes = ConfigChanges()
    changes.add(ConnectorChanged("c", is_new=False), 1)
    changes.add(TargetStateChanged("c"), 2)
    changes.add(ConnectorRemoved("c"), 3)
    assert (changes.connectors, changes.targets, changes.removed) == (set(), set(), {"c"})
    assert changes.rejoin == ("connector c was removed", 3)


async def test_only_a_change_after_the_assignment_needs_a_rebalance() -> None:
    """A worker that reads a change only after the assignment that includes it requests no other rebalance."""
    async with FakeCluster() as cluster, running_herder(cluster, "a:1") as herder:
        assert herder.member.assignment is not None
        included = herder.member.assignment.config_offset
        before = herder.rebalances
        for later in (0, 1):
            herder._pending.add(TasksChanged("c", (TASK,)), included + later)
            herder.wake()
            await until(lambda: not herder._pending and not herder.member.needs_to_join)
            assert herder.rebalances == before + later


def test_restart_requests_are_merged() -> None:
    """Of two pending restart requests the wider one remains."""
    changes = ConfigChanges()
    assert not changes
    changes.add(RestartRequest("c", only_failed=True, include_tasks=False), 1)
    changes.add(RestartRequest("c", only_failed=False, include_tasks=True), 2)
    assert changes.restarts == {"c": RestartRequest("c", only_failed=False, include_tasks=True)}
    assert changes


def test_levels_of_loggers_are_kept_in_order() -> None:
    """Logger levels are kept in order, and neither they nor session keys need a rebalance."""
    changes = ConfigChanges()
    levels = [LoggerLevel("root", "DEBUG"), LoggerLevel("root", "INFO")]
    for at, level in enumerate(levels):
        changes.add(level, at)
    changes.add(SessionKey(b"k", "a", 1), 4)
    assert (changes.loggers, changes.rejoin) == (levels, None)


def test_defaults_of_settings_are_kafka_connects() -> None:
    """Defaults are Kafka Connect's."""
    config = DistributedConfig(REQUIRED)
    assert config["scheduled.rebalance.max.delay.ms"] == 300_000
    assert config["session.timeout.ms"] == 10_000
    assert config.offered_versions == (SESSIONED, COMPATIBLE, EAGER)
    assert not config.exactly_once
    assert config.kafka.bootstrap_servers == "a:9092"


def test_topics_follow_their_settings() -> None:
    """Topics have their settings' partitions, replicas and configs; the config topic has one
    partition, and the cleanup policy is ignored.
    """
    config = DistributedConfig(
        REQUIRED | {"offset.storage.partitions": "3", "offset.storage.min.insync.replicas": "2",
                 "config.storage.replication.factor": "1", "offset.storage.cleanup.policy": "delete"}
    )  # fmt: skip
    offsets, configs = config.topic("offset"), config.topic("config")
    assert (offsets.name, offsets.partitions, dict(offsets.configs)) == ("offsets", 3, {"min.insync.replicas": "2"})
    assert (configs.partitions, configs.replication_factor, configs.is_single) == (1, 1, True)


def test_transactional_ids_are_kafka_connects() -> None:
    """Transactional ids are Kafka Connect's, so that workers of both kinds fence each other."""
    config = DistributedConfig(REQUIRED | {"exactly.once.source.support": "enabled"})
    assert config.exactly_once
    assert transactional_id(config["group.id"], ConnectorTaskId("c", 2)) == "g-c-2"
    assert config.leader_transactional_id == "connect-cluster-g"
    preparing = DistributedConfig(REQUIRED | {"exactly.once.source.support": "preparing"})
    assert (preparing.exactly_once, preparing.transactional_leader) == (False, True)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"group.id": None}, "group.id"),
        ({"heartbeat.interval.ms": "10000"}, "heartbeat.interval.ms"),
        ({"status.storage.topic": "configs"}, "storage"),
        ({"connect.protocol": "psychic"}, "connect.protocol"),
        ({"inter.worker.signature.algorithm": "HmacSHA512"}, "inter.worker.signature.algorithm"),
    ],
)
def test_invalid_settings_are_named(wrong: dict[str, str | None], named: str) -> None:
    """Missing, contradictory and invalid settings are errors that name the setting."""
    props = {name: value for name, value in (REQUIRED | wrong).items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        DistributedConfig(props)


def test_distributed_workers_may_run_tasks_in_processes() -> None:
    """A distributed worker accepts process isolation."""
    assert DistributedConfig(REQUIRED | {"penstock.task.isolation": "process"})["penstock.task.isolation"] == "process"
