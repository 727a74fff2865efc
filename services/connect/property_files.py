"""Reads the configuration files of workers and connectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import parse_properties, properties_from_json
from penstock.shared.connect.runtime.states import CREATE_FIELDS, INITIAL_STATES


@dataclass(frozen=True, slots=True)
class ConnectorFile:
    """A connector's config, and the state in which its file requests to create it: a key of INITIAL_STATES, or None."""

    config: dict[str, str]
    initial_state: str | None = None


def read_connector_file(path: Path) -> ConnectorFile:
    """Read a connector's properties file, or its JSON file.

    A JSON file has the connector's config, or an object with `name`, `config` and optionally `initial_state`. Raises
    ConfigError, which names the path, if the file cannot be read or is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    try:
        return _read_json(text) if path.suffix == ".json" else ConnectorFile(parse_properties(text))
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _read_json(text: str) -> ConnectorFile:
    try:
        document = decode_json(text)
    except InvalidJson as e:
        raise ConfigError(f"not JSON: {e}") from None
    if not isinstance(document, dict):
        raise ConfigError("must be a JSON object")
    body = document if "config" in document else {"config": document}
    if unknown := [field for field in body if field not in CREATE_FIELDS]:
        raise ConfigError(f"unknown field {unknown[0]!r}; known are {', '.join(CREATE_FIELDS)}")
    initial_state = _parse_initial_state(body.get("initial_state"))
    try:
        name = properties_from_json({"name": body.get("name")}, "file")
        config = name | properties_from_json(body["config"], "config")
    except BadRequest as e:
        raise ConfigError(str(e)) from None
    if name and name["name"] != config["name"]:
        raise ConfigError(f"'name' is {name['name']!r}, but the config has the name {config['name']!r}")
    return ConnectorFile(config, initial_state)


def _parse_initial_state(value: Any) -> str | None:
    if value is None:
        return None
    if str(value).upper() not in INITIAL_STATES:
        raise ConfigError(f"'initial_state' must be one of {', '.join(INITIAL_STATES)}, not {value!r}")
    return str(value).upper()
