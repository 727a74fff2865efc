"""`penstock streams reset|restore-offsets` on the fake broker: plans, rejected calls, and the state afterwards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.aggregator.reset import ResetPlan
from penstock.services.aggregator.restore_offsets import RestorePlan, _check_restore_idleness, compare
from penstock.services.aggregator.streams_command import main
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import KafkaTimeout, LakeNotRemoved
from penstock.shared.common.lake.application_files import TableFiles, remove_files
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.runtime.partition_restore import RESTORE_IDLE_MS_MAX
from penstock.shared.streams.runtime.source_positions import AheadPartition, GroupAhead, committed_position
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.testing.fake_broker import FakeCluster
from penstock.shared.testing.manual_clock import ManualClock
from tests.integration.test_stream_worker import Chain, chain_of, offline, running, topology, until
from tests.integration.test_stream_worker_losses import run_until_error, work
from tests.integration.test_stream_worker_restore import BINARY, delete_head, write_snapshot

OWN = ["app-by-user-repartition", "app-changelog"]
OTHERS = ["app", "app-late", "other-changelog", "other-x-repartition"]


async def prepare(admin: Admin, lake: Path) -> None:
    """Create an application that has read, written and was compacted, beside resources of others."""
    await admin.create_topics([NewTopic(name, 1, 1) for name in (*OWN, *OTHERS)])
    await admin.alter_group_offsets("app", {TopicPartition("app", 0): 0})
    for application in ("app", "other"):
        (lake / application / "state").mkdir(parents=True)
        (lake / application / "state" / "file").write_text("rows")


def folders(lake: Path) -> list[str]:
    return sorted(path.name for path in lake.iterdir())


def arguments(cluster: FakeCluster, *more: str) -> list[str]:
    return ["reset", "--application-id", "app", "--bootstrap-servers", cluster.bootstrap_servers, "--json", *more]


async def test_a_reset_is_a_dry_run_without_execute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --execute nothing changes; with it the application's resources are deleted, and those of others stay."""
    lake, state = tmp_path / "lake", tmp_path / "state"
    monkeypatch.setenv("PENSTOCK_STREAMS__LAKE", str(lake))
    monkeypatch.setenv("PENSTOCK_STREAMS__STATE_DIR", str(state))
    kept = [state / "app", state / "worker-1" / "app", state / "other"]
    for folder in kept:
        folder.mkdir(parents=True)
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        await prepare(admin, lake)
        for more in ([], ["--execute"], []):
            assert await asyncio.to_thread(main, arguments(cluster, *more)) == 0
            if "app" in folders(lake):
                assert set(OWN) <= set(await admin.list_topics())
                assert await admin.group_offsets("app")
        assert await admin.list_topics() == sorted(OTHERS)
        assert [group.group_id for group in await admin.list_groups()] == []
    assert folders(lake) == ["other"]
    assert [folder.is_dir() for folder in kept] == [False, False, True]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["executed"] for one in lines] == [False, True, False]
    plan = {"application": "app", "offsets": {"app-0": 0}, "topics": OWN, "snapshot": str(lake / "app")}
    plan["tables"] = {"state": {"files": 1, "size_bytes": 4}}
    rest = {"unsure": {}, "executed": False}
    assert lines[0] == {**plan, **rest, "state": [str(folder) for folder in kept[:2]]}
    assert lines[2] == {**plan, "offsets": {}, "topics": [], "snapshot": None, "tables": {}, **rest, "state": []}


async def test_a_reset_without_a_lake_says_that_tables_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """The lake may be known to another command only, such as `penstock batch --lake`."""
    async with FakeCluster() as cluster:
        assert await asyncio.to_thread(main, [part for part in arguments(cluster) if part != "--json"]) == 0
    assert "streams.lake is not set: the lake's tables, if there are any, stay" in capsys.readouterr().out


