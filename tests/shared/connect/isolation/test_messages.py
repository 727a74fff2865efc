"""Messages between a worker and a connector's process."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, DataError, KafkaTimeout
from penstock.shared.connect.errors import ConnectError, ConnectorNotFound, FailedThere, summary_of, trace_of
from penstock.shared.connect.isolation.messages import error_message, error_of, pack, unpack
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.worker_task import TaskSpec

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_a_message_is_one_line(message: dict[str, object]) -> None:
    """A message is one line, even if a value contains line breaks."""
    line = pack(message)
    assert line.count(b"\n") == 1
    assert unpack(line) == message


def test_invalid_messages_are_errors() -> None:
    """An invalid or truncated message is a DataError, also if it is not UTF-8 or is nested too deep."""
    too_deep = b'{"do": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    for line in (b'{"do": "st', b"[1]\n", b"", b'{"do": "\xff"}\n', too_deep):
        with pytest.raises(DataError):
            unpack(line)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ConfigError("no such column"), ConfigError),
        (ConnectorNotFound("c"), ConnectorNotFound),
        (ConnectError("no"), ConnectError),
        (KafkaTimeout("slow"), FailedThere),
        (KeyError("k"), FailedThere),
    ],
)
def test_errors_round_trip(error: Exception, base: type[Exception]) -> None:
    """An error is decoded with its message, class name, trace and base class."""
    try:
        raise error
    except Exception as raised:
        message = error_message(raised)
    again = error_of(unpack(pack(message)))
    assert isinstance(again, base)
    assert (summary_of(again), trace_of(again)) == (summary_of(error), trace_of(error))
    assert "test_messages.py" in again.trace


def test_task_specs_round_trip() -> None:
    """A TaskSpec is decoded unchanged."""
    spec = TaskSpec(ConnectorTaskId("c", 1), {"a": "${env:B}"}, {"task.class": "x"}, 3, 2)
    assert msgspec.convert(unpack(pack({"spec": spec}))["spec"], TaskSpec) == spec
