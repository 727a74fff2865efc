"""The lake as DataFrames, compared with the engine: windows merged on read equal those of a long grace."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec
import pytest

from penstock import spark as lake
from penstock.services.spark.lake_tables import LakeTables
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Aggregation, Count, CountDistinct, Max, Mean, Min, Sum
from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.documents import ROOT
from tests.lake_tables import LakeWriter, Late, late_records, sliding_lake, small_lake, windows

GAP, SIZE, ADVANCE, GRACE, LONG = 10, 40, 20, 25, 10**9
COMMIT_RECORDS = 10
MERGED = ("session", "hopping")


class Value(TypedDict, total=False):
    """A record's value. Aggregations reject one without a tag."""

    x: float | None
    n: int | None
    tag: Any


def aggregations() -> dict[str, Aggregation[Any]]:
    own: dict[str, Aggregation[Any]] = {"count": Count(), "total": Sum("x"), "whole": Sum("n"), "mean": Mean("x")}
    own |= {"least": Min("n"), "most": Max("x"), "tags": CountDistinct("tag"), "all_tags": CollectSet("tag", 3)}
    return {name: aggregation.bind(Value) for name, aggregation in own.items()}


def topology(grace: int, *kinds: str, **own: Aggregation[Any]) -> Any:
    """One stream in each of these kinds of windows, in stores named after the kinds."""
    builder = StreamsBuilder()
    grouped = builder.stream("in", Value).group_by_key()
    made = {
        "session": lambda: grouped.session_window(gap=GAP, grace=grace),
        "tumbling": lambda: grouped.tumbling_window(size=SIZE, grace=grace),
        "hopping": lambda: grouped.hopping_window(size=SIZE, advance=ADVANCE, grace=grace),
        "sliding": lambda: grouped.sliding_window(difference=SIZE, grace=grace),
    }
    for kind in kinds:
        made[kind]().aggregate(kind, **(own or aggregations())).on_close().to(f"out-{kind}")
    return builder.build()


class Stream(NamedTuple):
    """A driver after a stream, the windows of a driver with a long grace, and the late records."""

    driver: TopologyTestDriver
    truth: dict[tuple[str, bytes, int], tuple[int, dict[str, Any]]]
    late: list[Late]
    half: int


def stream(seed: int, records: int) -> Stream:
    """A random stream, far out of order, with some values that are rejected."""
    rnd = random.Random(seed)
    short, long = (
        TopologyTestDriver(topology(grace, *MERGED), errors=ErrorHandlers(), commit_each=False)
        for grace in (GRACE, LONG)
    )
    short.task.keeps_late = True
    now, half = 0, 0
    for offset in range(records):
        now = max(0, now + rnd.choice([0, 1, 3, 8, 10, 11, 30, 90]))
        at = max(0, now - rnd.choice([0, 0, 0, 5, 20, 60, 150]))
        key = rnd.choice([b"a", b"a", b"b"])
        value = {"x": rnd.choice([None, 0.1, 2.5, -7.3, 1e10]), "n": rnd.choice([None, 3, -4]), "tag": tag(rnd)}
        if rnd.random() < 0.05:
            del value["tag"]
        body = msgspec.json.encode(value)
        for driver in (short, long):
            driver.pipe("in", key=key, value=body, timestamp=at)
        if offset % COMMIT_RECORDS == 0:
            short.commit()
        if offset == records // 2:
            half = len(short.changelog)
    for driver in (short, long):
        driver.commit()
    return Stream(short, windows(long.changelog), late_records(short.changelog), half)


def tag(rnd: random.Random) -> Any:
    return rnd.choice([None, "x", "y", "", 3, 3.0, [1], {"b": 1, "a": 2}, {"a": 2, "b": 1}, "\u00e9"])


