"""A store's windows from snapshot and tail."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.services.aggregator.changelog_tail import TailChange, decode_tail_change
from penstock.services.aggregator.stored_windows import (
    StoredWindow,
    closed_window_of_lake,
    stored_window_results,
    stored_windows_of_key,
    stored_windows_of_partition,
)
from penstock.shared.common.errors import DataError
from penstock.shared.common.lake.window_queries import ClosedWindow
from penstock.shared.streams.aggregations.aggregation import Count, CountDistinct, Mean, Min
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.latest import LATEST, Latest
from penstock.shared.streams.changelog.changelog_reader import Change, ChangelogReader, apply_one_by_one
from penstock.shared.streams.changelog.format import (
    DELETED,
    FINAL,
    LIVE,
    Progress,
    Takeover,
    encode_live,
    encode_progress,
    encode_takeover,
)
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.state_store import NEVER

AGGREGATIONS: dict[str, Any] = {"n": Count(), "mean": Mean("x"), "least": Min("x"), "ids": CountDistinct("id")}
SCHEMAS = tuple(AggregationSchema.of(name, a) for name, a in AGGREGATIONS.items())
STORE = StoreSchema("s", "session", "string", 10, 5, "on_close", "in", None, None, None, SCHEMAS)
ALWAYS = (-(2**62), 2**62)


def state(*records: dict[str, Any]) -> dict[str, Any]:
    """The state columns of these records, by name."""
    columns = {}
    for name, aggregation in AGGREGATIONS.items():
        made = aggregation.initial()
        for record in records:
            made = aggregation.add(made, record)
        for column, value in zip(aggregation.state_columns, aggregation.to_columns(made), strict=True):
            columns[f"{name}_{column.name}"] = value
    return columns


def change(operation: bytes, start: int, end: int = 0, *records: dict[str, Any]) -> TailChange:
    packed = StateCodec(STORE.state_columns()).pack(list(state(*records).values())) if records else b""
    return decode_tail_change(Change(operation, "s", b"k", start, end, packed, STORE))


ONE, TWO = {"x": 4.0, "id": "a"}, {"x": 8.0, "id": "b"}


def test_results_are_the_aggregations_own() -> None:
    """The result of a state is the one that its aggregation forwards, and a missing column is None."""
    assert stored_window_results(STORE, state(ONE, TWO)) == {"n": 2, "mean": 6.0, "least": 4.0, "ids": 2}
    assert stored_window_results(STORE, state()) == {"n": 0, "mean": None, "least": None, "ids": 0}
    assert stored_window_results(STORE, {"n_n": 3}) == {"n": 3, "mean": None, "least": None, "ids": None}


def test_internal_states_are_not_results() -> None:
    """The internal highest timestamp of a fixed-size window is not in the results, whether the
    window is open or closed.
    """
    own = AggregationSchema.of(LATEST, Latest())
    store = msgspec.structs.replace(STORE, kind="tumbling", aggregations=(own, *SCHEMAS[:1]))
    assert stored_window_results(store, {"latest_ms_ms": 7, "n_n": 3}) == {"n": 3}
    row = ClosedWindow(0, 0, 9, "k", 5, "topic", {LATEST: 7, "n": 3})
    assert closed_window_of_lake(store, row) == StoredWindow(0, 0, 9, "closed", {"n": 3}, "k")


def test_results_of_closed_windows_equal_those_of_open_ones() -> None:
    """JSON in a table is decoded, and an aggregation that was added later is None."""
    listed = AggregationSchema.of("all", CollectList("x", 5))
    store = msgspec.structs.replace(STORE, aggregations=(listed, *SCHEMAS[:2]))
    row = ClosedWindow(0, 0, 9, b"k", 5, "topic", {"all": "[1,null]", "n": 3})
    assert closed_window_of_lake(store, row).results == {"all": [1, None], "n": 3, "mean": None}


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_result_that_is_not_json_is_an_error(text: str) -> None:
    """A result that is not JSON, or nested too deeply, is a DataError with the aggregation's name."""
    store = msgspec.structs.replace(STORE, aggregations=(AggregationSchema.of("all", CollectList("x", 5)),))
    with pytest.raises(DataError, match="'all'"):
        closed_window_of_lake(store, ClosedWindow(0, 0, 9, b"k", 5, "topic", {"all": text}))
    with pytest.raises(DataError, match="'all'"):
        stored_window_results(store, {"all_json": text.encode(), "all_n": 1})


