"""The fields that an audit reads from source values."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.services.spark.audit.measures import OTHER, TEXT, MeasuredField, _value_parser

WANTED = [
    MeasuredField("n", "int64"),
    MeasuredField("x", "float64"),
    MeasuredField("page", TEXT),
    MeasuredField("page", OTHER),
]


def parsed(*values: bytes | None) -> list[tuple[object, ...]]:
    offsets = pa.array(range(len(values)), pa.int64())
    batch = pa.RecordBatch.from_arrays([offsets, pa.array(values, pa.binary())], ["offset", "value"])
    (found,) = _value_parser(WANTED)(iter([batch]))
    assert found.schema.names == ["offset", "fields"]
    return [tuple(row[field.column] for field in WANTED) for row in found.column("fields").to_pylist()]


def test_fields_are_read_as_the_engine_adds_them() -> None:
    """Booleans are 1 or 0, texts are no numbers, and a value other than text is seen."""
    assert parsed(
        b'{"n":3,"x":2,"page":"/"}',
        b'{"n":true,"x":0.5}',
        b'{"n":"3","x":"0.5","page":7}',
        b'{"n":9223372036854775808}',
    ) == [(3, 2.0, "/", False), (1, 0.5, None, False), (None, None, None, True), (None, None, None, False)]


@pytest.mark.parametrize(
    "value", [None, b"", b"{", b"[1]", b"5", b'{"page":"\xff"}', b'{"n":' * 100_000, b"[" * 100_000]
)
def test_a_value_that_is_no_object_has_no_fields(value: bytes | None) -> None:
    """A dead letter whose value is not a JSON object has no fields, and the audit continues."""
    assert parsed(value, b'{"n":1}') == [(None, None, None, False), (1, None, None, False)]