@pytest.fixture(scope="module")
def streams(tmp_path_factory: Any) -> tuple[Path, list[Stream]]:
    """Streams, each a partition, in a lake of two compactions and a third that crashed."""
    found = [stream(seed, records=60) for seed in range(12)]
    root = tmp_path_factory.mktemp("lake")
    writer = LakeWriter(root / "app")
    writer.run({p: one.driver.changelog[: one.half] for p, one in enumerate(found)})
    writer.run({p: one.driver.changelog for p, one in enumerate(found)})
    more = found[0].driver
    before = len(more.changelog)
    more.pipe("in", key=b"a", value=b'{"x": 1, "n": 1, "tag": "x"}', timestamp=10**6)
    more.commit()
    writer.run({0: more.changelog}, crash=True)
    del more.changelog[before:]
    return root, found


def identity(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def ms(moment: Any) -> int:
    return round(moment.timestamp() * 1000)


@pytest.mark.parametrize("kind", MERGED)
def test_corrected_is_what_a_long_grace_has(spark: Any, streams: tuple[Path, list[Stream]], kind: str) -> None:
    """`corrected` equals the windows of a run with a long grace, in bounds and results. Float sums of sessions may
    differ by rounding."""
    root, found = streams
    rows = lake.corrected(spark, str(root), "app", kind).collect()
    for partition, one in enumerate(found):
        assert any(late.store.name == kind for late in one.late)
        truth = {(key, start): window for (store, key, start), window in one.truth.items() if store == kind}
        own = [row for row in rows if row.partition == partition]
        bounds = {(row.key.encode(), ms(row.window_start)): ms(row.window_end) for row in own}
        assert len(bounds) == len(own)
        assert bounds == {at: end for at, (end, _) in truth.items()}
        for row in own:
            _, wanted = truth[row.key.encode(), ms(row.window_start)]
            given = {name: row[name] for name in wanted}
            if kind == "session":  # joined sessions are added in another order than records came
                for name in ("total", "mean"):
                    was, should = given.pop(name), wanted.pop(name)
                    assert was == should or was == pytest.approx(should, rel=1e-9, abs=1e-5)
                some, all_ = (msgspec.json.decode(values.pop("all_tags")) for values in (given, wanted))
                assert len(some) == len(all_)
                if len(all_) < 3:
                    assert sorted(map(identity, some)) == sorted(map(identity, all_))
            assert given == wanted


def test_closed_late_and_live_are_as_of_one_moment(spark: Any, streams: tuple[Path, list[Stream]]) -> None:
    """Rows that a crashed compaction appended are left out. Closed and live windows are those of the engine."""
    root, found = streams
    names = list(aggregations())
    bounds = ["key", "window_start", "window_end"]
    coordinates = ["partition", "changelog_offset", "topic_id"]
    wanted = [windows(one.driver.changelog) for one in found]
    tables = LakeTables(spark, f"{root}/app")
    for kind in MERGED:
        store = tables.store(kind)
        closed, late, live = tables.closed(store), tables.late(store), tables.live(store)
        assert closed.columns == [*bounds, *names, "closed_at", "state", *coordinates]
        assert late.columns == ["key", "event_time", "missed", *names, "source_offset", "state", *coordinates]
        assert live.columns == [*bounds, *names, "state", "partition"]
        assert late.count() == sum(record.store.name == kind for one in found for record in one.late)
        both = closed.select(live.columns).unionByName(live).collect()
        assert len(both) == sum(name == kind for of in wanted for name, _, _ in of)
        for row in both:
            end, given = wanted[row.partition][kind, row.key.encode(), ms(row.window_start)]
            assert (ms(row.window_end), {name: row[name] for name in given}) == (end, given)


def test_rows_of_a_partition_without_a_commit_are_left_out(spark: Any, tmp_path: Path) -> None:
    """A compaction crashed after it had appended the first rows of a new partition to `closed` and `late`."""
    writer = LakeWriter(tmp_path / "app")
    for partition, crash in ((0, False), (1, True)):
        driver = TopologyTestDriver(topology(GRACE, "tumbling", n=Count()))
        driver.task.keeps_late = True
        for at in (0, 5_000, 1):
            driver.pipe("in", key=b"%d" % partition, value=b"{}", timestamp=at)
        writer.run({partition: driver.changelog}, crash=crash)
    for read in (lake.closed, lake.late):
        assert {row.key for row in read(spark, str(tmp_path), "app", "tumbling").collect()} == {"0"}


def test_a_closed_sliding_window_is_not_live(spark: Any, tmp_path: Path) -> None:
    """Each sliding window is either closed or live, although the store keeps closed ones for later windows. They cannot
    be merged."""
    driver = TopologyTestDriver(topology(GRACE, "sliding", n=Count()))
    for at in range(0, 400, 15):
        driver.pipe("in", key=b"a", value=b"{}", timestamp=at)
    LakeWriter(tmp_path / "app").run({0: driver.changelog})
    closed, live = (
        {(ms(row.window_start), ms(row.window_end)) for row in read(spark, str(tmp_path), "app", "sliding").collect()}
        for read in (lake.closed, lake.live)
    )
    close_time = driver.task.stores["sliding"].close_time_ms
    assert closed
    assert all(end < close_time for _, end in closed)
    assert live
    assert all(end >= close_time for _, end in live)
    with pytest.raises(ConfigError, match="which sliding windows"):
        lake.corrected(spark, str(tmp_path), "app", "sliding")


def test_invalid_merges_are_rejected_by_name(spark: Any, tmp_path: Path) -> None:
    """Aggregations, stores and lakes."""
    driver = TopologyTestDriver(topology(GRACE, "session", n=Count(), all=CollectList("tag")))
    driver.pipe("in", key=b"a", value=b'{"tag": 1}', timestamp=5)
    LakeWriter(tmp_path / "lists").run({0: driver.changelog})
    assert lake.live(spark, str(tmp_path), "lists", "session").count() == 1
    assert lake.closed(spark, str(tmp_path), "lists", "session").count() == 0
    with pytest.raises(ConfigError, match=r"all \(collect_list\).*Count, Sum"):
        lake.corrected(spark, str(tmp_path), "lists", "session")
    with pytest.raises(ConfigError, match="no 'nosuch'"):
        lake.live(spark, str(tmp_path), "lists", "nosuch")
    with pytest.raises(ConfigError, match="no such table"):
        lake.live(spark, str(tmp_path), "nobody", "session")


def test_a_store_without_windows_has_live_rows_only(spark: Any, tmp_path: Path) -> None:
    """Its rows are live. It has no closed windows and no late records, which an error says by the store's name."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    stream.group_by_key().aggregate("table", n=Count()).to_stream().to("out")
    builder.table("names", dict)
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    driver.pipe("names", key=b"a", value=b'{"name": "A"}', timestamp=5)
    LakeWriter(tmp_path / "app").run({0: driver.changelog})
    assert [(row.key, row.n) for row in lake.live(spark, str(tmp_path), "app", "table").collect()] == [("a", 1)]
    (row,) = lake.live(spark, str(tmp_path), "app", "names").collect()
    assert (row.key, json.loads(row.value)) == ("a", {"name": "A"})
    for read in (lake.closed, lake.late, lake.corrected):
        with pytest.raises(ConfigError, match=r"'table' .* has no windows"):
            read(spark, str(tmp_path), "app", "table")


def test_keys_that_are_bytes_stay_bytes(spark: Any, tmp_path: Path) -> None:
    """Bytes keys have their own column in each DataFrame, and each merged window occurs once."""
    small_lake(tmp_path)
    frames = [read(spark, str(tmp_path), "app", "s") for read in (lake.closed, lake.late, lake.live, lake.corrected)]
    assert [frame.columns[0] for frame in frames] == ["key_bytes"] * 4
    found = sorted((bytes(row.key_bytes), row.n) for row in frames[3].collect())
    assert found == [(b"a", 2), (b"b", 2), (b"b", 2), (b"c", 1), (b"\xff", 2)]


def test_closed_sliding_windows_are_not_open_in_spark_sql(spark: Any, tmp_path: Path) -> None:
    """The example's query does not list sliding windows that `state` keeps after they were closed."""
    spark.conf.set("folder", sliding_lake(tmp_path))
    spark.conf.set("store", "s")
    longest = (ROOT / "examples" / "lake_spark.sql").read_text().split(";")[1]
    assert [tuple(row) for row in spark.sql(longest).collect()] == [("b", 100)]
