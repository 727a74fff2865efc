"""The audit on streams that were tampered with.

Every way of tampering is held against the checks, one partition for each, all in one comparison. The four that matter
most also go the whole way: through topics, changelog and lake to the verdict of `penstock audit`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark.audit_checks import Inputs, compare, published
from penstock.services.spark.generations import layouts_of
from penstock.services.spark.main import AUDIT_DIFFERENCES, DONE, audit_main, compact_main
from penstock.services.spark.tables import struct_type

Closed = tuple[bytes, int, int, int, list[Any]]


def good(task: Any, aggregations: Mapping[str, Any]) -> None:
    """Nothing is changed."""


def doubled(task: Any, aggregations: Mapping[str, Any]) -> None:
    task.closed.append(task.closed[3])


def lost(task: Any, aggregations: Mapping[str, Any]) -> None:
    task.closed.pop(3)


def moved_to_another_key(task: Any, aggregations: Mapping[str, Any]) -> None:
    task.closed[3] = (b"nobody", *task.closed[3][1:])


def moved_in_time(task: Any, aggregations: Mapping[str, Any]) -> None:
    key, start, end, *rest = task.closed[3]
    task.closed[3] = (key, start + 10_000_000, end + 10_000_000, *rest)


def needlessly_split(task: Any, aggregations: Mapping[str, Any]) -> None:
    """The same records and sums, in two sessions where the rule makes one."""
    index = next(i for i, (_, start, end, _, _) in enumerate(task.closed) if end > start)
    key, start, end, closed_at, _ = task.closed.pop(index)
    gone = {int(headers[2][1]) for _, _, _, headers in (*task.late, *task.dead)}
    own = [
        (time, msgspec.json.decode(value))
        for offset, (k, value, time, _) in enumerate(task.source)
        if k == key and offset not in gone and start <= time <= end
    ]
    for part in ([r for r in own if r[0] == start], [r for r in own if r[0] != start]):
        states = [a.initial() for a in aggregations.values()]
        for _, fields in part:
            states = [a.add(s, fields) for a, s in zip(aggregations.values(), states, strict=True)]
        times = [time for time, _ in part]
        task.closed.append((key, min(times), max(times), closed_at, states))


def late_record_lost(task: Any, aggregations: Mapping[str, Any]) -> None:
    task.late.pop(2)


def late_and_in_a_session(task: Any, aggregations: Mapping[str, Any]) -> None:
    key, start, *_ = task.closed[3]
    offset = next(o for o, (k, _, time, _) in enumerate(task.source) if (k, time) == (key, start))
    task.late.append(as_late(task, offset))


def late_twice(task: Any, aggregations: Mapping[str, Any]) -> None:
    task.late.append(task.late[0])


def late_and_dead(task: Any, aggregations: Mapping[str, Any]) -> None:
    task.late.append(as_late(task, int(task.dead[0][3][2][1])))


def late_from_nowhere(task: Any, aggregations: Mapping[str, Any]) -> None:
    task.late.append(as_late(task, 1_000_000))


def late_for_nothing(task: Any, aggregations: Mapping[str, Any]) -> None:
    """A record that was in time is in the late topic, and its session is gone."""
    index = next(i for i, (_, _, _, _, states) in enumerate(task.closed) if states[0] == 1)
    key, start, *_ = task.closed.pop(index)
    offset = next(o for o, (k, _, time, _) in enumerate(task.source) if (k, time) == (key, start))
    task.late.append(as_late(task, offset))


def wrong_sum(task: Any, aggregations: Mapping[str, Any]) -> None:
    key, start, end, closed_at, states = task.closed[3]
    total, n = states[1]
    task.closed[3] = (key, start, end, closed_at, [states[0], (total + 1e-6, n + (n == 0)), *states[2:]])


def wrong_distinct(task: Any, aggregations: Mapping[str, Any]) -> None:
    """A sketch of as many distinct values, but of others."""
    key, start, end, closed_at, states = task.closed[3]
    sketch = aggregations["places"].initial()
    for i in range(round(states[5].get_estimate())):
        sketch.update(f"elsewhere {i}")
    task.closed[3] = (key, start, end, closed_at, [*states[:5], sketch, *states[6:]])


def wrong_end(task: Any, aggregations: Mapping[str, Any]) -> None:
    key, start, end, *rest = task.closed[3]
    task.closed[3] = (key, start, end + 1, *rest)


def as_late(task: Any, offset: int) -> Any:
    where = (task.name.encode(), str(task.partition).encode(), str(offset).encode())
    names = ("penstock.late.topic", "penstock.late.partition", "penstock.late.offset")
    return (b"k", b"{}", 0, list(zip(names, where, strict=True)))


TAMPERED: dict[Callable[..., None], set[str]] = {
    good: set(),
    doubled: {"unbalanced", "windows"},
    lost: {"unbalanced", "windows"},
    moved_to_another_key: {"unbalanced", "outside", "windows"},
    moved_in_time: {"unbalanced", "outside", "windows"},
    needlessly_split: {"windows"},
    late_record_lost: {"unbalanced", "lateness"},
    late_and_in_a_session: {"lateness"},
    late_twice: {"twice"},
    late_and_dead: {"twice"},
    late_from_nowhere: {"unknown"},
    late_for_nothing: {"lateness"},
    wrong_sum: {"unbalanced", "windows"},
    wrong_distinct: {"unbalanced", "windows"},
    wrong_end: {"outside", "windows"},
}
"""What each way of tampering must be caught by, at the least."""


@pytest.fixture(scope="module")
def found(spark: Any, new_simulation: Any, aggregations: Mapping[str, Any]) -> dict[str, set[str]]:
    """The checks that found a difference, by the way of tampering."""
    simulation = new_simulation("source", len(TAMPERED))
    simulation.feed(150 * len(TAMPERED), seed=7)
    for task, tamper in zip(simulation.tasks, TAMPERED, strict=True):
        tamper(task, aggregations)
    compared = compare(as_inputs(spark, simulation, aggregations))
    rows = compared.differences.select("check", "partition").distinct().collect()
    splits = compared.stream.count() - compared.batch.count()
    assert splits > 10, "the streams must have sessions that closing has split"
    spark.catalog.clearCache()
    names = [tamper.__name__ for tamper in TAMPERED]
    return {name: {row.check for row in rows if row.partition == p} for p, name in enumerate(names)}


def as_inputs(spark: Any, simulation: Any, aggregations: Mapping[str, Any]) -> Inputs:
    store = simulation.tasks[0].store
    (layout,) = layouts_of((store,))
    session = f"partition int, key binary, start_ms bigint, end_ms bigint, state {struct_type(layout)}"

    def row(task: Any, key: bytes, start: int, end: int, states: list[Any]) -> tuple[Any, ...]:
        state = tuple(v for a, s in zip(aggregations.values(), states, strict=True) for v in a.to_columns(s))
        return (task.partition, key, start, end, state)

    def coordinates(kind: str) -> Any:
        headers = [headers for task in simulation.tasks for _, _, _, headers in getattr(task, kind)]
        rows = [(int(h[1][1]), int(h[2][1])) for h in headers]
        return spark.createDataFrame(rows, "partition int, offset bigint")

    tasks = simulation.tasks
    records = [(t.partition, o, time, k, v) for t in tasks for o, (k, v, time, _) in enumerate(t.source)]
    return Inputs(
        records=spark.createDataFrame(
            records, "partition int, offset bigint, timestamp_ms bigint, key binary, value binary"
        ),
        late=coordinates("late"),
        dead=coordinates("dead"),
        closed=spark.createDataFrame([row(t, k, a, b, s) for t in tasks for k, a, b, _, s in t.closed], session),
        live=spark.createDataFrame([row(t, k, *s) for t in tasks for k, own in t.live.items() for s in own], session),
        published=None,
        results=None,
        store=store,
        once=True,
    )


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_each_way_of_tampering_is_caught(found: dict[str, set[str]], tamper: Callable[..., None]) -> None:
    """A good stream has no differences; each way of tampering is found, by the checks that it contradicts."""
    wanted, got = TAMPERED[tamper], found[tamper.__name__]
    assert got >= wanted
    assert bool(got) == bool(wanted)


def test_published_results_are_closed_sessions(spark: Any) -> None:
    """A result that is missing, double, or has another value is a difference; folding takes exact doubles away only.

    A window of which it is not sure that it was published may be there or not.
    """
    schema = "key string, start_ms bigint, end_ms bigint, mean double, n bigint"
    rows = [("a", 0, 9, 1.5, 2), ("b", 0, 9, None, 1), ("c", 0, 9, 3.0, 1), ("d", 5, 5, 0.5, 1), ("f", 5, 5, 0.5, 1)]
    closed = spark.createDataFrame(rows, schema).select(
        "key", "start_ms", "end_ms", (F.col("key") != "f").alias("sure"), "mean", "n"
    )
    given = spark.createDataFrame(
        [
            ("a", 0, 9, 1.5 + 1e-12, 2),
            ("a", 0, 9, 1.5 + 1e-12, 2),
            ("b", 0, 9, None, 1),
            ("c", 0, 9, 3.1, 1),
            ("e", 5, 5, 0.5, 1),
        ],
        schema,
    )
    assert {(r.key, r.at_ms) for r in published(given, closed, once=True).collect()} == {
        ("a", 0),
        ("c", 0),
        ("d", 5),
        ("e", 5),
    }
    assert {r.key for r in published(given, closed, once=False).collect()} == {"c", "d", "e"}


WHOLE_WAY = {doubled: "lake", lost: "lake", moved_in_time: "changelog", needlessly_split: "changelog"}
"""Where the sessions lie that the audit reads; a compaction for each would take as long as the audits."""
UNTOUCHED = {"records", "processed", "unknown", "twice"}  # checks that no tampering with sessions may disturb


@pytest.fixture
def _one_session(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command takes the session that is there, and leaves it and the log as they are."""
    monkeypatch.setattr("penstock.services.spark.session.spark_session", lambda *_: contextlib.nullcontext(spark))
    before = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = before


