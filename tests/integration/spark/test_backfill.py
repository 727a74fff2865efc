"""Backfills from a real topic and from files, and the hand-over to a real worker."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from penstock.services.aggregator.found_windows import results, shown
from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark.asked import StateGone, UnfinishedBackfill
from penstock.services.spark.audit import Report, run_audit
from penstock.services.spark.backfill import Backfill
from penstock.services.spark.backfill_inputs import read_history
from penstock.services.spark.compact import Compaction
from penstock.services.spark.corrections import Corrections
from penstock.services.spark.failures import BackfillFailed
from penstock.services.spark.origins import NotAuditable
from penstock.services.spark.settings import AuditSettings, BackfillSettings, CompactSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.common.errors import ChangelogHole, ConfigError
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.latest import Latest
from penstock.shared.streams.stream_worker import StreamWorker
from penstock.shared.streams.topology_loading import load_topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.integration.test_stream_worker import Chain, chain_of, kafka_of, or_its_error, running, settings_of

TOPOLOGY = """
from penstock.shared.streams.aggregations import Count, CountDistinct, Mean, Sum
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.quantiles import Quantiles


def measured(topic, name):
    builder = StreamsBuilder()
    values = {"n": Count(), "sum": Sum("x"), "places": CountDistinct("place"), "half": Quantiles("x", [0.5])}
    builder.stream(topic).group_by_key().session_window(100, 50).aggregate("s", **values).on_close().to(f"{name}-out")
    return builder.build()


def counted(group, name):
    group.aggregate("s", n=Count(), sum=Sum("x")).on_close().to(f"{name}-out")


def tumbling(topic, name):
    builder = StreamsBuilder()
    counted(builder.stream(topic).group_by_key().tumbling_window(100, 50), name)
    return builder.build()


def hopping(topic, name):
    builder = StreamsBuilder()
    counted(builder.stream(topic).group_by_key().hopping_window(120, 40, 50), name)
    return builder.build()


def build(topic, name):
    builder = StreamsBuilder()
    keyed = builder.stream(topic, late=f"{name}-late", dead_letters=f"{name}-dlq").group_by_key()
    values = {"n": Count(), "sum": Sum("id"), "mean": Mean("id"), "places": CountDistinct("id")}
    keyed.session_window(100, 50).aggregate("s", **values).on_close().to(f"{name}-out")
    return builder.build()


