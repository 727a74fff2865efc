"""What a worker and a connector's process send each other."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError, KafkaTimeout
from penstock.shared.connect.errors import (
    ConfigError,
    ConnectError,
    ConnectorNotFound,
    FailedThere,
    summary_of,
    trace_of,
)
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
    """Whatever a trace or a setting has in it, line ends too."""
    line = pack(message)
    assert line.count(b"\n") == 1
    assert unpack(line) == message


def test_what_is_no_message_says_so() -> None:
    """Such as a line that was cut off."""
    for line in (b'{"do": "st', b"[1]\n", b""):
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
def test_an_error_is_itself_on_the_other_side(error: Exception, base: type[Exception]) -> None:
    """Its words, its class's name and its trace; and of a kind that says what to do about it."""
    try:
        raise error
    except Exception as raised:
        message = error_message(raised)
    again = error_of(unpack(pack(message)))
    assert isinstance(again, base)
    assert (summary_of(again), trace_of(again)) == (summary_of(error), trace_of(error))
    assert "test_messages.py" in again.trace


def test_a_task_to_run_is_itself_on_the_other_side() -> None:
    """With its id and its configurations."""
    spec = TaskSpec(ConnectorTaskId("c", 1), {"a": "${env:B}"}, {"task.class": "x"}, 3, 2)
    assert msgspec.convert(unpack(pack({"spec": spec}))["spec"], TaskSpec) == spec
