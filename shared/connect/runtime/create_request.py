"""A request to create a connector: the body of `POST /connectors`, or the JSON file of a connector.

>>> create_request({"name": "copy", "config": {"tasks.max": 1}, "initial_state": "stopped"})
('copy', {'tasks.max': '1', 'name': 'copy'}, 'STOPPED')
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import NumberText, properties_from_json, reject_unknown_fields
from penstock.shared.connect.runtime.states import TargetState

CREATE_FIELDS = ("name", "config", "initial_state")
INITIAL_STATES = {"RUNNING": TargetState.STARTED, "PAUSED": TargetState.PAUSED, "STOPPED": TargetState.STOPPED}
"""The target state of a new connector by `initial_state` (KIP-980)."""


def create_request(body: Any) -> tuple[str, dict[str, str], str | None]:
    """Return the connector's name, its config with the name in it, and its initial state: a key of INITIAL_STATES, or
    None if not requested.

    Raises BadRequest if the request is malformed, or if its config has another name.
    """
    if not isinstance(body, dict):
        raise BadRequest("The request must be a JSON object with 'name' and 'config'")
    reject_unknown_fields(body, CREATE_FIELDS)
    if body.get("config") is None:
        raise BadRequest("The field 'config' is missing")
    name = body.get("name")
    if name is not None and (not isinstance(name, str) or isinstance(name, NumberText)):
        raise BadRequest("The field 'name' must be a text")
    name = (name or "").strip()
    state = body.get("initial_state")
    if state is not None and str(state).upper() not in INITIAL_STATES:
        raise BadRequest(f"The field 'initial_state' must be one of {', '.join(INITIAL_STATES)}, not {state!r}")
    config = properties_from_json(body["config"], "config")
    if not name and config.get("name"):
        raise BadRequest("The field 'name' is missing")
    return name, _named(config, name), None if state is None else str(state).upper()


def config_of(body: Any, name: str) -> dict[str, str]:
    """Return a connector's config, with its name in it. Raises BadRequest if the config has another name."""
    return _named(properties_from_json(body, "config"), name)


def _named(config: Mapping[str, str], name: str) -> dict[str, str]:
    check_name(config.get("name"), name)
    return {**config, "name": name}


def check_name(config_name: str | None, name: str) -> None:
    """Raise BadRequest, in Kafka Connect's words, if a config has another name than its connector."""
    if config_name is not None and config_name != name:
        raise BadRequest(
            f"Connector name configuration ({config_name}) doesn't match connector name in the URL ({name})"
        )
