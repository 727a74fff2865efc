"""Times and states as Arrow arrays, without a Python object a value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.shared.common.arrow_arrays import binary_array
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.changelog.format import StateCodec
from penstock.shared.streams.changelog.states import packed_columns

TIMESTAMP = pa.timestamp("us", "UTC")
DAY_MS = 86_400_000
TIME_MS_MAX = 253_402_300_799_999  # the last of year 9999: what timestamps of all engines can say
MICROSECONDS = 1_000  # in a millisecond


def time_array(times_ms: Any) -> pa.Array:
    """Times in ms as timestamps; null for those that no timestamp before the year 10000 can say.

    >>> [str(time) for time in time_array(np.array([0, 10**18]))]
    ['1970-01-01 00:00:00+00:00', 'None']
    """
    beyond = (times_ms < 0) | (times_ms > TIME_MS_MAX)
    micros = np.where(beyond, 0, times_ms) * MICROSECONDS
    return pa.array(micros, pa.int64(), mask=beyond if beyond.any() else None).cast(TIMESTAMP)


def state_array(codec: StateCodec, states: PackedBytes) -> pa.StructArray:
    """Encoded states as structs of their columns; CorruptRecord says what is wrong with the first that is no state."""
    columns = [
        binary_array(column) if isinstance(column, PackedBytes) else pa.array(column)
        for column in packed_columns(codec, states)
    ]
    return pa.StructArray.from_arrays(columns, names=[column.name for column in codec.columns])