def failing(topic, name):
    builder = StreamsBuilder()
    builder.stream(topic).map_values(lambda value: 1 // 0).to(f"{name}-out")
    return builder.build()
"""
STORES = ("s",)


@pytest.fixture
def job(spark: Any, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Backfill]:
    """Makes a backfill of application `name` from `topic`, into a lake of the test's own."""
    module = f"history_{os.getpid()}_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(TOPOLOGY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(topic: str, name: str, kind: type[Backfill] = Backfill, build: str = "build", **more: Any) -> Backfill:
        settings = BackfillSettings(
            application=name,
            lake=str(tmp_path / more.pop("lake", "lake")),
            kafka=kafka_of(kafka),
            topology=f"{module}:{build}",
            topology_options={"topic": topic, "name": name},
            **more,
        )
        return kind(spark, settings, print)

    return make


def worker_of(job: Backfill) -> StreamWorker:
    settings = job.settings
    build = load_topology(settings.topology, settings.topology_options)
    return StreamWorker(settings.kafka, settings_of(settings.application, lake=settings.lake), build)


def compact(job: Backfill) -> None:
    given = job.settings
    settings = CompactSettings(application=given.application, lake=given.lake, kafka=given.kafka)
    Compaction(job.spark, settings, print).run()


def audit(job: Backfill, **more: Any) -> Report:
    given = job.settings
    settings = AuditSettings(application=given.application, lake=given.lake, kafka=given.kafka, **more)
    return run_audit(job.spark, settings, print)


def rows(path: Path, columns: str) -> list[dict[str, Any]]:
    table = DeltaTable(str(path))
    found = QueryBuilder().register("t", table).execute(f"SELECT {columns} FROM t").read_all()
    return sorted(pa.table(found).to_pylist(), key=repr)


def state_of(job: Backfill) -> tuple[list[Any], list[Any]]:
    """Closed windows with results, state and closing time, and live windows: all but when they were written."""
    folder = Path(job.settings.tables)
    closed = "key, start_ms, end_ms, n, sum, mean, places, state, closed_at, revision, partition, day"
    live = "partition, store, key, start_ms, end_ms, s"
    windows = [row for row in rows(folder / "state", f"{live}, row") if row.pop("row") == "window"]
    return rows(folder / "closed" / "s", closed), windows


async def stream(worker: StreamWorker, chain: Chain) -> dict[int, dict[str, Any]]:
    """Have a worker take the topic to its end; what it says of its tasks."""
    async with running(worker) as loop:
        await or_its_error(loop, chain.wait_processed(worker))
        return {task["partition"]: task for task in worker.describe()["tasks"]}


async def test_backfill_and_hand_over_equal_having_streamed(
    kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill], capsys: pytest.CaptureFixture[str]
) -> None:
    """A backfill up to an offset, and the aggregator from there on, leave the rows that streaming all of it leaves."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(400)
        history = job(topic_name, f"{topic_name}-b", commit_records=57)
        done = await asyncio.to_thread(history.run)
        assert done.finals > 0
        refused, number = f"{topic_name}-b", history.written[f"{topic_name}-b-late"]
        assert f"records written: 0 to {refused}-dlq, {number} to {refused}-late\n" in capsys.readouterr().out
        assert history.more()["hand_over"] == {topic_name: {0: 200, 1: 200}}
        streamed = job(topic_name, f"{topic_name}-a")
        await stream(worker_of(streamed), chain)
        await asyncio.to_thread(compact, streamed)
        assert state_of(history) == state_of(streamed)
        late = await chain.read(f"{topic_name}-a-late")
        assert len(late) == history.written[f"{topic_name}-b-late"] > 0

        def told(records: list[Any]) -> list[Any]:
            header = "penstock.late.offset"
            return sorted((r.partition, r.timestamp, r.key, r.value, dict(r.headers)[header]) for r in records)

        of_history = await chain.read(f"{topic_name}-b-late")
        assert told(of_history) == told(late)
        lives = [{dict(record.headers)["penstock.late.changelog_id"] for record in of} for of in (late, of_history)]
        assert [len(life) for life in lives] == [1, 1]
        assert lives[0] != lives[1]

        with pytest.raises(ConfigError, match="has state already"):
            await asyncio.to_thread(job(topic_name, f"{topic_name}-b", start="0:1,1:1").run)
        await assert_state_is_needed(history, chain)

        await chain.send(200)
        described = await stream(worker_of(history), chain)
        assert {p: task["records"] for p, task in described.items()} == {0: 100, 1: 100}
        assert all(task["restored_windows"] > 0 for task in described.values())
        with pytest.raises(ConfigError, match="has state already"):
            await asyncio.to_thread(job(topic_name, f"{topic_name}-b").run)
        await stream(worker_of(streamed), chain)
        for one in (history, streamed):
            await asyncio.to_thread(compact, one)
        assert state_of(history) == state_of(streamed)


async def assert_state_is_needed(history: Backfill, chain: Chain) -> None:
    """Neither the aggregator nor a compaction begins where the backfill's `state` is not."""
    state = Path(history.settings.tables) / "state"
    state.rename(state.with_name("elsewhere"))
    for at in (history.settings.lake, None):
        build = load_topology(history.settings.topology, history.settings.topology_options)
        worker = StreamWorker(history.settings.kafka, settings_of(history.settings.application, lake=at), build)
        with pytest.raises(ChangelogHole, match=f"`state` of {history.settings.tables}, which was not found"):
            await stream(worker, chain)
    with pytest.raises(UnfinishedBackfill, match="or its `state` was lost"):
        await asyncio.to_thread(compact, history)
    state.with_name("elsewhere").rename(state)


