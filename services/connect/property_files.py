"""Reads the configuration files of workers and connectors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.json_decoding import InvalidJson
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import decode_settings, parse_properties, properties_from_json
from penstock.shared.connect.runtime.create_request import create_request


@dataclass(frozen=True, slots=True)
class ConnectorFile:
    """A connector's config, and the state in which its file requests to create it: a key of INITIAL_STATES, or None."""

    config: dict[str, str]
    initial_state: str | None = None


def read_connector_file(path: Path) -> ConnectorFile:
    """Read a connector's properties file, or its JSON file.

    A JSON file has the connector's config, or a request to create the connector, which has the field `config`. Raises
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
        document = decode_settings(text)
        if isinstance(document, dict) and "config" in document:
            _, config, initial_state = create_request(document)
            return ConnectorFile(config, initial_state)
        return ConnectorFile(properties_from_json(document, "config"))
    except InvalidJson as e:
        raise ConfigError(f"not JSON: {e}") from None
    except BadRequest as e:
        raise ConfigError(str(e)) from None
