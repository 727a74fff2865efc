"""Validation of a whole connector configuration, in Kafka Connect's form.

It checks the common settings first, then the transforms, predicates and topic creation groups that the configuration
names, then the connector's own settings. It starts nothing and connects to nothing, unless the connector's own
`validate` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from penstock.shared.connect.allowed_files import FILES_ALLOWED, AllowedFiles
from penstock.shared.connect.config_def import (
    NO_DEFAULT,
    ConfigDef,
    ConfigValue,
    Importance,
    Recommender,
    Type,
    Width,
    as_text,
    invalid,
)
from penstock.shared.connect.connector import Connector, ExactlyOnceSupport, SinkConnector, SourceConnector
from penstock.shared.connect.errors import ConfigError
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.redaction import hidden, without_passwords
from penstock.shared.connect.runtime.client_settings import consumer_settings, producer_settings
from penstock.shared.connect.runtime.connector_config import check_sink_topics, sink_config, source_config
from penstock.shared.connect.runtime.override_policy import rejected_overrides
from penstock.shared.connect.runtime.plugins import KINDS, Plugins
from penstock.shared.connect.runtime.worker_config import (
    ISOLATION,
    JSON_CONVERTER,
    SIMPLE_HEADER_CONVERTER,
    WORKER_ONLY,
    isolation_error,
)
from penstock.shared.connect.version import CONNECT_VERSION

CONVERTER_KINDS = {"key.converter": "converter", "value.converter": "converter", "header.converter": "header_converter"}
_WORKER_ONLY_TEXT = "{name} is a setting of the worker and has no effect here: set it in the worker's properties"
CHAINS = {"transforms": "transformation", "predicates": "predicate"}


@dataclass
class ConfigInfos:
    """The result of a validation. `as_json()` returns REST's body."""

    name: str
    groups: list[str] = field(default_factory=list)
    configs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def error_count(self) -> int:
        return sum(len(config["value"]["errors"]) for config in self.configs)

    @property
    def errors(self) -> list[str]:
        return [error for config in self.configs for error in config["value"]["errors"]]

    def as_json(self) -> dict[str, Any]:
        """Return the result of a validation as the body of the REST response."""
        return {
            "name": self.name,
            "error_count": self.error_count,
            "groups": self.groups,
            "configs": self.configs,
        }

    def error_message(self) -> str:
        """Return Kafka Connect's message for a request with this invalid configuration."""
        errors = "".join(f"\n{error}" for error in self.errors)
        return (
            f"Connector configuration is invalid and contains the following {self.error_count} error(s):{errors}\n"
            "You can also find the above list of errors at the endpoint "
            "`/connector-plugins/{connectorType}/config/validate`"
        )


def class_given(props: Mapping[str, str]) -> str:
    """Return the connector's class. Raises ConfigError with the configuration if it names none."""
    given = props.get("connector.class")
    if given is None:
        shown = ", ".join(f"{name}={hidden(name, value)}" for name, value in sorted(props.items()))
        raise ConfigError(f"Connector config {{{shown}}} contains no connector type")
    return given


def validate_connector(plugins: Plugins, props: Mapping[str, str], worker: Mapping[str, Any]) -> ConfigInfos:
    """Validates a configuration with resolved `${…}`. `worker` contains the worker's own settings.

    Raises ConfigError if it names no connector class, or one that does not exist.
    """
    given = class_given(props)
    plugin = plugins.connector_class(given)
    common = common_definition(plugin, plugins, props, worker)
    values = common.validate_values(props, lambda name: _find_plugin_class(plugins, name))
    by_name = {value.name: value for value in values}
    if issubclass(plugin, SinkConnector):
        check_sink_topics(by_name)
    elif issubclass(plugin, SourceConnector):
        _check_exactly_once(plugin(), props, by_name, worker)
    infos = ConfigInfos(given, common.groups())
    infos.configs += [_shown_config_value(common, value) for value in values]
    own = plugin.config()
    infos.groups += [group for group in own.groups() if group not in infos.groups]
    # The connector's own settings come last. One with the name of a common setting is shown once, as the common one.
    checked = _with_files_checked(plugin, plugin().validate(props), props, worker)
    infos.configs += [_shown_config_value(own, value) for value in checked if value.name not in common]
    # An error, unlike in Kafka Connect, which ignores unknown settings: the user would expect an effect.
    worker_only = [name for name in WORKER_ONLY if name in props and name not in own]
    wrong = [
        *_wrong_overrides(plugin, props, worker),
        *_wrong_converters(plugins, props),
        *(ConfigValue(name, props[name], errors=[_WORKER_ONLY_TEXT.format(name=name)]) for name in worker_only),
        *_validate_isolation(props, worker),
    ]
    infos.configs += [_shown_config_value(ConfigDef(), value) for value in wrong]
    return infos