@pytest.mark.soak
async def test_late_rows_of_files_are_corrected_and_an_audit_refuses_them(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, job: Callable[..., Backfill]
) -> None:
    """What a backfill wrote to the late topic does not wait for offsets of the topic, which a file's rows have not."""
    given = [{"id": i, "at": 1000 if i % 5 == 4 else 1000 + 60 * i, "who": f"key-{i % 3}"} for i in range(40)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, given)))
    async with chain_of(kafka, topic_name):
        files = {"files": str(tmp_path / "rows.json"), "format": "json", "key_column": "who", "timestamp_column": "at"}
        history = job(topic_name, topic_name, **files)
        await asyncio.to_thread(history.run)
        settings = CompactSettings(application=topic_name, lake=history.settings.lake, kafka=kafka_of(kafka))
        corrections = Corrections(history.spark, settings, print, "job")
        done = await asyncio.to_thread(corrections.run)
        assert done.late_records == history.written[f"{topic_name}-late"] > 3
        assert done.late_waiting == 0
        with pytest.raises(NotAuditable, match="began with a backfill from files"):
            await asyncio.to_thread(audit, history)


def history_of(number: int) -> list[dict[str, Any]]:
    """Rows in their order; some come late, sessions merge and close, and sums of x depend on their order a little."""
    back = {0: 90, 3: 400}
    return [
        {"nth": i, "at": max(0, i * 13 - back.get(i % 7, 0)), "who": f"key-{i * 5 % 6}"}
        | {"x": 10.0 ** (i % 9) / 3, "place": f"place {i % 17}"}
        for i in range(number)
    ]


Windows = list[list[Any]]
"""Key, start, end and the results."""


def in_order(windows: Iterable[list[Any]]) -> Windows:
    return sorted(windows, key=lambda window: window[:3])


def streamed(job: Backfill, topic: str, given: list[dict[str, Any]], partitions: int) -> tuple[Windows, Windows]:
    """Closed and live windows of an uninterrupted run over rows in this order, each partition on its own."""
    settings = job.settings
    closed, live = [], []
    for partition in range(partitions):
        build = load_topology(settings.topology, settings.topology_options)
        driver = TopologyTestDriver(build, partition=partition, errors=ErrorHandlers())
        for row in given:
            if for_key(row["who"].encode(), partitions) == partition:
                driver.pipe(topic, key=row["who"].encode(), value=json.dumps(row).encode(), timestamp=row["at"])
        closed += [list(json.loads(r.value or b"").values()) for r in driver.read(f"{settings.application}-out")]
        aggregations = build.stores["s"].aggregations
        live += [
            [s.key, s.start, s.end]
            + [a.result(state) for a, state in zip(aggregations, s.states, strict=True) if not isinstance(a, Latest)]
            for s in driver.task.stores["s"].rows()
        ]
    return in_order(closed), in_order(live)


def in_lake(job: Backfill) -> tuple[Windows, Windows]:
    """Closed and live windows of the tables, by their states; the results of closed ones say the same."""
    folder = Path(job.settings.tables)
    (store,) = load_topology(job.settings.topology, job.settings.topology_options).schemas()
    names = [a.name for a in shown(store)]
    closed = rows(folder / "closed" / "s", f"key, start_ms, end_ms, {', '.join(names)}, state")
    for row in closed:
        typed = {n: json.loads(row[n]) if isinstance(row[n], str) else row[n] for n in names}
        assert typed == results(store, row["state"])
    live = [row for row in rows(folder / "state", "key, start_ms, end_ms, s AS state, row") if row["row"] == "window"]
    found = (
        [[r["key"], r["start_ms"], r["end_ms"], *results(store, r["state"]).values()] for r in of]
        for of in (closed, [row | {"key": row["key"].decode()} for row in live])
    )
    return in_order(next(found)), in_order(next(found))


def assert_equal(found: tuple[Windows, Windows], wanted: tuple[Windows, Windows]) -> None:
    """The same windows with the same results, sums of floats within 1e-9 of each other; of both kinds a few."""
    for one, other in zip(found, wanted, strict=True):
        assert len(one) == len(other) > 3
        for window, as_streamed in zip(one, other, strict=True):
            assert window[:3] == as_streamed[:3]
            for result, streamed_one in zip(window[3:], as_streamed[3:], strict=True):
                assert result == pytest.approx(streamed_one, rel=1e-9, abs=0)


