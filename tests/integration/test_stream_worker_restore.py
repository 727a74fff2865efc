"""Restores from a snapshot: the tables are written here in the lake's layout, without Spark."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable

from penstock.services.aggregator.changelog_tail import ChangelogLocation
from penstock.services.aggregator.stored_windows import StoredWindowsQuery, WindowQueryOptions
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import ChangelogHole
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.lake import state_snapshot
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.time_text import time_ms
from penstock.shared.streams.aggregations.aggregation import CountDistinct
from penstock.shared.streams.changelog.changelog_reader import (
    Change,
    ChangelogReader,
    ConfirmedChanges,
    apply_one_by_one,
)
from penstock.shared.streams.changelog.format import DELETED, FINAL, LIVE
from penstock.shared.streams.changelog.state_codec import StateCodec
from tests import lake_tables
from tests.integration.test_stream_worker import WAIT_SECONDS, Chain, chain_of, offline, running, topology
from tests.shared_broker import Broker

BINARY = {"distinct": CountDistinct("id")}  # a sketch: state that is no number
PARTITIONS = 2


async def partition_rows(chain: Chain, partition: int, topic_id: str, ahead: int) -> list[lake_tables.Row]:
    """The rows of a snapshot of a whole changelog partition without a rewrite: one for each change of a window, and one
    for the progress.
    """
    rows: list[lake_tables.Row] = []

    def apply(confirmed: ConfirmedChanges) -> None:
        (store,) = confirmed.stores
        codec, names = StateCodec(store.state_columns()), [column.name for column in store.state_columns()]
        offsets = iter(confirmed.offsets.tolist())

        def take(change: Change) -> None:
            at = partition, store.name, change.key, change.start
            offset = next(offsets)
            if change.operation == LIVE:
                state = dict(zip(names, codec.unpack(change.state), strict=True))
                rows.append(lake_tables.live(*at, change.end, offset, state))
            else:
                assert change.operation in (DELETED, FINAL)
                rows.append(lake_tables.tombstone(*at, offset))

        apply_one_by_one(take)(confirmed)

    reader, end = ChangelogReader(apply), 0
    for record in await chain.read(f"{chain.topic}-changelog"):
        if record.partition == partition:
            reader.feed_record(record.offset, record.key, record.value)
            end = record.offset + 1
    assert reader.progress is not None
    rows += [{**row, "changelog_offset": -1 - at} for at, row in enumerate(rows) if row["live"]]  # superseded by those
    body = msgspec.json.encode(reader.progress)
    return [*rows, lake_tables.progress(partition, end + ahead, body, epoch=reader.epoch, topic_id=topic_id)]


async def write_snapshot(
    chain: Chain, folder: Path, topic_id: str | None = None, ahead: int = 0
) -> dict[int, tuple[int, int]]:
    """Write a table `state` that covers the changelog to its end, or claims to cover `ahead` more records.

    Returns for each partition the number of live windows and the covered offset.
    """
    async with Admin(chain.kafka) as admin:
        described = await admin.describe_topics([f"{chain.topic}-changelog"])
    made_from = topic_id or described[f"{chain.topic}-changelog"].topic_id
    assert made_from is not None
    rows = {p: await partition_rows(chain, p, made_from, ahead) for p in range(chain.partitions)}
    (schema,) = topology(chain.topic, **BINARY).schemas()
    every = [row for partition in rows.values() for row in partition]
    lake_tables.write_state(folder, chain.topic, [schema], every)
    found = {}
    for p, own in rows.items():
        ordered = sorted(own[:-1], key=itemgetter("changelog_offset"))
        newest = {(row["key"], row["start_ms"]): row["live"] for row in ordered}
        found[p] = (sum(newest.values()), own[-1]["changelog_offset"])
    return found


async def work(chain: Chain, number: int, **given: Any) -> dict[int, tuple[int, int]]:
    """Send `number` events and process them with a new worker.

    Returns the windows and records that it restored, by partition.
    """
    await chain.send(number)
    worker = chain.worker(topology(chain.topic, **BINARY), **given)
    async with running(worker):
        await chain.wait_processed(worker)
        reports = {p: owned.report for p, owned in worker.tasks().items()}
        progress = [owned.changelog.progress for owned in worker.tasks().values()]
        assert [one is not None and one.remaining_records for one in progress] == [0] * chain.partitions
    return {p: (report.snapshot_windows, report.changelog_records) for p, report in reports.items()}


async def delete_head(chain: Chain, offsets: dict[int, int]) -> None:
    async with Admin(chain.kafka) as admin:
        await admin.delete_records({TopicPartition(f"{chain.topic}-changelog", p): at for p, at in offsets.items()})


@pytest.mark.parametrize("store", ["in_memory", "rocksDB"])
async def test_a_snapshot_and_the_changelogs_tail_are_the_whole_state(
    kafka: Broker, topic_name: str, tmp_path: Path, store: str
) -> None:
    """A worker that restores from a snapshot and the rest of the changelog continues as if it had never stopped."""
    async with chain_of(kafka, topic_name, PARTITIONS) as chain:
        await work(chain, 300)
        covered = await write_snapshot(chain, tmp_path)
        assert all(windows > 0 for windows, _ in covered.values())
        await work(chain, 100)
        await delete_head(chain, {p: offset for p, (_, offset) in covered.items()})
        restored = await work(
            chain, 200, lake=str(tmp_path), default_dsl_store=store, state_dir=str(tmp_path / "state")
        )
        assert {p: windows for p, (windows, _) in restored.items()} == {
            p: windows for p, (windows, _) in covered.items()
        }
        assert all(records > 0 for _, records in restored.values())
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent, **BINARY)


@pytest.mark.parametrize(
    ("snapshot", "lost", "message"),
    [
        ({"topic_id": "A" * 22}, 0, rf"-changelog.*{'A' * 22}"),
        ({}, 3, r"-changelog-0.*offsets {0} to {2}"),
        ({"ahead": 500}, 0, r"-changelog-0.*ends.*{0}"),
    ],
    ids=["another topic", "a gap after it", "a log that lost its end"],
)
async def test_a_snapshot_that_does_not_fit_is_an_error(
    kafka: Broker, topic_name: str, tmp_path: Path, snapshot: dict[str, Any], lost: int, message: str
) -> None:
    """A snapshot of another topic, or a log that begins after it or ends before it, ends the worker with the reason."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        covered = await write_snapshot(chain, tmp_path, **snapshot)
        await work(chain, 100)
        end = covered[0][1]
        if lost:
            await delete_head(chain, {0: end + lost})
        with pytest.raises(ChangelogHole, match=message.format(end, end + 1, end + 2)):
            async with running(chain.worker(topology(topic_name, **BINARY), lake=str(tmp_path))) as loop:
                await asyncio.wait_for(loop, WAIT_SECONDS)


