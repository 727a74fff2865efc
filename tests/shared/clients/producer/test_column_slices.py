"""Slices of columns: which records a kernel may process, and how many at once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.shared.clients.producer import column_slices
from penstock.shared.clients.producer.column_slices import slice_of
from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import RecordColumns
from tests.documents import ROOT

LARGE = 10**6


def test_a_slice_has_a_bound_of_records_and_of_copied_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are copied up to a limit, a larger single value alone. Packed columns are neither copied nor limited."""
    monkeypatch.setattr(column_slices, "SLICE_RECORDS", 10)
    monkeypatch.setattr(column_slices, "SLICE_BYTES", 1_000)
    for size, count in ((10, 10), (400, 2), (2_000, 1)):
        values = [b"x" * size] * 12
        for column, expected in ((values, count), (PackedBytes.of(values), 10)):
            part = slice_of(RecordColumns("t", [b"k"] * 12, column), 1, 7, LARGE)
            assert part is not None
            assert (len(part), part.columns.timestamps.tolist()) == (expected, [7] * expected)
    large_keys = slice_of(RecordColumns("t", [b"x" * 400] * 12, [b"v"] * 12), 0, 7, LARGE)
    assert large_keys is not None
    assert len(large_keys) == 2
    rest = slice_of(RecordColumns("t", [None] * 12, [None] * 12, range(12)), 10, 7, LARGE)
    assert rest is not None
    assert rest.columns.timestamps.tolist() == [10, 11]
    own = [(("name", b"x" * 400),)] * 12
    for headers, expected in ((own, 3), (PackedHeaders.of(own), 10), ([(), {}] * 6, 10)):
        part = slice_of(RecordColumns("t", [b"k"] * 12, [b"v"] * 12, headers=headers), 0, 7, LARGE)
        assert part is not None
        assert (len(part), len(part.columns.header_lengths)) == (expected, expected)
    assert repr(rest) == "<ColumnSlice of 2 records, 0 left>"


@pytest.mark.parametrize(
    ("keys", "values", "times"),
    [
        (["text"], [b"v"], None),
        ([b"k"], [5], None),
        ([b"k"], [memoryview(b"abcd").cast("i")], None),
        ([b"k"], [b"v"], [-1]),
        ([b"k"], [b"v"], [True]),
        ([b"k"], [b"v"], [2**63]),
        ([b"k"], [b"v"], [None]),
        ([b"k"], [b"v"], np.array([1.0])),
        ([b"k"], [b"x" * 1_001], None),
    ],
)
def test_irregular_records_are_in_no_slice(keys: Any, values: Any, times: Any) -> None:
    """An irregular record is processed individually, where its error names it."""
    assert slice_of(RecordColumns("t", keys, values, times), 0, 7, 1_000) is None


@pytest.mark.parametrize(
    "headers",
    [
        [None],
        [5],
        [iter([("name", b"")])],
        ["text"],
        [[("name", "text")]],
        [[("name",)]],
        [[(b"name", b"")]],
        [{"\ud800": b""}],
        [{"name": b"x" * 1_000}],
    ],
)
def test_irregular_headers_are_in_no_slice(headers: Any) -> None:
    """Their record is processed individually. An iterator still yields all headers there."""
    assert slice_of(RecordColumns("t", [b"k"], [b"v"], headers=headers), 0, 7, 1_000) is None
    if not isinstance(headers[0], str | int | list | dict | None):
        assert list(headers[0]) == [("name", b"")]


def test_records_in_a_slice_are_within_the_size_limit() -> None:
    """Records in a slice are within the size limit of single records."""
    for size in range(850, 1_000):
        value = b"x" * size
        if slice_of(RecordColumns("t", [b"key"], [value]), 0, 7, 1_000) is not None:
            assert record_size(b"key", value, []) <= 1_000
        own = [("name", value), ("", None)]
        if slice_of(RecordColumns("t", [b"key"], [None], headers=[own]), 0, 7, 1_000) is not None:
            assert record_size(b"key", None, own) <= 1_000
    assert slice_of(RecordColumns("t", [b"key"], [b"x" * 850]), 0, 7, 1_000) is not None
    assert slice_of(RecordColumns("t", [b"key"], [None], headers=[{"name": b"x" * 850}]), 0, 7, 1_000) is not None


@pytest.mark.parametrize(("offset", "length"), [(0, 5), (3, 2), (-1, 1), (0, -2)])
@pytest.mark.parametrize("what", ["keys", "values", "headers"])
def test_strings_outside_of_their_buffer_are_rejected(what: str, offset: int, length: int) -> None:
    """Offsets outside the buffer are rejected, because a kernel would access invalid memory."""
    good, data = PackedBytes.of([b"a"]), np.zeros(4, np.uint8)
    bad = PackedBytes(data, np.array([offset], np.int64), np.array([length], np.int64))
    columns = RecordColumns("t", bad if what == "keys" else good, bad if what == "values" else good)
    if what == "headers":
        columns = replace(columns, headers=PackedHeaders(bad))
    with pytest.raises(ValueError, match=f"topic t: the {what}"):
        slice_of(columns, 0, 7, LARGE)


def test_the_functions_run_without_a_compiler() -> None:
    """With NUMBA_DISABLE_JIT=1 slices are equal, and no overflow warning is emitted."""
    code = f"import {__name__} as these; these.test_records_in_a_slice_are_within_the_size_limit()"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], cwd=ROOT, env=environment, check=True)