def write_files(folder: Path, given: list[dict[str, Any]]) -> dict[str, Path]:
    """The rows as a Parquet file and a Delta table out of order, and in file order as JSON (two files) and CSV.

    A row without a time has text that is none in those two.
    """
    table, mixed = pa.Table.from_pylist(given), pa.Table.from_pylist(given[::-1])
    pa.parquet.write_table(mixed, folder / "rows.parquet")
    write_deltalake(str(folder / "delta"), mixed)
    given = [row if row["at"] is not None else row | {"at": "soon"} for row in given]
    (folder / "json").mkdir()
    half = len(given) // 3
    for name, part in (("a", given[:half]), ("b", given[half:])):
        (folder / "json" / f"{name}.json").write_text("\n".join(map(json.dumps, part)))
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table.column_names)
        writer.writeheader()
        writer.writerows(given)
    return {
        f: folder / p
        for f, p in (("parquet", "rows.parquet"), ("delta", "delta"), ("json", "json"), ("csv", "rows.csv"))
    }


@pytest.mark.parametrize(
    "kind", ["json", *(pytest.param(k, marks=pytest.mark.soak) for k in ("parquet", "delta", "csv"))]
)
async def test_files_equal_having_streamed_them_in_their_order(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, job: Callable[..., Backfill], kind: str
) -> None:
    """Rows by their order column, or in file order, leave the windows of a stream of them; then the topic is read.

    A row without a time is a dead letter with its place in its partition.
    """
    given = history_of(150)
    timeless = given[75] | {"at": None}
    everything = [row | {"nth": nth} for nth, row in enumerate([*given[:75], timeless, *given[75:]])]
    files = write_files(tmp_path, everything)
    partition = for_key(timeless["who"].encode(), 2)
    place = sum(for_key(row["who"].encode(), 2) == partition for row in given[:75])
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(20)
        common = {"files": str(files[kind]), "format": kind, "key_column": "who", "timestamp_column": "at"}
        order = {"order_column": "nth"} if kind in ("parquet", "delta") else {}
        history = job(topic_name, topic_name, build="measured", hand_over="0:4,1:10", **common, **order)
        done = await asyncio.to_thread(history.run)
        wanted = streamed(history, topic_name, given, 2)
        assert_equal(in_lake(history), wanted)
        assert len(wanted[0]) == done.finals
        counted = {name: history.more()[name] for name in ("read", "skipped", "dead_letters")}
        assert counted == {"read": 151, "skipped": 0, "dead_letters": 1}
        (letter,) = await chain.read(f"{topic_name}-dlq")
        assert letter.partition == partition
        assert dict(letter.headers)["penstock.dlq.offset"] == b"%d" % place
        described = await stream(worker_of(history), chain)
        assert {p: task["records"] for p, task in described.items()} == {0: 6, 1: 0}


@pytest.mark.parametrize("windows", ["hopping", pytest.param("tumbling", marks=pytest.mark.soak)])
async def test_time_windows_equal_having_streamed_them(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, job: Callable[..., Backfill], windows: str
) -> None:
    """Windows of one size, closed and live ones, from rows of which some come too late for them."""
    given = history_of(150)
    pa.parquet.write_table(pa.Table.from_pylist(given), tmp_path / "rows.parquet")
    async with chain_of(kafka, topic_name):
        common = {"files": str(tmp_path / "rows.parquet"), "key_column": "who", "timestamp_column": "at"}
        history = job(topic_name, topic_name, build=windows, order_column="nth", **common)
        done = await asyncio.to_thread(history.run)
        wanted = streamed(history, topic_name, given, 2)
        assert_equal(in_lake(history), wanted)
        assert len(wanted[0]) == done.finals