def _with_files_checked(
    plugin: type[Connector], values: list[ConfigValue], props: Mapping[str, str], worker: Mapping[str, Any]
) -> list[ConfigValue]:
    """Return the values, with an error at each that names a file which the worker does not allow."""
    files = AllowedFiles(worker.get(FILES_ALLOWED, ()))
    for value in values:
        if value.name in plugin.file_settings:
            try:
                files.check((value.name,), props)
            except ConfigError as e:
                value.errors.append(str(e))
    return values


def _wrong_overrides(plugin: type[Connector], props: Mapping[str, str], worker: Mapping[str, Any]) -> list[ConfigValue]:
    """Return the connector's client settings that are invalid, or that the worker's policy does not allow."""
    policy = str(worker.get("connector.client.config.override.policy", "All"))
    found = []
    is_sink = issubclass(plugin, SinkConnector)
    makers = {"producer": producer_settings, **({"consumer": consumer_settings} if is_sink else {}), "admin": None}
    for client, make in makers.items():
        prefix = f"{client}.override."
        given = with_prefix(props, prefix)
        rejected = rejected_overrides(policy, given)
        for name in rejected:
            message = f"The '{policy}' policy does not allow '{name}' to be overridden in the connector configuration."
            found.append(ConfigValue(prefix + name, hidden(name, props[prefix + name]), errors=[message]))
        try:
            if make is not None:
                make({name: given[name] for name in given if name not in rejected})
        except ConfigError as e:
            # The client's error names the setting in Kafka's or in Python's spelling. If neither is found, the error is
            # shown at the first override.
            named = next(
                (name for name in given if name in str(e) or name.replace(".", "_") in str(e)), next(iter(given))
            )
            found.append(ConfigValue(prefix + named, hidden(named, given[named]), errors=[str(e)]))
    return found


def _validate_isolation(props: Mapping[str, str], worker: Mapping[str, Any]) -> list[ConfigValue]:
    error = isolation_error(props[ISOLATION], worker) if props.get(ISOLATION) else None
    return [] if error is None else [ConfigValue(ISOLATION, props[ISOLATION], errors=[error])]


def _wrong_converters(plugins: Plugins, props: Mapping[str, str]) -> list[ConfigValue]:
    """Return the invalid settings of the connector's own converters."""
    found = []
    for name, kind in CONVERTER_KINDS.items():
        converter = plugins.find(kind, props.get(name, ""))
        if converter is None:
            continue
        own: ConfigDef = cast(Any, converter).config()
        for value in own.validate_values(with_prefix(props, f"{name}.")):
            if value.errors:
                shown = as_text(value.value, own[value.name].type)
                found.append(ConfigValue(f"{name}.{value.name}", shown, errors=value.errors))
    return found


def plugin_definitions(plugin: type, kind: str) -> list[dict[str, Any]]:
    """Return a plugin's settings: of a connector, its own and then the common ones that it does not override."""
    own: ConfigDef = cast(Any, plugin).config()
    shown = own.definitions()
    if kind in ("sink", "source"):
        common = sink_config() if kind == "sink" else source_config()
        defaults = common.with_defaults({"connector.plugin.version": CONNECT_VERSION})
        shown += [definition for definition in defaults.definitions() if definition["name"] not in own]
    return shown


def common_definition(
    plugin: type[Connector], plugins: Plugins, props: Mapping[str, str], worker: Mapping[str, Any]
) -> ConfigDef:
    """Return the common settings, with the worker's converters as defaults and the settings of named plugins."""
    base = sink_config() if issubclass(plugin, SinkConnector) else source_config(props)
    # Without the constructor, which may have side effects.
    defaults: dict[str, Any] = {"connector.plugin.version": plugin.version(object.__new__(plugin))}
    fallback = {"header.converter": SIMPLE_HEADER_CONVERTER}
    for name in CONVERTER_KINDS:
        defaults[name] = worker.get(name) or fallback.get(name, JSON_CONVERTER)
        defaults[f"{name}.plugin.version"] = CONNECT_VERSION
    definition = ConfigDef(_with_recommendations(base.with_defaults(defaults), plugins))
    for chain, kind in CHAINS.items():
        _define_transform_settings(definition, chain, kind, plugins, props)
    return definition


