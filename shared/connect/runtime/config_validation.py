"""Validation of a whole connector configuration, in Kafka Connect's form.

First it checks the common settings. Then it checks the transforms, predicates and topic creation groups that the
configuration names, and then the connector's own settings. Nothing is started, and no connection is made, except by a
connector's own `validate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.allowed_files import FILES_ALLOWED, AllowedFiles
from penstock.shared.connect.config_def import (
    ConfigDef,
    ConfigValue,
    Importance,
    Type,
    as_text,
)
from penstock.shared.connect.connector import Connector, ExactlyOnceSupport, SinkConnector, SourceConnector
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.redaction import hidden, variables_in, without_passwords
from penstock.shared.connect.runtime.client_settings import consumer_settings, producer_settings, rejected_overrides
from penstock.shared.connect.runtime.connector_config import (
    CONVERTER_KINDS,
    connector_definition,
    sink_config,
    source_config,
)
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.worker_config import (
    ISOLATION,
    WORKER_ONLY,
    isolation_error,
)
from penstock.shared.connect.version import CONNECT_VERSION

_WORKER_ONLY_TEXT = "{name} is a setting of the worker and has no effect here: set it in the worker's properties"


@dataclass
class ConfigInfos:
    """The result of a validation. `as_json()` returns the body of the REST response."""

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


def require_connector_class(props: Mapping[str, str]) -> str:
    """Return the name of the connector class in a configuration. The class itself may not exist.

    Raises ConfigError if `connector.class` contains a variable, or is missing. If it is missing, the message shows the
    configuration, with secrets hidden.
    """
    given = props.get("connector.class")
    if given is None:
        shown = ", ".join(f"{name}={hidden(name, value)}" for name, value in sorted(props.items()))
        raise ConfigError(f"Connector config {{{shown}}} contains no connector type")
    # The leader decides by the class whether it fences producers. It does so without the values of variables.
    if variables_in(given):
        raise ConfigError(f"connector.class cannot contain a variable: {given}")
    return given


def validate_connector(plugins: Plugins, props: Mapping[str, str], worker: Mapping[str, Any]) -> ConfigInfos:
    """Validate a configuration whose variables (`${…}`) are resolved. `worker` has the worker's own settings.

    Raises ConfigError if it names no connector class, or one that does not exist.
    """
    given = require_connector_class(props)
    plugin = plugins.connector_class(given)
    common = connector_definition(plugin, plugins, props, worker)
    values = common.validate_values(props, plugins.any_kind)
    by_name = {value.name: value for value in values}
    if issubclass(plugin, SinkConnector):
        _check_sink_topics(by_name)
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
    files = AllowedFiles(worker[FILES_ALLOWED])
    for value in values:
        if value.name in plugin.file_settings:
            try:
                files.check((value.name,), props)
            except ConfigError as e:
                value.errors.append(str(e))
    return values


def _wrong_overrides(plugin: type[Connector], props: Mapping[str, str], worker: Mapping[str, Any]) -> list[ConfigValue]:
    """Return the client overrides that the worker's policy rejects, and those that are invalid.

    Invalid overrides are found for the producer, and for the consumer of a sink: at most one for each. Those of
    connection settings, such as `security.protocol`, are not found here.
    """
    policy = worker["connector.client.config.override.policy"]
    found = []
    is_sink = issubclass(plugin, SinkConnector)
    # A sink's tasks always have a group.id: an empty or missing override has a default.
    sink_consumer = partial(consumer_settings, group_id="group")
    makers = {"producer": producer_settings, **({"consumer": sink_consumer} if is_sink else {}), "admin": None}
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
    """Return the definitions of a plugin's own settings.

    For a connector, the common settings follow, except those that the connector defines itself.
    """
    own: ConfigDef = cast(Any, plugin).config()
    shown = own.definitions()
    if kind in ("sink", "source"):
        common = sink_config() if kind == "sink" else source_config()
        defaults = common.with_defaults({"connector.plugin.version": CONNECT_VERSION})
        shown += [definition for definition in defaults.definitions() if definition["name"] not in own]
    return shown


def _check_sink_topics(values: Mapping[str, ConfigValue]) -> None:
    """Add the errors of topics and topics.regex, also together with the dead-letter topic, to their values."""
    topics = values["topics"]
    pattern = values["topics.regex"]
    dlq = values["errors.deadletterqueue.topic.name"]
    if not topics.value and not pattern.value:
        topics.errors.append("Must configure one of topics or topics.regex")
    if topics.value and pattern.value:
        for value in (topics, pattern):
            value.errors.append("topics and topics.regex are mutually exclusive options, but both are set.")
    if dlq.value and dlq.value in (topics.value or ()):
        topics.errors.append(f"The dead-letter topic {dlq.value} may not be one of the topics that are read.")
    if dlq.value and pattern.value and not pattern.errors and re.fullmatch(pattern.value, dlq.value):
        pattern.errors.append(f"The dead-letter topic {dlq.value} may not be matched by topics.regex.")


def _check_exactly_once(
    connector: SourceConnector, props: Mapping[str, str], values: Mapping[str, ConfigValue], worker: Mapping[str, Any]
) -> None:
    support = values["exactly.once.support"]
    boundary = values["transaction.boundary"]
    if str(support.value).lower() == "required" and not support.errors:
        if worker["exactly.once.source.support"].lower() != "enabled":
            support.errors.append("This worker does not have exactly-once source support enabled.")
        else:
            declared = connector.exactly_once_support(props)
            if declared is None:
                support.errors.append(
                    "The connector does not report whether it supports exactly-once with these settings. See its "
                    "documentation, and set 'exactly.once.support' to 'requested' if it does."
                )
            elif not isinstance(declared, ExactlyOnceSupport):
                support.errors.append(
                    f"The connector's exactly_once_support returns {declared!r}, and not an ExactlyOnceSupport or None."
                )
            elif declared is not ExactlyOnceSupport.SUPPORTED:
                support.errors.append("The connector does not support exactly-once with these settings.")
    if str(boundary.value).lower() == "connector" and not connector.can_define_transaction_boundaries(props):
        boundary.errors.append("The connector does not define transaction boundaries with these settings.")


def _shown_config_value(definition: ConfigDef, value: ConfigValue) -> dict[str, Any]:
    if value.name not in definition:
        # The connector's own validation may report on a setting that it did not define.
        definition = ConfigDef().define(value.name, Type.STRING, None, Importance.LOW, "")
        value.value = hidden(value.name, value.value)
    key = definition[value.name]
    shown = value.shown(key.type)
    if isinstance(shown["value"], str):
        # A value such as a URL may contain a password.
        shown["value"] = without_passwords(shown["value"])
    return {"definition": key.definition(), "value": shown}
