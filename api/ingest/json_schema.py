"""Validates events against a JSON Schema. The file is read and compiled once, at start-up.

>>> validate = compile_schema({"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}, "it")
>>> validate({"id": 1})
>>> validate({"id": "x"})
'/id: "x" is not of type "integer"'
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.extras import needs

Validate = Callable[[Any], str | None]
"""Returns the first error of a value, or None if it is valid."""

MESSAGE_CHARACTERS_MAX = 300


def load_schema(path: Path) -> Validate:
    """Return the validator of a schema file. Raises ConfigError if it cannot be read or is not a JSON Schema."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"json_schema: {path}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"json_schema: {path}: not JSON: {e}") from None
    return compile_schema(schema, str(path))


def compile_schema(schema: Any, name: str) -> Validate:
    """Return the validator of a schema; `name` is its name in errors. Raises ConfigError for an invalid schema."""
    with needs(f"json_schema {name}"):
        import jsonschema_rs
    try:
        validator = jsonschema_rs.validator_for(schema)
    except ValueError as e:
        raise ConfigError(f"json_schema: {name}: {e}"[:MESSAGE_CHARACTERS_MAX]) from None

    def validate(value: Any) -> str | None:
        if validator.is_valid(value):
            return None
        error = next(iter(validator.iter_errors(value)))
        pointer = "".join(f"/{step}" for step in error.instance_path)
        return f"{pointer or 'the event'}: {error.message}"[:MESSAGE_CHARACTERS_MAX]

    return validate