async def test_a_snapshot_that_cannot_be_removed_keeps_the_offsets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the removal of a lake at a URI fails, the offsets stay, so no worker starts on the
    remaining state, and the next reset removes the rest.
    """
    lake = tmp_path / "la ke"
    monkeypatch.setenv("PENSTOCK_STREAMS__LAKE", lake.as_uri())
    monkeypatch.setenv("PENSTOCK_STREAMS__STATE_DIR", str(tmp_path / "state"))
    fail = [True]

    def remove(*where: object) -> None:
        if fail:
            raise LakeNotRemoved("file-1 is not removed")
        remove_files(*where)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.services.aggregator.reset.remove_files", remove)
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        await prepare(admin, lake)
        assert await asyncio.to_thread(main, arguments(cluster, "--execute")) == 1
        assert capsys.readouterr().err == "penstock streams: LakeNotRemoved: file-1 is not removed\n"
        assert await admin.group_offsets("app")
        fail.clear()
        assert await asyncio.to_thread(main, arguments(cluster, "--execute")) == 0
        assert [group.group_id for group in await admin.list_groups()] == []
    assert folders(lake) == ["other"]
    output = json.loads(capsys.readouterr().out)
    assert (output["topics"], output["snapshot"], output["offsets"]) == ([], str(lake / "app"), {"app-0": 0})


async def test_a_state_folder_that_is_a_link_stops_a_reset_before_it_deletes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset does not delete what a link leads to. The plan names the link, so nothing is deleted."""
    lake, state, elsewhere = tmp_path / "lake", tmp_path / "state", tmp_path / "elsewhere"
    monkeypatch.setenv("PENSTOCK_STREAMS__LAKE", str(lake))
    monkeypatch.setenv("PENSTOCK_STREAMS__STATE_DIR", str(state))
    elsewhere.mkdir()
    (state / "worker-1").mkdir(parents=True)
    (state / "worker-1" / "app").symlink_to(elsewhere)
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        await prepare(admin, lake)
        assert await asyncio.to_thread(main, arguments(cluster, "--execute")) != 0
        assert "worker-1/app is a symbolic link" in capsys.readouterr().err
        assert set(OWN) <= set(await admin.list_topics())
        assert await admin.group_offsets("app")
    assert (folders(lake), elsewhere.is_dir()) == (["app", "other"], True)


async def test_an_application_whose_name_begins_with_anothers(capsys: pytest.CaptureFixture[str]) -> None:
    """If one application's name begins with another's, each is reset without the other's topics."""
    of_app, of_eu = "app-by-user-repartition", "app-eu-by-user-repartition"
    offsets = {TopicPartition("clicks", 0): 3}
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        topics = ("clicks", "app-changelog", of_app, "app-eu-changelog", of_eu)
        await admin.create_topics([NewTopic(name, 1, 1) for name in topics])
        await admin.alter_group_offsets("app", {**offsets, TopicPartition(of_app, 0): 2})
        await admin.alter_group_offsets("app-eu", {**offsets, TopicPartition(of_eu, 0): 2})
        assert await asyncio.to_thread(main, arguments(cluster, "--execute")) == 0
        assert set(await admin.list_topics()) == {"clicks", "app-eu-changelog", of_eu}
        await admin.create_topics([NewTopic("app-changelog", 1, 1)])
        of_the_other = ["app-eu" if part == "app" else part for part in arguments(cluster, "--execute")]
        assert await asyncio.to_thread(main, of_the_other) == 0
        assert set(await admin.list_topics()) == {"clicks", "app-changelog"}
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["topics"], first["unsure"]) == ([of_app, "app-changelog"], {of_eu: "app-eu"})
    assert (second["topics"], second["unsure"]) == ([of_eu, "app-eu-changelog"], {})


async def test_a_running_application_is_not_reset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While an instance is a member of the group nothing is deleted, and the error says that it is running."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        cluster.create_topic("app", 1)
        async with Consumer(kafka, ConsumerSettings(group_id="app")) as consumer:
            consumer.subscribe(["app"])
            while not consumer.assignment():
                await consumer.poll(50)
            assert await asyncio.to_thread(main, arguments(cluster, "--execute")) == 1
    assert "application app is running: stop " in capsys.readouterr().err


def test_the_plan_of_a_reset_in_words() -> None:
    """The text of a plan has a line for each deleted resource, and a snapshot's line names its tables."""
    tables = {"closed/visits": TableFiles(2, 34), "state": TableFiles(1, 5)}
    unsure = {"app-x-y-repartition": "app-x"}
    stays = "topics of results, late records and dead letters stay: their records are written again"
    plan = ResetPlan("app", {"t-0": 7}, ["app-changelog"], "s3://lake/app", tables, unsure)
    assert plan.lines() == [
        "topic app-changelog: its records",
        "snapshot s3://lake/app: closed/visits (2 files, 34 bytes), state (1 file, 5 bytes)",
        "offset of t-0: 7",
        stays,
        "topic app-x-y-repartition stays: it may be application app-x's",
    ]
    assert ResetPlan("app", {}, [], "/lake/app", {}, {}, ("/state/app",)).lines() == [
        "snapshot /lake/app: an empty folder",
        "state /state/app: stores on disk",
        stays,
    ]
    assert ResetPlan("app", {}, [], None, {}, {}).lines() == ["application app: there is nothing to delete"]


