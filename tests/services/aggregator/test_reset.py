"""`penstock streams reset` on the fake broker: the plan, the rejected calls, and the state after a reset."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.services.aggregator.reset import ResetPlan
from penstock.services.aggregator.streams_command import main
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import LakeNotRemoved
from penstock.shared.common.lake.application_files import TableFiles, remove_files
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

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


def test_the_plan_in_words() -> None:
    """The text of a plan has a line for each deleted resource, and a snapshot's line names its tables."""
    tables = {"closed/visits": TableFiles(2, 34), "state": TableFiles(1, 5)}
    unsure = {"app-x-y-repartition": "app-x"}
    plan = ResetPlan("app", {"t-0": 7}, ["app-changelog"], "s3://lake/app", tables, unsure)
    assert plan.lines() == [
        "topic app-changelog: its records",
        "snapshot s3://lake/app: closed/visits (2 files, 34 bytes), state (1 file, 5 bytes)",
        "offset of t-0: 7",
        "topic app-x-y-repartition stays: it may be application app-x's",
    ]
    assert ResetPlan("app", {}, [], "/lake/app", {}, {}, ("/state/app",)).lines() == [
        "snapshot /lake/app: an empty folder",
        "state /state/app: stores on disk",
    ]
    assert ResetPlan("app", {}, [], None, {}, {}).lines() == ["application app: there is nothing to delete"]


def test_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid flags and invalid settings end with status 2."""
    assert main(["reset", "--execut"]) == 2
    assert main(["reset", "--application-id", "a b"]) == 2
    assert main(["reset", "--application-id", ".."]) == 2
    assert "application" in capsys.readouterr().err
