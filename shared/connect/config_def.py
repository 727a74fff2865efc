"""Definitions of settings (Kafka's ConfigDef): names, types and validators. Also the form in which the REST API returns
definitions and values.

>>> definition = ConfigDef().define("tasks.max", Type.INT, 1, Importance.HIGH, "How many.", at_least(1))
>>> definition.parse({"tasks.max": "4"})
{'tasks.max': 4}
>>> definition.validate({"tasks.max": "0"})[0]["value"]["errors"]
['Invalid value 0 for configuration tasks.max: Value must be at least 1']
>>> parse("tasks.max", Type.INT, " 4 "), parse("topics", Type.LIST, "a, b"), as_text(["a", "b"], Type.LIST)
(4, ['a', 'b'], 'a,b')
>>> parse("tasks.max", Type.INT, "four")
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: Invalid value four for configuration tasks.max: Not a number of type INT
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

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


HIGH = Importance.HIGH
MEDIUM = Importance.MEDIUM
LOW = Importance.LOW


class Width(Enum):
    """The recommended width of the setting's field in a form."""

    NONE = "NONE"
    SHORT = "SHORT"
    MEDIUM = "MEDIUM"
    LONG = "LONG"


class Password(str):
    """A secret: `repr()` and f-strings show `[hidden]`, while `value`, `str()` and `%s` show the secret.

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
    """Return the ConfigError for a setting's invalid value, in Kafka's words."""
    shown = "null" if value is None else as_text(value, None)
    return ConfigError(f"Invalid value {shown} for configuration {name}" + (f": {why}" if why else ""))


def parse(name: str, kind: Type, value: Any, resolve: ClassResolver | None = None) -> Any:
    """Return the value of a setting from its text, or from a value of its type. Raises ConfigError if it is invalid."""
    if value is None:
        return None
    if isinstance(value, str):
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
    """Return a setting's value as REST shows it, with secrets hidden."""
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
    """Return a validator of a numeric setting: the value must be at least `low`, and not null."""

    def check_minimum(name: str, value: Any) -> None:
        if value is None:
            raise invalid(name, value, "Value must be non-null")
        if value < low:
            raise invalid(name, value, f"Value must be at least {low}")

    return check_minimum


def one_of(*allowed: Any, ignore_case: bool = False) -> Validator:
    """Return a validator: the setting's value must be one of the allowed values, in any case with `ignore_case`."""
    fold: Callable[[Any], Any] = (lambda value: str(value).lower()) if ignore_case else (lambda value: value)
    folded = {fold(value) for value in allowed}

    def check_allowed_value(name: str, value: Any) -> None:
        if fold(value) not in folded:
            kind = "String" if all(isinstance(item, str) for item in allowed) else "Value"
            ignoring = " (case insensitive)" if ignore_case else ""
            raise invalid(name, value, f"{kind} must be one of{ignoring}: {', '.join(map(str, allowed))}")

    return check_allowed_value


def non_empty(name: str, value: Any) -> None:
    """Validate that a setting's text is not empty. Accepts null."""
    if value is not None and not value:
        raise invalid(name, value, "String may not be empty")


def non_empty_without_control_characters(name: str, value: Any) -> None:
    """Validate that a setting's text is not empty and has no control characters. Accepts null."""
    if value is None:
        return
    if not value:
        raise invalid(name, value, "String may not be empty")
    if found := [f"\\u{ord(char):04x}" for char in value if ord(char) < 32 or 127 <= ord(char) < 160]:
        raise invalid(name, value, f"String may not contain control sequences but had the following: {found}")


def regex(name: str, value: Any) -> None:
    """Raises ConfigError unless Python's `re` accepts the regular expression."""
    if value:
        try:
            re.compile(value)
        except re.error as e:
            raise invalid(name, value, f"must be a regular expression: {e}") from None


class _Required:
    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT = _Required()
"""The default of a required setting."""