def _with_recommendations(definition: ConfigDef, plugins: Plugins) -> list[Any]:
    keys = []
    for key in definition:
        if key.name in CONVERTER_KINDS:
            names = [desc.name for desc in plugins.of_kind(CONVERTER_KINDS[key.name])]
            key = replace(key, recommender=_recommend_values(names))
        elif key.name.endswith("plugin.version"):
            key = replace(key, recommender=_recommend_values([key.default]))
        keys.append(key)
    return keys


def _recommend_values(values: list[Any]) -> Recommender:
    return Recommender(lambda _name, _values: values)


def _define_transform_settings(
    definition: ConfigDef, chain: str, kind: str, plugins: Plugins, props: Mapping[str, str]
) -> None:
    """Adds the settings of each transform or predicate that the configuration names, in a group of its own."""
    singular = chain.removesuffix("s").capitalize()
    for alias in dict.fromkeys(name.strip() for name in props.get(chain, "").split(",") if name.strip()):
        prefix = f"{chain}.{alias}."
        group = f"{chain.capitalize()}: {alias}"
        recommended = [desc.name for desc in plugins.of_kind(kind)]
        definition.define(
            prefix + "type", Type.CLASS, NO_DEFAULT, Importance.HIGH, f"Class of the {chain[:-1]} {alias}.",
            _validate_plugin_kind(plugins, kind), group=group, order=0, width=Width.LONG,
            display_name=f"{singular} type for {alias}",
            recommender=_recommend_values(recommended),
        )  # fmt: skip
        if chain == "transforms":
            definition.define(
                prefix + "predicate", Type.STRING, None, Importance.MEDIUM,
                "Alias of the predicate that selects the records to transform.", _validate_predicate_name(props),
                group=group, order=1, width=Width.MEDIUM, display_name="Predicate",
            )  # fmt: skip
            definition.define(
                prefix + "negate", Type.BOOLEAN, False, Importance.MEDIUM,
                "Whether to transform the records that do not match the predicate.",
                group=group, order=2, width=Width.MEDIUM, display_name="Negate",
            )  # fmt: skip
        found = plugins.find(kind, props.get(prefix + "type", ""))
        if found is not None:
            # `type`, `predicate` and `negate` are defined above and hide settings of the same names.
            own = ConfigDef(key for key in cast(Any, found).config() if prefix + key.name not in definition)
            definition.embed(prefix, group, own, 3)


def _validate_plugin_kind(plugins: Plugins, kind: str) -> Any:
    def check_plugin_kind(name: str, value: Any) -> None:
        if value is not None and plugins.find(kind, value) is None:
            raise invalid(name, value, f"Class {value} is not a {KINDS[kind].__name__}.")

    return check_plugin_kind


def _validate_predicate_name(props: Mapping[str, str]) -> Any:
    def check_predicate_name(name: str, value: Any) -> None:
        known = [alias.strip() for alias in props.get("predicates", "").split(",")]
        if value is not None and value not in known:
            raise invalid(name, value, "Predicate is not listed in 'predicates'.")

    return check_predicate_name


def _find_plugin_class(plugins: Plugins, name: str) -> object | None:
    return plugins.any_kind(name)


def _check_exactly_once(
    connector: SourceConnector, props: Mapping[str, str], values: Mapping[str, ConfigValue], worker: Mapping[str, Any]
) -> None:
    support = values["exactly.once.support"]
    boundary = values["transaction.boundary"]
    if str(support.value).lower() == "required" and not support.errors:
        if str(worker.get("exactly.once.source.support", "disabled")).lower() != "enabled":
            support.errors.append("This worker does not have exactly-once source support enabled.")
        else:
            declared = connector.exactly_once_support(props)
            if declared is None:
                support.errors.append(
                    "The connector does not report whether it supports exactly-once with these settings. See its "
                    "documentation, and set 'exactly.once.support' to 'requested' if it does."
                )
            elif declared is not ExactlyOnceSupport.SUPPORTED:
                support.errors.append("The connector does not support exactly-once with these settings.")
    if str(boundary.value).lower() == "connector" and not connector.can_define_transaction_boundaries(props):
        boundary.errors.append("The connector does not define transaction boundaries with these settings.")


def _shown_config_value(definition: ConfigDef, value: ConfigValue) -> dict[str, Any]:
    if value.name not in definition:  # the connector's own validation may report on a setting that it did not define
        definition = ConfigDef().define(value.name, Type.STRING, None, Importance.LOW, "")
        value.value = hidden(value.name, value.value)
    key = definition[value.name]
    shown = value.shown(key.type)
    if isinstance(shown["value"], str):  # a URL, for example, may have a password in it
        shown["value"] = without_passwords(shown["value"])
    return {"definition": key.definition(), "value": shown}
