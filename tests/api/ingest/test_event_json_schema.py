"""Validation against a JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.api.ingest.event import load_event_schema
from penstock.shared.common.errors import ConfigError


def test_an_error_has_the_pointer_to_the_invalid_value(tmp_path: Path) -> None:
    """A validation error has the pointer to the invalid value and the expected type."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"properties": {"a": {"items": {"type": "string"}}}}))
    validate = load_event_schema(path)
    assert validate({"a": ["x"]}) is None
    assert validate({"a": ["x", 2]}) == '/a/1: 2 is not of type "string"'


@pytest.mark.parametrize("text", ["{", '{"type": 7}', "[" * 100_000])
def test_an_invalid_schema_is_rejected_at_start_up(tmp_path: Path, text: str) -> None:
    """An invalid or missing schema file is a ConfigError that names the setting and the file."""
    path = tmp_path / "s.json"
    path.write_text(text)
    for name in (path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=r"json_schema: .*json"):
            load_event_schema(name)