async def test_history_lies_between_places(kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill]) -> None:
    """An offset is itself, a time is the first record that has it or a later one; past the last one there is none."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(60)
        times = [at for _, _, at, _ in chain.sent]

        def offsets(**places: str) -> list[int]:
            settings = job(topic_name, topic_name, **places).settings
            found = read_history(history.spark, settings, [topic_name], 0).records.select("offset").collect()
            return [row.offset for row in found]

        history = job(topic_name, topic_name)
        first = next(i for i, at in enumerate(times) if at >= 130)
        for places, wanted in (
            ({"start": "0:40", "end": "0:43"}, range(40, 43)),
            ({"start": "130"}, range(first, 60)),
            ({"end": "1970-01-01T00:00:00.130Z"}, range(first)),
            ({"start": str(max(times) + 1)}, range(0)),
            ({"end": str(2**63 - 1)}, range(60)),
        ):
            assert await asyncio.to_thread(lambda places=places: offsets(**places)) == list(wanted)


async def test_a_record_of_nanoseconds_is_a_dead_letter(
    kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill]
) -> None:
    """Spark's source stops at it; history is read as streaming reads it, up to its end, markers of transactions too."""
    far = 1_700_000_000_000_000_000
    async with chain_of(kafka, topic_name) as chain:
        times = [(0, 1_000), (0, far), (0, 1_100), (1, 1_000)]
        records = [ProducerRecord(topic_name, b'{"id":1}', b"k", (("h", b"1"),), p, at) for p, at in times]
        async with Producer(chain.kafka, ProducerSettings(transactional_id=topic_name)) as producer:
            await producer.init_transactions()
            async with producer.transaction():
                assert not [r for r in await (await producer.send_many(records)) if isinstance(r, BaseException)]
        history = job(topic_name, topic_name)
        await asyncio.to_thread(history.run)
        told = history.more()
        assert (told["read"], told["dead_letters"]) == (4, 1)
        assert told["hand_over"] == {topic_name: {0: 4, 1: 2}}
        (letter,) = await chain.read(f"{topic_name}-dlq")
        assert dict(letter.headers)["penstock.dlq.offset"] == b"1"
        state = rows(Path(history.settings.tables) / "state", "row, start_ms, end_ms")
        live = [(row["start_ms"], row["end_ms"]) for row in state if row["row"] == "window"]
        assert live == [(1_000, 1_000), (1_000, 1_100)]


async def test_several_topics_are_taken_by_the_times_that_each_has_reached(
    kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill]
) -> None:
    """A late record follows the one it came after; one that is refused for its time holds back none that follow it."""
    now_ms, one, other = 1_000_000, f"{topic_name}-1", f"{topic_name}-2"
    times = {one: [10, 5, now_ms + 86_400_001, 30, 50], other: [7, 20, 40, 60]}
    async with (
        chain_of(kafka, one, partitions=1) as chain,
        chain_of(kafka, other, partitions=1),
        Producer(chain.kafka) as producer,
    ):
        records = [ProducerRecord(topic, b"{}", b"k", (), 0, at) for topic, own in times.items() for at in own]
        assert not [r for r in await (await producer.send_many(records)) if isinstance(r, BaseException)]
        history = job(one, topic_name)
        found = await asyncio.to_thread(read_history, history.spark, history.settings, [one, other], now_ms)
        in_order = [(row.topic[-1], row.offset) for row in await asyncio.to_thread(found.records.collect)]
    assert in_order == [("2", 0), ("1", 0), ("1", 1), ("1", 2), ("2", 1), ("1", 3), ("2", 2), ("1", 4), ("2", 3)]


