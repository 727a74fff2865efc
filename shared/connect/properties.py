"""Java's properties files, the format of worker and connector configurations.

>>> parse_properties("# a worker\\nkey.converter = x.Y\\ntopics: a,\\\\\\n   b\\nempty\\n")
{'key.converter': 'x.Y', 'topics': 'a,b', 'empty': ''}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.json_decoding import JSON_ERRORS, invalid_json
from penstock.shared.connect.errors import BadRequest

_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SEPARATOR = re.compile(r"(?<!\\)(?:\\\\)*(\s*[=:]\s*|\s+)")


class NumberText(str):
    """The characters of a JSON number with a point or an exponent."""

    __slots__ = ()


_decode_with_number_texts = msgspec.json.Decoder(float_hook=NumberText).decode


def parse_properties(text: str) -> dict[str, str]:
    """Parse properties. If a name occurs several times, its last value counts. Raises ConfigError for an invalid
    escape."""
    found = {}
    for line in _logical_lines(text):
        match = _SEPARATOR.search(line)
        name, value = (line, "") if match is None else (line[: match.start(1)], line[match.end(1) :])
        found[_unescape_java_text(name)] = _unescape_java_text(value)
    return found


def _logical_lines(text: str) -> list[str]:
    lines: list[str] = []
    open_line = ""
    for natural in re.split(r"\r\n|\n|\r", text):
        line = natural.lstrip(" \t\f")
        if not open_line and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            open_line += line[:-1]
            continue
        lines.append(open_line + line)
        open_line = ""
    return lines + ([open_line] if open_line else [])


def _unescape_java_text(text: str) -> str:
    if "\\" not in text:
        return text

    def unescape_character(match: re.Match[str]) -> str:
        if match[1] is not None:
            return chr(int(match[1], 16))
        char = match[2]
        if char == "u":
            raise ConfigError(f"Malformed \\uxxxx encoding in {text!r:.100}")
        return _ESCAPED.get(char, char)

    unescaped = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", unescape_character, text, flags=re.DOTALL)
    # Java writes a character beyond U+FFFF as two escapes.
    try:
        return unescaped.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ConfigError("Malformed \\uxxxx encoding: a surrogate without its pair") from None


def decode_settings(data: bytes | str) -> Any:
    """Return the value of JSON that has a connector's settings. Raises InvalidJson.

    A number with a point or an exponent becomes a NumberText: Kafka Connect stores its characters too.

    >>> decode_settings('{"api.version": 1.10, "tasks.max": 1}')
    {'api.version': '1.10', 'tasks.max': 1}
    """
    try:
        return _decode_with_number_texts(data)
    except JSON_ERRORS as e:
        raise invalid_json(e) from e


def properties_from_json(body: Any, subject: str) -> dict[str, str]:
    """Return a JSON object, which `decode_settings` has decoded, as properties. Integers and booleans keep their JSON
    form. Null values are left out.

    Raises BadRequest, which names the `subject`, if `body` is not an object or a value is an array or an object.

    >>> properties_from_json({"tasks.max": 1, "enabled": True, "name": "a", "nothing": None}, "config")
    {'tasks.max': '1', 'enabled': 'true', 'name': 'a'}
    """
    if not isinstance(body, dict):
        raise BadRequest(f"The {subject} must be a JSON object of settings")
    found = {}
    for name, value in body.items():
        if isinstance(value, str):
            found[name] = str(value)
        elif isinstance(value, bool | int):
            found[name] = msgspec.json.encode(value).decode()
        elif value is not None:
            raise BadRequest(f"The {subject}'s {name!r} must be a text, not {type(value).__name__}")
    return found


def reject_unknown_fields(body: Any, known: Collection[str]) -> None:
    """Raise BadRequest if `body` is a JSON object with a field that is not in `known`."""
    if isinstance(body, dict) and (unknown := [field for field in body if field not in known]):
        raise BadRequest(f"Unrecognized field {unknown[0]!r}; known are {', '.join(known)}")


def properties_from_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as properties, as the config topic and tasks have them. A value that is not a text gets its JSON
    form. None values are left out.

    Raises BadRequest, which names the property, if a value has no JSON form.

    >>> properties_from_values({"shard": 1, "tables": ["a", "b"], "key": b"x", "nothing": None})
    {'shard': '1', 'tables': '["a","b"]', 'key': 'eA=='}
    """
    found = {}
    for name, value in values.items():
        try:
            plain = value if isinstance(value, str) else msgspec.to_builtins(value)
        except TypeError as e:
            raise BadRequest(f"{name}: {e}") from None
        if plain is not None:
            found[str(name)] = plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()
    return found


def with_prefix(props: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the properties that begin with a prefix, without the prefix.

    >>> with_prefix({"key.converter": "x", "key.converter.schemas.enable": "false"}, "key.converter.")
    {'schemas.enable': 'false'}
    """
    return {name[len(prefix) :]: value for name, value in props.items() if name.startswith(prefix)}


def parse_aliases(props: Mapping[str, str], name: str) -> list[str]:
    """Return the aliases in a setting such as `transforms`. Empty ones are left out.

    >>> parse_aliases({"transforms": "route, mask,"}, "transforms")
    ['route', 'mask']
    """
    return [alias.strip() for alias in props.get(name, "").split(",") if alias.strip()]