def test_the_tail_overrides_the_snapshot() -> None:
    """Windows that the tail changes, closes or removes are taken from the tail, and the others from the snapshot."""
    rows = [(0, 0, 5), (0, 50, 60), (0, 100, 110), (0, 200, 205), (1, 0, 9)]
    live = [{"partition": p, "start_ms": s, "end_ms": e, "state": state(ONE)} for p, s, e in rows]
    tail = [change(LIVE, 50, 70, ONE, TWO), change(FINAL, 0, 5, ONE), change(DELETED, 100), change(LIVE, 300, 300, TWO)]
    found = sorted(stored_windows_of_key(0, STORE, live, tail, ALWAYS, NEVER), key=lambda one: one.start_ms)
    assert [(one.start_ms, one.end_ms, one.status, one.results["n"]) for one in found] == [
        (0, 5, "closed", 1),
        (50, 70, "open", 2),
        (200, 205, "open", 1),
        (300, 300, "open", 1),
    ]
    assert [one.start_ms for one in stored_windows_of_key(0, STORE, live, tail, (65, 250), NEVER)] == [50, 200]


def test_a_kept_closed_window_is_reported_once() -> None:
    """The live row of a sliding window after its final row is not a separate window."""
    tail = [change(FINAL, 0, 5, ONE), change(LIVE, 0, 5, ONE)]
    assert [one.status for one in stored_windows_of_key(0, STORE, [], tail, ALWAYS, 6)] == ["closed"]


def test_a_kept_closed_window_of_the_snapshot_is_not_open() -> None:
    """A live row of the snapshot that ends before the time from which windows are open is left out."""
    live = [{"partition": 0, "start_ms": end - 5, "end_ms": end, "state": state(ONE)} for end in (19, 20)]
    assert [one.end_ms for one in stored_windows_of_key(0, STORE, live, [], ALWAYS, 20)] == [20]


def entries(store: StoreSchema, commit: int, live: bytes) -> list[tuple[bytes | None, bytes]]:
    """A commit of one live window from 0 to 5 with this state, written with this schema."""
    progress = Progress("app", "exactly_once", {}, 5, {}, {}, (store,), 0)
    return [(b"k", encode_live(0, 1, commit, 0, 5, live)), (None, encode_progress(1, commit, progress))]


def test_a_tail_is_decoded_by_the_schema_that_wrote_it() -> None:
    """Windows written before an aggregation was added have no result for it."""
    whole = list(state(ONE).values())
    old = msgspec.structs.replace(STORE, aggregations=SCHEMAS[:1] + SCHEMAS[2:])
    kept = [v for c, v in zip(STORE.state_columns(), whole, strict=True) if not c.name.startswith("mean_")]
    log = [(None, encode_takeover(1, Takeover("app", "here", 0)))]
    log += entries(old, 1, StateCodec(old.state_columns()).pack(kept))
    seen: list[TailChange] = []
    reader = ChangelogReader(apply_one_by_one(lambda change: seen.append(decode_tail_change(change))))
    for offset, (key, value) in enumerate(log):
        reader.feed_record(offset, key, value)
    (found,) = stored_windows_of_key(0, STORE, [], seen, ALWAYS, NEVER)
    assert found.results == {"n": 1, "mean": None, "least": 4.0, "ids": 1}
    for offset, (key, value) in enumerate(entries(STORE, 2, StateCodec(STORE.state_columns()).pack(whole)), len(log)):
        reader.feed_record(offset, key, value)
    (found,) = stored_windows_of_key(0, STORE, [], seen, ALWAYS, NEVER)
    assert found.results == {"n": 1, "mean": 4.0, "least": 4.0, "ids": 1}


def test_windows_of_several_keys_are_independent() -> None:
    """Changes of one key do not affect other keys' windows, and each window has its key."""
    live = [{"partition": 0, "key": key, "start_ms": 0, "end_ms": 4, "state": state(ONE)} for key in (b"k", b"l")]
    found = stored_windows_of_partition(
        0, STORE, live, [change(FINAL, 0, 4, ONE, TWO), change(LIVE, 20, 30, TWO)], ALWAYS, NEVER
    )
    assert sorted((one.key, one.start_ms, one.status, one.results["n"]) for one in found) == [
        ("k", 0, "closed", 2),
        ("k", 20, "open", 1),
        ("l", 0, "open", 1),
    ]
    assert stored_windows_of_partition(0, STORE, live, [change(FINAL, 0, 4, ONE)], (5, 9), NEVER) == []