@pytest.mark.soak
async def test_a_backfill_from_a_time_to_an_offset(
    kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill]
) -> None:
    """It has the windows of those records alone, and the aggregator takes what comes after them."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(300)
        since = next(i for i, (_, _, at, _) in enumerate(chain.sent) if at >= 1_300)
        history = job(topic_name, topic_name, start="1970-01-01T00:00:01.300Z", end="0:250")
        await asyncio.to_thread(history.run)
        assert history.more()["hand_over"] == {topic_name: {0: 250}}
        driver = TopologyTestDriver(history.topology, errors=ErrorHandlers())
        for _, key, at, number in chain.sent[since:250]:
            driver.pipe(topic_name, key=key, value=b'{"id":%d}' % number, timestamp=at)
        closed = [list(json.loads(r.value or b"").values()) for r in driver.read(f"{topic_name}-out")]
        assert in_lake(history)[0] == in_order(closed)
        assert len(closed) > 5
        described = await stream(worker_of(history), chain)
        assert described[0]["records"] == 50
        report = await asyncio.to_thread(audit, history)
        assert report.ok, report
        assert report.records == 300 - since
        # What the backfill closed was not to be published: it was told to write what is refused alone.
        assert any(said.startswith("whether windows that a backfill closed") for said in report.not_compared)


class Crashing(Backfill):
    """Ends after the closed windows were appended and before the state is merged."""

    def _merge(self, *arguments: Any) -> int:
        raise KeyboardInterrupt


class Torn(Backfill):
    """Ends with some of what is for other topics written, and some not."""

    def before_merge(self, plan: Any) -> None:
        assert self._out is not None
        every = self._out.filter("topic IS NOT NULL").collect()
        self._out = self.spark.createDataFrame(every[::3], self._out.schema)
        super().before_merge(plan)
        raise KeyboardInterrupt


@pytest.mark.soak
async def test_a_backfill_after_a_crash_writes_nothing_twice(
    kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill]
) -> None:
    """It goes on up to the ends of the one that crashed, whatever came to the topic since, and writes to tables and
    topics what they have not got yet, so that an audit finds all in its place."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(200)
        for kind in (Torn, Crashing):
            with pytest.raises(KeyboardInterrupt):
                await asyncio.to_thread(job(topic_name, topic_name, kind, outputs="all").run)
        with pytest.raises(ChangelogHole, match="If the backfill has not ended, run it again as it was"):
            await stream(worker_of(job(topic_name, topic_name)), chain)
        with pytest.raises(UnfinishedBackfill, match="run `penstock backfill` again"):
            await asyncio.to_thread(compact, job(topic_name, topic_name))
        with pytest.raises(ConfigError, match=f"rests on .*/lake/{topic_name}, into which a backfill was begun"):
            await asyncio.to_thread(job(topic_name, topic_name, lake="elsewhere").run)
        with pytest.raises(UnfinishedBackfill, match="start was earliest and is 0:40,1:40"):
            await asyncio.to_thread(job(topic_name, topic_name, start="0:40,1:40").run)
        await chain.send(50)
        history = job(topic_name, topic_name, outputs="all")
        done = await asyncio.to_thread(history.run)
        assert done.adopted
        assert history.more()["hand_over"] == {topic_name: {0: 100, 1: 100}}
        keys = rows(Path(history.settings.tables) / "closed" / "s", "partition, key, start_ms, end_ms")
        assert len(keys) == len({tuple(row.values()) for row in keys}) == done.finals
        late, published = [await chain.read(f"{topic_name}-{what}") for what in ("late", "out")]
        assert len(late) == history.written[f"{topic_name}-late"] > 3
        assert len(published) == history.written[f"{topic_name}-out"] == done.finals
        report = await asyncio.to_thread(audit, history, allow_unprocessed=True)
        assert report.ok, report
        assert report.late == len(late)