@pytest.mark.soak
@pytest.mark.usefixtures("_one_session")
@pytest.mark.parametrize("tamper", WHOLE_WAY, ids=lambda tamper: tamper.__name__)
def test_the_command_fails_on_a_stream_that_was_tampered_with(
    tamper: Callable[..., None],
    new_simulation: Any,
    aggregations: Mapping[str, Any],
    topics: Any,
    kafka: EmbeddedKafka,
    topic_name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`penstock audit` ends with status 1 and names the checks that each way contradicts, and none of its input."""
    simulation = new_simulation(topic_name, 1)
    simulation.feed(150, seed=7, commit_every=math.inf)
    (task,) = simulation.tasks
    task.closed, task.finals = task.finals, []
    tamper(task, aggregations)
    task.finals, task.closed = task.closed, []
    task.commit()
    topics.write(simulation)
    flags = ["--kafka.bootstrap-servers", kafka.bootstrap_servers, "--lake", str(tmp_path)]
    flags += ["--application", simulation.name]
    if WHOLE_WAY[tamper] == "lake":
        assert compact_main(flags) == DONE
        assert (tmp_path / simulation.name / "closed" / "banks").is_dir()
    status = audit_main([*flags, "--expect-records", "150", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {name for name, differences in report["differences"].items() if differences}
    assert (status, report["audit_ok"]) == (AUDIT_DIFFERENCES, False)
    assert found >= TAMPERED[tamper]
    assert not found & UNTOUCHED
    assert (report["late"], report["dead_letters"]) == (len(task.late), len(task.dead))
    assert report["sessions_closed"] == len(task.closed) > 20
