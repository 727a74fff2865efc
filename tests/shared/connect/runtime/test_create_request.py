"""Requests to create a connector: over REST, or in a JSON file."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import decode_settings
from penstock.shared.connect.runtime.create_request import INITIAL_STATES, create_request
from penstock.shared.connect.runtime.states import TargetState


def test_a_create_request_has_name_config_and_state() -> None:
    """The name is added to the config, and `initial_state` selects the target state."""
    assert create_request({"name": " a ", "config": {"x": 1}}) == ("a", {"x": "1", "name": "a"}, None)
    for word, state, target in (
        ("STOPPED", "STOPPED", TargetState.STOPPED),
        ("paused", "PAUSED", TargetState.PAUSED),
        ("RUNNING", "RUNNING", TargetState.STARTED),
    ):
        assert create_request({"name": "a", "config": {}, "initial_state": word})[2] == state
        assert INITIAL_STATES[state] is target
    assert create_request({"config": {}})[0] == ""


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"name": "a"},
        {"name": 3, "config": {}},
        decode_settings('{"name": 1.5, "config": {}}'),
        {"name": "a", "config": []},
        {"name": "a", "config": {"x": {}}},
        {"name": "a", "config": {}, "surprise": 1},
        {"name": "a", "config": {}, "initial_state": "SLEEPING"},
        {"name": "a", "config": {"name": "b"}},
    ],
)
def test_malformed_create_requests_are_bad_requests(body: Any) -> None:
    """A malformed create request is a BadRequest."""
    with pytest.raises(BadRequest):
        create_request(body)
