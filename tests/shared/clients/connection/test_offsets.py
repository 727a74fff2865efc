"""Validation of offsets, times and offset specifications."""

from __future__ import annotations

import pytest

from penstock.shared.clients.connection.offsets import checked_offset, checked_offsets, checked_spec, checked_time
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

A = TopicPartition("t", 0)


def test_what_is_one_passes() -> None:
    """A valid specification is returned unchanged. A plain number becomes an offset without metadata."""
    assert checked_offsets({A: 3}) == {A: OffsetAndMetadata(3)}
    assert [checked_spec(A, spec) for spec in ("earliest", "latest", 0)] == ["earliest", "latest", 0]


@pytest.mark.parametrize("value", [-1, True, 1.5, "x", None])
def test_what_is_none_is_named_with_its_partition(value: object) -> None:
    """An invalid number raises ValueError, and a value of another type TypeError. The error names the partition."""
    for check in (checked_offset, checked_time, checked_spec):
        with pytest.raises(ValueError if value == -1 or (check is checked_spec and value == "x") else TypeError) as e:
            check(A, value)
        assert "t-0" in str(e.value)
