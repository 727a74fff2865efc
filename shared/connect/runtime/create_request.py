"""A request to create a connector: the body of `POST /connectors`, or the JSON file of a connector.

>>> create_request({"name": "copy", "config": {"tasks.max": 1}, "initial_state": "stopped"})
('copy', {'tasks.max': '1', 'name': 'copy'}, 'STOPPED')
"""

from __future__ import annotations

from typing import Any

from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import properties_from_json
from penstock.shared.connect.runtime.states import TargetState

CREATE_FIELDS = ("name", "config", "initial_state")
INITIAL_STATES = {"RUNNING": TargetState.STARTED, "PAUSED": TargetState.PAUSED, "STOPPED": TargetState.STOPPED}
"""The target state of a new connector by `initial_state` (KIP-980)."""


def create_request(body: Any) -> tuple[str, dict[str, str], str | None]:
    """Return the connector's name, its config with the name in it, and the key of its state in INITIAL_STATES.

    The state is None if not requested. Raises BadRequest if the request is malformed, or if its config has another
    name.
    """
    if not isinstance(body, dict):
        raise BadRequest("The request must be a JSON object with 'name' and 'config'")
    if unknown := [field for field in body if field not in CREATE_FIELDS]:
        raise BadRequest(f"Unrecognized field {unknown[0]!r}; known are {', '.join(CREATE_FIELDS)}")
    if body.get("config") is None:
        raise BadRequest("The field 'config' is missing")
    name = body.get("name")
    if name is not None and not isinstance(name, str):
        raise BadRequest("The field 'name' must be a text")
    name = (name or "").strip()
    state = body.get("initial_state")
    if state is not None and str(state).upper() not in INITIAL_STATES:
        raise BadRequest(f"The field 'initial_state' must be one of {', '.join(INITIAL_STATES)}, not {state!r}")
    config = properties_from_json(body["config"], "config")
    if config.get("name", name) != name:
        raise BadRequest(f"The field 'name' is {name!r}, but the config has the name {config['name']!r}")
    return name, {**config, "name": name}, None if state is None else str(state).upper()
