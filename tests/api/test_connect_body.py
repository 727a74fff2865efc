"""What requests to Kafka Connect's REST say."""

from __future__ import annotations

from typing import Any

import pytest

from api.connect_body import config_of, create_request, json_list, patch_of, text_map
from shared.connect.herder.errors import BadRequest
from shared.connect.states import TargetState


def test_a_create_request_has_name_config_and_state() -> None:
    """The name comes into the config; the state is what the connector is to do first."""
    assert create_request({"name": " a ", "config": {"x": 1}}) == ("a", {"x": "1", "name": "a"}, None)
    for word, target in (
        ("STOPPED", TargetState.STOPPED),
        ("paused", TargetState.PAUSED),
        ("RUNNING", TargetState.STARTED),
    ):
        assert create_request({"name": "a", "config": {}, "initial_state": word})[2] is target
    assert create_request({"config": {}})[0] == ""


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"name": "a"},
        {"name": 3, "config": {}},
        {"name": "a", "config": []},
        {"name": "a", "config": {"x": {}}},
        {"name": "a", "config": {}, "surprise": 1},
        {"name": "a", "config": {}, "initial_state": "SLEEPING"},
        {"name": "a", "config": {"name": "b"}},
    ],
)
def test_malformed_create_requests_are_named(body: Any) -> None:
    """Each is the request's fault, and said."""
    with pytest.raises(BadRequest):
        create_request(body)


def test_values_are_texts() -> None:
    """Numbers and truth values as they are written in JSON; null is none."""
    assert text_map({"a": 1, "b": 2.5, "c": False, "d": "x", "e": None}, "config") == {
        "a": "1",
        "b": "2.5",
        "c": "false",
        "d": "x",
    }
    assert config_of({"name": "n"}, "n") == {"name": "n"}


def test_a_patch_takes_settings_away() -> None:
    """Null means without; another name is refused."""
    assert patch_of({"a": 1, "b": None}, "n") == {"a": "1", "b": None}
    with pytest.raises(BadRequest):
        patch_of({"name": "m"}, "n")
    with pytest.raises(BadRequest):
        patch_of([], "n")


def test_task_configs_are_an_array() -> None:
    """Anything else is refused."""
    assert json_list(b"[{}]") == [{}]
    for body in (b"{}", b"", b"\xff"):
        with pytest.raises(BadRequest):
            json_list(body)
