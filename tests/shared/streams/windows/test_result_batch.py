"""Results that are encoded together equal those encoded one by one, and their order is defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.aggregations.aggregation import Count, Mean
from penstock.shared.streams.aggregations.latest import LATEST, Latest
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_json, encode_updates
from penstock.shared.streams.window_result import WindowKey
from penstock.shared.streams.windows.result_batch import ResultBatch
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_columns import WindowColumns

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=8)


def texts_of(raw: PackedBytes) -> list[str]:
    return list(map(bytes.decode, raw.tolist()))


def retracted(windows: WindowColumns, gone: list[tuple[bytes, int, int]]) -> tuple[WindowColumns, Any]:
    """Return the windows behind retracted ones with these keys and bounds, and a mask of the retracted ones."""
    columns = [np.concatenate((np.zeros(len(gone), c.dtype), c)) for c in windows.columns]
    starts, ends = (np.array([one[i] for one in gone], np.int64) for i in (1, 2))
    starts, ends = np.concatenate((starts, windows.starts)), np.concatenate((ends, windows.ends))
    keys = PackedBytes.of([one[0] for one in gone] + list(windows.keys))
    return WindowColumns(keys, starts, ends, columns), np.arange(len(starts)) < len(gone)


def results_of(keys: list[bytes], gone: list[bytes], names: tuple[str, ...], *, text: bool) -> ResultBatch:
    columns = StateColumns([Count(), Mean("ms").bind(dict)])
    starts = np.arange(len(keys))
    states = [starts + 1, starts / 3, np.where(starts % 2 == 0, 0, starts)]
    windows = WindowColumns(PackedBytes.of(keys), starts, starts + 5, states)
    all_ = retracted(windows, [(key, i, 9 + i) for i, key in enumerate(gone)])
    return ResultBatch("s", names, columns, texts_of if text else list, *all_, by_time=True)


def keys_of(results: ResultBatch) -> list[WindowKey]:
    return [record.key for record, _ in results.records()]


def records_of(results: ResultBatch) -> list[Record]:
    return [record for record, error in results.records() if error is None]


@pytest.mark.parametrize("names", [("n", "ms"), ("n", "mean of ms")])
@given(texts, texts, st.booleans())
def test_encoded_as_one_by_one(names: tuple[str, ...], keys: list[str], gone: list[str], text: bool) -> None:
    """Keys and values are byte for byte those of the encoders of single records, whatever a key contains."""
    raw = [[key.encode() for key in own] for own in (keys, gone)]
    results = results_of(*raw, names, text=text)
    records = records_of(results)
    for encode in (encode_json, encode_updates):
        expected: Any = [encode(record) for record in records]
        encoded = results.encoded(whole_window_keys=encode is encode_updates)
        assert list(zip(*encoded, strict=True)) == expected
    assert results.timestamps().tolist() == [record.timestamp for record in records]


def test_the_time_of_the_latest_record_is_the_results_time_and_no_result() -> None:
    """If a window keeps that time, it is the timestamp of each result, and is neither in the JSON nor among the
    results."""
    columns = StateColumns([Latest(), Count()])
    keys = PackedBytes.of([b"k", b"m"])
    windows = WindowColumns(keys, np.array([0, 0]), np.array([10, 10]), [np.array([7, 3]), np.array([2, 1])])
    results = ResultBatch("s", (LATEST, "n"), columns, texts_of, windows)
    assert results.timestamps().tolist() == [r.timestamp for r in records_of(results)] == [7, 3]
    assert [r.value.results for r in records_of(results)] == [{"n": 2}, {"n": 1}]
    assert results.encoded(whole_window_keys=False)[1][0] == b'{"key":"k","start":0,"end":10,"n":2}'


def test_a_commits_results_go_in_order_of_time() -> None:
    """Retracted windows are ordered by their end among the others, with no value. The mean of no records is None."""
    results = results_of([b"k", b"m", b"n", b"o", b"p"], [b"old"], ("n", "ms"), text=True)
    in_order = [("k", 0, 5), ("m", 1, 6), ("n", 2, 7), ("o", 3, 8), ("old", 0, 9), ("p", 4, 9)]
    assert keys_of(results) == [WindowKey(*at) for at in in_order]
    keys, values = results.encoded(whole_window_keys=False)
    assert keys == [b"k", b"m", b"n", b"o", b"old", b"p"]
    assert (values[0], values[4]) == (b'{"key":"k","start":0,"end":5,"n":1,"ms":null}', None)


def test_a_retraction_comes_before_what_replaces_it() -> None:
    """Of two results of one time, the retraction of a merged session comes first, so that the other one remains under a
    shared key."""
    windows = WindowColumns(PackedBytes.of([b"k"]), np.array([1]), np.array([9]), [np.array([2])])
    all_ = retracted(windows, [(b"k", 5, 9), (b"k", 3, 4)])
    results = ResultBatch("s", ("n",), StateColumns([Count()]), texts_of, *all_, by_time=True)
    assert keys_of(results) == [WindowKey("k", 3, 4), WindowKey("k", 5, 9), WindowKey("k", 1, 9)]


def test_by_time_is_by_the_latest_record_where_it_is_kept() -> None:
    """A tumbling window's result has the time of its latest record. Results are ordered by it, then by start."""
    columns = StateColumns([Latest(), Count()])
    starts, latest = np.array([10, 5, 0, 0]), np.array([12, 12, 3, 9])
    windows = WindowColumns(
        PackedBytes.of([b"a", b"a", b"b", b"c"]), starts, starts + 10, [latest, np.ones(4, np.int64)]
    )
    results = ResultBatch("s", (LATEST, "n"), columns, texts_of, windows, by_time=True)
    assert [(at.key, at.start) for at in keys_of(results)] == [("b", 0), ("c", 0), ("a", 5), ("a", 10)]
    assert results.timestamps().tolist() == [3, 9, 12, 12]
