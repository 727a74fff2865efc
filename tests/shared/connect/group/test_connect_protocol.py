"""The encoding of worker states and assignments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import SerializationError
from penstock.shared.connect.group.connect_protocol import (
    COMPATIBLE,
    CONFIG_MISMATCH,
    EAGER,
    NOTHING,
    SESSIONED,
    ConnectorsAndTasks,
    ExtendedAssignment,
    WorkerState,
    decode_assignment,
    decode_state,
    encode_assignment,
    encode_state,
)
from penstock.shared.connect.runtime.states import ConnectorTaskId

NAMES = st.text(min_size=1, max_size=5)
WORKS = st.builds(
    ConnectorsAndTasks,
    st.frozensets(NAMES, max_size=3),
    st.frozensets(st.builds(ConnectorTaskId, NAMES, st.integers(0, 9))),
)


@given(WORKS, WORKS, st.integers(0, 2**31 - 1), st.sampled_from((COMPATIBLE, SESSIONED)))
def test_assignments_round_trip(
    work: ConnectorsAndTasks, revoked: ConnectorsAndTasks, delay_ms: int, version: int
) -> None:
    """An encoded assignment is decoded unchanged."""
    assignment = ExtendedAssignment("leader", "http://a:1/", 7, work, revoked, delay_ms, CONFIG_MISMATCH)
    found = decode_assignment(encode_assignment(assignment, version))
    assert found == assignment
    assert found.version == version
    assert found.failed


@given(WORKS, st.sampled_from((COMPATIBLE, SESSIONED)))
def test_states_round_trip(held: ConnectorsAndTasks, version: int) -> None:
    """An encoded worker state is decoded unchanged."""
    found = decode_state(encode_state(WorkerState("http://a:1/", 7, held), version))
    assert (found.url, found.config_offset, found.held, found.version) == ("http://a:1/", 7, held, version)


def test_bytes_are_kafkas() -> None:
    """Assignments and states have Kafka Connect's encoding."""
    work = ConnectorsAndTasks({"c"}, {ConnectorTaskId("c", 1)})
    data = encode_assignment(ExtendedAssignment("L", "U", 3, work, NOTHING, 5), SESSIONED)
    assert data == (
        b"\x00\x02\x00\x00\x00\x01L\x00\x01U" + (3).to_bytes(8) + b"\x00\x00\x00\x01\x00\x01c\x00\x00\x00\x02"
        b"\xff\xff\xff\xff\x00\x00\x00\x01" + b"\x00\x00\x00\x00" + b"\x00\x00\x00\x05"
    )
    assert encode_state(WorkerState("U", 3), EAGER) == b"\x00\x00\x00\x01U" + (3).to_bytes(8)


def test_eager_has_fewer_fields() -> None:
    """Version 0 has neither held work nor revoked work nor a delay."""
    work = ConnectorsAndTasks({"c"})
    found = decode_assignment(encode_assignment(ExtendedAssignment("L", "U", 3, work, work, 5), EAGER))
    assert (found.work, found.revoked, found.delay_ms, found.version) == (work, NOTHING, 0, EAGER)
    assert decode_state(encode_state(WorkerState("U", 3, work), EAGER)).held == NOTHING


def test_a_state_without_allocation_holds_nothing() -> None:
    """A Java worker without work sends no allocation, which is decoded as no work."""
    state = b"\x00\x02\x00\x01U" + (3).to_bytes(8)
    assert decode_state(state + b"\xff\xff\xff\xff").held == NOTHING
    assert decode_state(state).held == NOTHING


def test_truncated_bytes_are_an_error() -> None:
    """Truncated bytes and invalid lengths are SerializationErrors."""
    data = encode_assignment(ExtendedAssignment("L", "U", 3, ConnectorsAndTasks({"c"})), EAGER)
    for end in range(len(data)):
        with pytest.raises(SerializationError):
            decode_assignment(data[:end])
    with pytest.raises(SerializationError):
        decode_state(b"\xff\xff")
