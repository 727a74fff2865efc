"""Reads the configuration files of workers and connectors."""

from __future__ import annotations

from pathlib import Path

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import parse_properties, properties_from_json


def read_properties(path: Path) -> dict[str, str]:
    """Read a properties file, or a connector's JSON file (its config, or an object with `name` and `config`).

    Raises ConfigError, which names the path, if the file cannot be read or is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    try:
        return _read_json(text) if path.suffix == ".json" else parse_properties(text)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _read_json(text: str) -> dict[str, str]:
    try:
        document = decode_json(text)
    except InvalidJson as e:
        raise ConfigError(f"not JSON: {e}") from None
    if not isinstance(document, dict):
        raise ConfigError("must be a JSON object")
    config = document.get("config", document)
    if not isinstance(config, dict):
        raise ConfigError("'config' must be a JSON object")
    if "config" in document and "name" in document:
        config = {"name": document["name"], **config}
    try:
        return properties_from_json(config, "config")
    except BadRequest as e:
        raise ConfigError(str(e)) from None
