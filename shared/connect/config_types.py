"""Types of settings: text to value, value to text, and validators of values.

>>> parse("tasks.max", Type.INT, " 4 "), parse("topics", Type.LIST, "a, b"), as_text(["a", "b"], Type.LIST)
(4, ['a', 'b'], 'a,b')
>>> parse("tasks.max", Type.INT, "four")
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: Invalid value four for configuration tasks.max: Not a number of type INT
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any

from penstock.shared.common.errors import ConfigError

HIDDEN = "[hidden]"

Validator = Callable[[str, Any], None]
"""Takes a setting's name and parsed value; raises ConfigError, best made by `invalid`."""
ClassResolver = Callable[[str], object | None]
"""Returns the class for a name or alias, or None if there is none."""


class Type(Enum):
    BOOLEAN = "BOOLEAN"
    STRING = "STRING"
    INT = "INT"
    SHORT = "SHORT"
    LONG = "LONG"
    DOUBLE = "DOUBLE"
    LIST = "LIST"
    CLASS = "CLASS"
    PASSWORD = "PASSWORD"  # noqa: S105  # the type's name


class Importance(Enum):
    HIGH = "HIGH"
    MEDIUM = "MEDIUM"
    LOW = "LOW"


class Width(Enum):
    """The recommended width of the setting's field in a form."""

    NONE = "NONE"
    SHORT = "SHORT"
    MEDIUM = "MEDIUM"
    LONG = "LONG"


class Password(str):
    """A secret. Its repr and its formatted text show `[hidden]`; as a `str` it is the secret itself.

    >>> secret = Password("s3cret")
    >>> repr(secret), f"{secret}", secret.value
    ('[hidden]', '[hidden]', 's3cret')
    """

    __slots__ = ()

    @property
    def value(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return HIDDEN

    def __format__(self, spec: str) -> str:
        return HIDDEN


INTEGER_LIMITS = {Type.INT: 1 << 31, Type.SHORT: 1 << 15, Type.LONG: 1 << 63}


def invalid(name: str, value: Any, why: str | None = None) -> ConfigError:
    """Return the ConfigError for an invalid value, in Kafka's words."""
    shown = "null" if value is None else as_text(value, None)
    return ConfigError(f"Invalid value {shown} for configuration {name}" + (f": {why}" if why else ""))


def parse(name: str, kind: Type, value: Any, resolve: ClassResolver | None = None) -> Any:
    """Return the value of a setting from its text, or from a value of its type. Raises ConfigError if invalid."""
    if value is None:
        return None
    if isinstance(value, str) and kind is not Type.PASSWORD:
        value = value.strip()
    if kind in INTEGER_LIMITS:
        return _parse_integer(name, kind, value)
    match kind:
        case Type.BOOLEAN:
            if isinstance(value, bool):
                return value
            if str(value).lower() in ("true", "false"):
                return str(value).lower() == "true"
            raise invalid(name, value, "Expected value to be either true or false")
        case Type.DOUBLE:
            try:
                return float(value)
            except (TypeError, ValueError):
                raise invalid(name, value, "Not a number of type DOUBLE") from None
        case Type.LIST:
            if isinstance(value, str):
                return [item.strip() for item in value.split(",")] if value else []
            return list(value)
        case Type.PASSWORD:
            return Password(value)
        case Type.CLASS:
            if resolve is not None and resolve(value) is None:
                raise invalid(name, value, f"Class {value} could not be found.")
            return value
    return str(value)


def _parse_integer(name: str, kind: Type, value: Any) -> int:
    limit = INTEGER_LIMITS[kind]
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", str(value)) or not -limit <= int(value) < limit:
        raise invalid(name, value, f"Not a number of type {kind.name}")
    return int(value)


def as_text(value: Any, kind: Type | None) -> str | None:
    """Return a value as REST shows it, with secrets hidden."""
    if value is None:
        return None
    if kind is Type.PASSWORD or isinstance(value, Password):
        return HIDDEN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(str(as_text(item, None)) for item in value)
    return str(value)


def at_least(low: float) -> Validator:
    """Return a validator of numbers: the value must be at least `low`, and not null."""

    def check_minimum(name: str, value: Any) -> None:
        if value is None:
            raise invalid(name, value, "Value must be non-null")
        if value < low:
            raise invalid(name, value, f"Value must be at least {low}")

    return check_minimum


def between(low: float, high: float) -> Validator:
    """Return a validator of numbers: the value must be from `low` to `high`, and not null."""

    def check_range(name: str, value: Any) -> None:
        at_least(low)(name, value)
        if value > high:
            raise invalid(name, value, f"Value must be no more than {high}")

    return check_range


def one_of(*allowed: Any, ignore_case: bool = False) -> Validator:
    """Return a validator: the value must be one of the allowed values."""
    fold: Callable[[Any], Any] = (lambda value: str(value).lower()) if ignore_case else (lambda value: value)
    folded = {fold(value) for value in allowed}

    def check_allowed_value(name: str, value: Any) -> None:
        if fold(value) not in folded:
            kind = "String" if all(isinstance(item, str) for item in allowed) else "Value"
            ignoring = " (case insensitive)" if ignore_case else ""
            raise invalid(name, value, f"{kind} must be one of{ignoring}: {', '.join(map(str, allowed))}")

    return check_allowed_value


def non_empty(name: str, value: Any) -> None:
    """Validates that a text is not empty. Accepts null."""
    if value is not None and not value:
        raise invalid(name, value, "String may not be empty")


def non_empty_without_control_characters(name: str, value: Any) -> None:
    """Validates that a text is not empty and has no control characters. Accepts null."""
    if value is None:
        return
    if not value:
        raise invalid(name, value, "String may not be empty")
    if found := [f"\\u{ord(char):04x}" for char in value if ord(char) < 32 or 127 <= ord(char) < 160]:
        raise invalid(name, value, f"String may not contain control sequences but had the following: {found}")


def unique_items(name: str, value: Any) -> None:
    """Raises ConfigError if an alias occurs twice."""
    if value and len(set(value)) < len(value):
        raise invalid(name, value, "Duplicate alias provided.")


def regex(name: str, value: Any) -> None:
    """Raises ConfigError unless Python's `re` accepts the regular expression."""
    if value:
        try:
            re.compile(value)
        except re.error as e:
            raise invalid(name, value, f"must be a regular expression: {e}") from None
