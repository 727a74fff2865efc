"""Validation of the records that a handler returns."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.consumer.executor import check_execution_output
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import ProducerRecord


def test_valid_records_are_accepted() -> None:
    """Records are valid with and without key, value, headers, partition and timestamp."""
    check_execution_output(
        [ProducerRecord("out", None), ProducerRecord("out", b"v", bytearray(b"k"), (("h", b"1"),), 3, 17)]
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"value": 5},
        {"value": "text"},
        {"key": {"a": 1}},
        {"topic": None},
        {"topic": "no good"},
        {"headers": {"a": "b"}},
        {"headers": (("a", 5),)},
        {"headers": 7},
        {"partition": -1},
        {"partition": "x"},
        {"timestamp": 1.5},
        {"timestamp": True},
    ],
)
def test_an_invalid_record_is_an_error(fields: dict[str, Any]) -> None:
    """An invalid record is a DataError, which is not retried."""
    with pytest.raises(DataError):
        check_execution_output(
            [ProducerRecord("out", b"good"), ProducerRecord(**{"topic": "out", "value": b"v", **fields})]
        )