@dataclass(frozen=True)
class Recommender:
    """Recommends values for a setting in a form, given the other settings, and decides whether the form shows it."""

    valid_values: Callable[[str, Mapping[str, Any]], Sequence[Any]] = lambda _name, _values: ()
    visible: Callable[[str, Mapping[str, Any]], bool] = lambda _name, _values: True

    def embedded(self, prefix: str) -> Recommender:
        """Return the recommender of a setting that is embedded under a prefix. This one gets the names without it, and
        only the settings that have it."""

        def own(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

        return Recommender(
            lambda name, values: self.valid_values(name.removeprefix(prefix), own(values)),
            lambda name, values: self.visible(name.removeprefix(prefix), own(values)),
        )


@dataclass(frozen=True)
class ConfigKey:
    """One setting. `order` is its position in its group, or -1 if it has no position.

    An `internal` setting is parsed like any other, but `ConfigDef.definitions` leaves it out.
    """

    name: str
    type: Type
    default: Any
    importance: Importance
    documentation: str
    validator: Validator | None = None
    group: str | None = None
    order: int = -1
    width: Width = Width.NONE
    display_name: str = ""
    dependents: tuple[str, ...] = ()
    recommender: Recommender | None = None
    internal: bool = False

    @property
    def required(self) -> bool:
        return self.default is NO_DEFAULT

    def definition(self) -> dict[str, Any]:
        """Return the definition as REST shows it."""
        return {
            "name": self.name,
            "type": self.type.name,
            "required": self.required,
            "default_value": None if self.required else as_text(self.default, self.type),
            "importance": self.importance.name,
            "documentation": self.documentation,
            "group": self.group,
            "width": self.width.name,
            "display_name": self.display_name or self.name,
            "dependents": list(self.dependents),
            "order": self.order,
        }


@dataclass
class ConfigValue:
    """A setting's value and its errors."""

    name: str
    value: Any = None
    recommended_values: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    visible: bool = True

    def shown(self, kind: Type | None) -> dict[str, Any]:
        """Return the value as REST shows it."""
        return {
            "name": self.name,
            "value": as_text(self.value, kind),
            "recommended_values": [as_text(value, kind) for value in self.recommended_values],
            "errors": list(self.errors),
            "visible": self.visible,
        }


class ConfigDef:
    """Settings in the order of their definition."""

    def __init__(self, keys: Iterable[ConfigKey] = ()) -> None:
        self._keys: dict[str, ConfigKey] = {}
        for key in keys:
            self.add(key)

    def __repr__(self) -> str:
        return f"<ConfigDef {', '.join(self._keys)}>"

    def __iter__(self) -> Iterator[ConfigKey]:
        return iter(self._keys.values())

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> ConfigKey:
        return self._keys[name]

    def define(
        self,
        name: str,
        kind: Type,
        default: Any,
        importance: Importance,
        documentation: str,
        validator: Validator | None = None,
        **more: Any,
    ) -> Self:
        """Add a setting. `more` are ConfigKey's other fields. A setting with `default` NO_DEFAULT is required.

        Raises ConfigError if the setting is already defined, or if its default has the wrong type.
        """
        return self.add(ConfigKey(name, kind, default, importance, documentation, validator, **more))

    def add(self, key: ConfigKey) -> Self:
        if key.name in self._keys:
            raise ConfigError(f"Configuration {key.name} is defined twice.")
        if not key.required:
            key = replace(key, default=parse(key.name, key.type, key.default))
        self._keys[key.name] = key
        return self

    def embed(self, prefix: str, group: str, other: ConfigDef, starting_order: int = 0) -> Self:
        """Add another definition's settings under a prefix, in a group of their own."""
        for at, key in enumerate(other, start=starting_order):
            dependents = tuple(prefix + name for name in key.dependents)
            shown = key.display_name or key.name
            recommender = key.recommender and key.recommender.embedded(prefix)
            self.add(
                replace(
                    key, name=prefix + key.name, group=group, order=at, display_name=shown, dependents=dependents,
                    recommender=recommender,
                )
            )  # fmt: skip
        return self

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigDef:
        """Return the same settings, some with another default."""
        return ConfigDef(replace(key, default=defaults[key.name]) if key.name in defaults else key for key in self)

    def names(self) -> tuple[str, ...]:
        """Return the names of all defined settings."""
        return tuple(self._keys)

    def groups(self) -> list[str]:
        """Return the groups in the order in which they first occur."""
        return list(dict.fromkeys(key.group for key in self if key.group is not None))

    def definitions(self) -> list[dict[str, Any]]:
        """Return the definitions, without internal ones, as `GET /connector-plugins/{plugin}/config` shows them."""
        return [key.definition() for key in self if not key.internal]

    def parse(self, props: Mapping[str, Any], resolve: ClassResolver | None = None) -> dict[str, Any]:
        """Return every setting's value. Raises one ConfigError that lists all errors."""
        values = self.validate_values(props, resolve)
        if errors := [error for value in values for error in value.errors]:
            raise ConfigError("; ".join(errors))
        return {value.name: value.value for value in values}

    def validate(self, props: Mapping[str, Any], resolve: ClassResolver | None = None) -> list[dict[str, Any]]:
        """Return each setting with its value and its errors, as `PUT …/config/validate` shows them."""
        return [
            {"definition": self[value.name].definition(), "value": value.shown(self[value.name].type)}
            for value in self.validate_values(props, resolve)
        ]

    def validate_values(self, props: Mapping[str, Any], resolve: ClassResolver | None = None) -> list[ConfigValue]:
        """Return each setting's parsed value and its errors, in the order of definition."""
        found = {key.name: self._parse_config_value(key, props, resolve) for key in self}
        parsed = {name: value.value for name, value in found.items()}
        for name, value in found.items():
            recommender = self._keys[name].recommender
            if recommender is not None:
                self._add_recommended_values(value, recommender, parsed)
        return list(found.values())

    def _parse_config_value(
        self, key: ConfigKey, props: Mapping[str, Any], resolve: ClassResolver | None
    ) -> ConfigValue:
        value = ConfigValue(key.name)
        if key.name in props:
            try:
                value.value = parse(key.name, key.type, props[key.name], resolve)
            except ConfigError as e:
                value.errors.append(str(e))
        elif key.required:
            value.errors.append(f'Missing required configuration "{key.name}" which has no default value.')
            return value
        else:
            value.value = key.default
        if key.validator is not None:
            try:
                key.validator(key.name, value.value)
            except ConfigError as e:
                value.errors.append(str(e))
        return value

    def _add_recommended_values(self, value: ConfigValue, recommender: Recommender, parsed: Mapping[str, Any]) -> None:
        try:
            value.recommended_values = list(recommender.valid_values(value.name, parsed))
            value.visible = recommender.visible(value.name, parsed)
        except ConfigError as e:
            value.errors.append(str(e))
