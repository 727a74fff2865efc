"""Definitions of settings: names, types, validators, and the form in which REST shows both (Kafka's ConfigDef).

>>> definition = ConfigDef().define("tasks.max", Type.INT, 1, Importance.HIGH, "How many.", at_least(1))
>>> definition.parse({"tasks.max": "4"})
{'tasks.max': 4}
>>> definition.validate({"tasks.max": "0"})[0]["value"]["errors"]
['Invalid value 0 for configuration tasks.max: Value must be at least 1']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.config_types import (
    ClassResolver,
    Importance,
    Type,
    Validator,
    Width,
    as_text,
    at_least,
    between,
    non_empty,
    one_of,
    parse,
)

__all__ = [
    "NO_DEFAULT",
    "ConfigDef",
    "ConfigKey",
    "ConfigValue",
    "Importance",
    "Recommender",
    "Type",
    "Width",
    "at_least",
    "between",
    "non_empty",
    "one_of",
]


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


@dataclass(frozen=True)
class ConfigKey:
    """One setting. `order` is its position in its group, or -1 if it has none."""

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
        """Adds a setting. `more` are ConfigKey's other fields. A setting with `default` NO_DEFAULT is required."""
        return self.add(ConfigKey(name, kind, default, importance, documentation, validator, **more))

    def add(self, key: ConfigKey) -> Self:
        if key.name in self._keys:
            raise ConfigError(f"Configuration {key.name} is defined twice.")
        if not key.required:
            key = replace(key, default=parse(key.name, key.type, key.default))
        self._keys[key.name] = key
        return self

    def embed(self, prefix: str, group: str, other: ConfigDef, starting_order: int = 0) -> Self:
        """Adds another definition's settings under a prefix, in a group of their own."""
        for at, key in enumerate(other, start=starting_order):
            dependents = tuple(prefix + name for name in key.dependents)
            shown = key.display_name or key.name
            self.add(
                replace(key, name=prefix + key.name, group=group, order=at, display_name=shown, dependents=dependents)
            )
        return self

    def copy(self) -> ConfigDef:
        return ConfigDef(self)

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
        """Return the definitions as `GET /connector-plugins/{plugin}/config` shows them."""
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
        found = {key.name: self._parse_config_value(key, props, resolve) for key in self if not key.internal}
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