@pytest.mark.soak
async def test_an_audit_does_not_guess_what_a_backfill_left_out(
    kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill]
) -> None:
    """Without its late records in a topic it is refused by name, with the time from which on an audit is whole."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(200)
        history = job(topic_name, topic_name, outputs="none")
        await asyncio.to_thread(history.run)
        assert history.more()["outputs"] == {}
        late = history.more()["outputs_left_out"][f"{topic_name}-late"]
        assert await chain.read(f"{topic_name}-late") == []
        newest = max(at for _, _, at, _ in chain.sent)
        said = rf"\(--outputs none\), and had some \({topic_name}-late: {late}\).* --start {newest + 2} audits"
        with pytest.raises(NotAuditable, match=said):
            await asyncio.to_thread(audit, history)
        records = [
            ProducerRecord(topic_name, b'{"id": 1}', b"k", (), p, newest + at) for p in (0, 1) for at in (200, 900)
        ]
        async with Producer(chain.kafka) as producer:
            assert not [r for r in await (await producer.send_many(records)) if isinstance(r, BaseException)]
        chain.sent += [(p, b"k", newest, 1) for p in (0, 0, 1, 1)]
        await stream(worker_of(history), chain)
        report = await asyncio.to_thread(audit, history, start=str(newest + 2))
        assert report.ok, report
        assert report.sessions_closed + report.sessions_open > 0


@pytest.mark.soak
async def test_files_that_changed_since_a_crash_are_refused(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, job: Callable[..., Backfill]
) -> None:
    """By what they were and are; put back as they were, they are gone on with, and the windows are those of them."""
    given = history_of(90)
    files = write_files(tmp_path, given)["json"]
    one = files / "a.json"
    before, at = one.read_bytes(), one.stat()
    read = {"files": str(files), "format": "json", "key_column": "who", "timestamp_column": "at", "build": "measured"}
    async with chain_of(kafka, topic_name):
        with pytest.raises(KeyboardInterrupt):
            await asyncio.to_thread(job(topic_name, topic_name, Crashing, **read).run)
        one.write_bytes(before.replace(b'"who": "key-1"', b'"who": "key-2"'))
        assert one.stat().st_size == at.st_size
        size = sum(file.stat().st_size for file in files.iterdir())
        same = rf"2 files of {size} bytes \(\w+\)"
        with pytest.raises(UnfinishedBackfill, match=rf"what it read has changed: it was {same}, and is {same}; put"):
            await asyncio.to_thread(job(topic_name, topic_name, **read).run)
        one.write_bytes(before)
        os.utime(one, ns=(at.st_atime_ns, at.st_mtime_ns))
        (files / "c.json").write_text("{}")
        with pytest.raises(UnfinishedBackfill, match=f"and is 3 files of {size + 2} bytes"):
            await asyncio.to_thread(job(topic_name, topic_name, **read).run)
        (files / "c.json").unlink()
        history = job(topic_name, topic_name, **read)
        assert (await asyncio.to_thread(history.run)).adopted
        assert_equal(in_lake(history), streamed(history, topic_name, given, 2))


class Killed(Backfill):
    """Ends with the state merged, before its upkeep."""

    def after_merge(self, *arguments: Any) -> None:
        raise KeyboardInterrupt


class Unmarked(Backfill):
    """As those of earlier releases: killed before it says in the changelog what it left."""

    def records(self, plan: Any) -> Any:
        everywhere = plan._replace(offsets=plan.offsets._replace(latest=dict.fromkeys(plan.offsets.latest, 1)))
        return super().records(everywhere)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [Killed, Unmarked])
async def test_a_backfill_that_is_killed_behind_its_merge_has_ended(
    kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill], kind: type[Backfill]
) -> None:
    """Asked for again it finds nothing to do; nobody begins without it once an aggregator has begun with it."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(100)
        with contextlib.suppress(KeyboardInterrupt):
            await asyncio.to_thread(job(topic_name, topic_name, kind).run)
        again = job(topic_name, topic_name)
        done = await asyncio.to_thread(again.run)
        assert (done.run, done.finals, done.merged_rows) == (1, 0, 0)
        assert again.more() == {"hand_over": {topic_name: {0: 100}}}
        assert done.live_rows > 0
        await chain.send(20)
        described = await stream(worker_of(again), chain)
        assert described[0]["records"] == 20
        build = load_topology(again.settings.topology, again.settings.topology_options)
        with pytest.raises(ChangelogHole, match=f"`state` of {again.settings.tables}, which was not found"):
            await stream(StreamWorker(again.settings.kafka, settings_of(topic_name), build), chain)
        state = Path(again.settings.tables) / "state"
        state.rename(state.with_name("elsewhere"))
        with pytest.raises(StateGone, match="Put `state` back"):
            await asyncio.to_thread(compact, again)


async def test_what_a_backfill_refuses(kafka: EmbeddedKafka, topic_name: str, job: Callable[..., Backfill]) -> None:
    """A topology that fails names node and record; places that the topic does not have are named too."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(5)
        failing = job(topic_name, topic_name, build="failing", processing_exception_handler="fail")
        with pytest.raises(BackfillFailed, match=f"{topic_name}-0@0 .*cannot be processed: ZeroDivisionError"):
            await asyncio.to_thread(failing.run)
        with pytest.raises(ConfigError, match=f"{topic_name}-0: offset 9; the topic holds 0 to 5"):
            await asyncio.to_thread(job(topic_name, topic_name, start="0:9").run)
        with pytest.raises(ConfigError, match=f"start is after end: {topic_name}-0 from offset 4 to 2"):
            await asyncio.to_thread(job(topic_name, topic_name, start="0:4", end="0:2").run)
        with pytest.raises(ConfigError, match="order_column: a Delta table's files have no order"):
            await asyncio.to_thread(job(topic_name, topic_name, files="x", format="delta").run)