def test_invalid_arguments_of_a_reset(capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid flags and invalid settings end with status 2."""
    assert main(["reset", "--execut"]) == 2
    assert main(["reset", "--application-id", "a b"]) == 2
    assert main(["reset", "--application-id", ".."]) == 2
    assert "application" in capsys.readouterr().err


TOPIC = "clicks"
FIRST, SECOND = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
QUICK = {"group.min.session.timeout.ms": "10"}
NOTHING = "no committed offset is ahead of the changelog"


async def command(chain: Chain, *more: str) -> int:
    arguments = ["--application-id", chain.topic, "--bootstrap-servers", chain.kafka.bootstrap_servers]
    return await asyncio.to_thread(main, ["restore-offsets", *arguments, *more])


async def committed(chain: Chain) -> dict[TopicPartition, int]:
    async with Admin(chain.kafka) as admin:
        offsets = await admin.group_offsets(chain.topic, require_stable=True)
    return {at: to.offset for at, to in offsets.items()}


async def commit_as_foreign_consumer(chain: Chain, offset: int) -> None:
    """Commit offsets like a foreign consumer that ran while the application was down."""
    async with Admin(chain.kafka) as admin:

        async def is_empty() -> bool:
            return not (await admin.describe_group(chain.topic)).members

        await until(is_empty)  # A static member stays until its session ends.
        await admin.alter_group_offsets(chain.topic, {TopicPartition(chain.topic, p): offset for p in (0, 1)})


async def restart_forever(chain: Chain, **given: Any) -> None:
    """Run the application as a supervisor does, with an immediate restart after each failure."""
    while True:
        try:
            await run_until_error(chain.worker(**given))
        except GroupAhead:
            continue


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("static", [None, "i-1"], ids=["dynamic", "static"])
async def test_foreign_offsets_are_reset_while_the_application_restarts(
    capsys: pytest.CaptureFixture[str], guarantee: str, static: str | None
) -> None:
    """The error names all partitions and the command, which ends the restarts, and all records are processed."""
    given = {"processing_guarantee": guarantee, "group_instance_id": static, "session_timeout_ms": 1_000}
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain:
        await work(chain, 100, **given)
        await chain.send(40)
        await commit_as_foreign_consumer(chain, 70)
        with pytest.raises(GroupAhead, match="not lost state") as raised:
            await run_until_error(chain.worker(**given))
        assert raised.value.ahead == (AheadPartition(FIRST, 70, 50, False), AheadPartition(SECOND, 70, 50, False))
        assert f"penstock streams restore-offsets --application-id {TOPIC} --execute`" in str(raised.value)
        loop = asyncio.create_task(restart_forever(chain, **given))
        assert await command(chain) == 0
        assert await committed(chain) == {FIRST: 70, SECOND: 70}
        assert await command(chain, "--execute") == 0
        output = capsys.readouterr().out
        assert output.count(f"{FIRST}: another client committed 70: back to 50\n") == 2
        assert output.endswith("back to 50\ndone\n")
        assert await command(chain) == 0
        assert capsys.readouterr().out == f"application {TOPIC}: {NOTHING}\n"

        async def is_processed() -> bool:
            return sorted((await committed(chain)).values()) == [70, 70]

        await until(is_processed)
        loop.cancel()
        await asyncio.wait([loop])
        assert (await chain.values("out"), await chain.values("late")) == offline(TOPIC, chain.sent)


async def test_a_healthy_application_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Offsets of a healthy application are never ahead of its changelog, so none are overwritten."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain:
        worker = chain.worker()
        async with running(worker) as loop:
            for _ in range(5):
                await chain.send(20)
                # The status is 1 before the first commit, since there is no offset.
                assert await command(chain, "--execute") in (0, 1)
            await chain.wait_processed(worker)
            assert await command(chain, "--execute") == 0
            assert capsys.readouterr().out.splitlines()[-1] == f"application {TOPIC}: {NOTHING}"
            assert await committed(chain) == {FIRST: 50, SECOND: 50}
            assert not loop.done()
        assert (await chain.values("out"), await chain.values("late")) == offline(TOPIC, chain.sent)


async def test_offsets_are_not_reset_while_a_foreign_consumer_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign consumer that is a member of the group is named, and nothing is changed."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain:
        await work(chain, 100)
        await chain.send(40)
        kafka = chain.kafka.model_copy(update={"client_id": "stray"})
        async with Consumer(kafka, ConsumerSettings(group_id=TOPIC, auto_offset_reset="earliest")) as stray:
            stray.subscribe([TOPIC])
            while not stray.assignment():
                await stray.poll(20)
            await stray.commit({FIRST: 60})
            assert await command(chain, "--execute") == 1
            assert "GroupNotEmpty: group clicks has members" in (errors := capsys.readouterr().err)
            assert "client 'stray'" in errors
            assert (await committed(chain))[FIRST] == 60


async def test_without_a_position_start_over_is_required() -> None:
    """Partitions without a position in the changelog are reset only with `--start-over` and the topic's name."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain:
        await chain.send(100)
        await commit_as_foreign_consumer(chain, 20)
        with pytest.raises(GroupAhead, match="--start-over clicks"):
            await run_until_error(chain.worker())
        assert await command(chain, "--execute") == 0
        assert await committed(chain) == {FIRST: 20, SECOND: 20}
        assert await command(chain, "--execute", "--start-over", "other") == 2
        assert await command(chain, "--execute", "--start-over", TOPIC) == 0
        assert await committed(chain) == {FIRST: 0, SECOND: 0}
        await work(chain, 100)
        assert (await chain.values("out"), await chain.values("late")) == offline(TOPIC, chain.sent)


async def test_the_position_of_a_truncated_changelog_comes_from_the_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the changelog's records were deleted, the position comes from the snapshot; without
    the lake the error names its setting.
    """
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC) as chain:
        await chain.send(100)
        worker = chain.worker(topology(TOPIC, **BINARY))
        async with running(worker):
            await chain.wait_processed(worker)
        covered = await write_snapshot(chain, tmp_path)
        await delete_head(chain, {p: offset for p, (_, offset) in covered.items()})
        await chain.send(40)
        await commit_as_foreign_consumer(chain, 60)
        assert await command(chain, "--execute") == 1
        assert "streams.lake" in capsys.readouterr().err
        monkeypatch.setenv("PENSTOCK_STREAMS__LAKE", str(tmp_path))
        assert await command(chain, "--json", "--execute") == 0
        plan = json.loads(capsys.readouterr().out)
        assert [(one["topic"], one["partition"], one["committed"], one["position"]) for one in plan["back"]] == [
            (TOPIC, 0, 60, 50),
            (TOPIC, 1, 60, 50),
        ]
        assert (plan["unknown"], plan["executed"]) == ([], True)
        assert await committed(chain) == {FIRST: 50, SECOND: 50}


def progress(**sources: int) -> Progress:
    return Progress("app", "exactly_once", sources, {}, {}, {}, (), 0)


def test_the_plan_names_unchanged_offsets() -> None:
    """Offsets of topics and partitions that the application does not read are left unchanged and listed."""
    other, beyond = TopicPartition("other", 0), TopicPartition(TOPIC, 2)
    offsets = {
        FIRST: committed_position(9),
        SECOND: OffsetAndMetadata(9),
        other: OffsetAndMetadata(9),
        beyond: committed_position(9),
    }
    plan = compare(StreamsSettings(application_id="app"), offsets, {0: progress(clicks=5), 1: None})
    assert plan == RestorePlan(
        "app",
        [AheadPartition(FIRST, 9, 5, True)],
        [AheadPartition(SECOND, 9, None, False)],
        [AheadPartition(beyond, 9, None, True), AheadPartition(other, 9, None, False)],
    )
    assert [line.split(": ")[0] for line in plan.lines()] == ["clicks-0", "clicks-1", "clicks-2", "other-0"]
    settings = StreamsSettings(application_id="app", start_from_group_offsets=True)
    assert compare(settings, offsets, {0: progress(clicks=9), 1: None}).back == []


def test_only_positions_that_move_towards_their_ends_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """`restore-offsets` does not wait for a stuck partition for ever while an instance writes to another partition."""
    clock = ManualClock(0)
    monkeypatch.setattr("penstock.services.aggregator.restore_offsets.SYSTEM_CLOCK", clock)
    stuck, busy = (TopicPartition("app-changelog", partition) for partition in (0, 1))
    check, ends = _check_restore_idleness(8), {stuck: 5, busy: 5}
    check({stuck: 1, busy: 3}, ends)
    clock.advance(RESTORE_IDLE_MS_MAX)
    check({stuck: 2, busy: 5}, ends)
    clock.advance(RESTORE_IDLE_MS_MAX)
    check({stuck: 2, busy: 6}, ends)
    clock.advance(1)
    with pytest.raises(KafkaTimeout, match=r"app-changelog-0.* offset 2 of 5"):
        check({stuck: 2, busy: 7}, ends)