def overtaken_by_compactions(chain: Chain, monkeypatch: pytest.MonkeyPatch, folder: Path, covered: int) -> list[int]:
    """Replace the first snapshot that is read by the one below `newer`, and delete the log before it.

    Returns a list to which the version of each snapshot that is read is appended, -1 for none.
    """
    read, looked, loop = state_snapshot.read_snapshot, list[int](), asyncio.get_running_loop()

    def overtaken(*arguments: Any) -> state_snapshot.Snapshot | None:
        found = read(*arguments)
        looked.append(-1 if found is None else found.version)
        if len(looked) == 1:
            shutil.rmtree(folder / chain.topic, ignore_errors=True)
            shutil.copytree(folder / "newer" / chain.topic, folder / chain.topic)
            asyncio.run_coroutine_threadsafe(delete_head(chain, {0: covered}), loop).result(WAIT_SECONDS)
        return found

    monkeypatch.setattr(state_snapshot, "read_snapshot", overtaken)
    return looked


async def test_a_query_continues_from_a_newer_snapshot(
    kafka: Broker, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a compaction deletes the log during a query, the query uses the newer snapshot; without one it is an error."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        await write_snapshot(chain, tmp_path)
        await work(chain, 100)
        newer = await write_snapshot(chain, tmp_path / "newer")

        async def query(root: Path | None) -> list[Any]:
            where = None if root is None else str(root)
            keys = KeyRange.of("key-1")
            options = WindowQueryOptions(
                location=ChangelogLocation(chain.kafka, topic_name, where, {}),
                store=None,
                keys=keys,
                time_range=(0, time_ms("9999-12-31")),
                rows_max=1_000,
                timeout_ms=30_000,
                timeout_name="timeout_ms",
            )
            return [one for one in (await StoredWindowsQuery(options).run())[1] if one.status == "open"]

        wanted = await query(None)
        looked = overtaken_by_compactions(chain, monkeypatch, tmp_path, newer[0][1])
        assert await query(tmp_path) == wanted != []
        assert len(looked) == 2
        await delete_head(chain, {0: newer[0][1] + 1})
        with pytest.raises(ChangelogHole, match="the snapshot ends before them"):
            await query(tmp_path)


@pytest.mark.parametrize("first", [True, False], ids=["one is loaded", "there is none yet"])
async def test_a_restore_continues_from_a_newer_snapshot(
    kafka: Broker, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """If a compaction deletes the log during a restore, the restore looks again and uses the newer snapshot."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        if first:
            await write_snapshot(chain, tmp_path)
        await work(chain, 100)
        newer = await write_snapshot(chain, tmp_path / "newer")
        looked = overtaken_by_compactions(chain, monkeypatch, tmp_path, newer[0][1])
        ((windows, _),) = (await work(chain, 50, lake=str(tmp_path))).values()
        assert (windows, len(looked)) == (newer[0][0], 3)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent, **BINARY)


@pytest.mark.parametrize("store", ["in_memory", "rocksDB"])
async def test_a_restore_continues_from_a_newer_version(
    kafka: Broker, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """If a rewrite and a VACUUM delete the files of the version that is read, the restore reads the newer version."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        await write_snapshot(chain, tmp_path)
        read, versions = state_snapshot.read_window_changes, list[int]()

        def taken(*arguments: Any) -> Iterator[Any]:
            versions.append(arguments[4])
            if len(versions) == 1:
                table = DeltaTable(tmp_path / topic_name / "state")
                table.optimize.compact()
                rows = table.to_pyarrow_table().to_pylist()
                (schema,) = topology(topic_name, **BINARY).schemas()
                lake_tables.write_state(tmp_path, topic_name, [schema], rows, kind="rewrite", partition=0)
                table = DeltaTable(tmp_path / topic_name / "state")
                assert table.vacuum(0, dry_run=False, enforce_retention_duration=False)
            return read(*arguments)

        monkeypatch.setattr(state_snapshot, "read_window_changes", taken)
        await work(chain, 50, lake=str(tmp_path), default_dsl_store=store, state_dir=str(tmp_path / "disk"))
        assert (versions[0], len(versions)) == (0, 2)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent, **BINARY)
