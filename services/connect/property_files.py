"""The files of a worker's or connector's configuration, as the command line names them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.properties import parse_properties, text_map


def read_properties(path: Path) -> dict[str, str]:
    """Reads a properties file, or a connector's JSON file (its config, or `name` and `config` in REST's form)."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no UTF-8 text") from None
    try:
        return _read_json(text) if path.suffix == ".json" else parse_properties(text)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _read_json(text: str) -> dict[str, str]:
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as e:
        raise ConfigError(f"no JSON: {e}") from None
    if not isinstance(found, dict):
        raise ConfigError("must be a JSON object")
    config = found.get("config", found)
    if not isinstance(config, dict):
        raise ConfigError("'config' must be a JSON object")
    named = {"name": found["name"], **config} if "config" in found and "name" in found else config
    try:
        return text_map(named, "config")
    except BadRequest as e:
        raise ConfigError(str(e)) from None
