"""The settings that every connector has: Kafka Connect's names, types, defaults, groups and order.

A connector's configuration adds those of its topic creation groups, its transforms and its predicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from penstock.shared.connect.config_def import (
    HIGH,
    LOW,
    MEDIUM,
    NO_DEFAULT,
    ConfigDef,
    ConfigKey,
    Importance,
    Recommender,
    Type,
    Validator,
    Width,
    at_least,
    invalid,
    non_empty_without_control_characters,
    one_of,
    regex,
)
from penstock.shared.connect.connector import Connector, SinkConnector
from penstock.shared.connect.properties import parse_aliases
from penstock.shared.connect.runtime.plugins import KINDS, Plugins, plugin_version
from penstock.shared.connect.runtime.topic_creation import DEFAULT_GROUP
from penstock.shared.connect.version import CONNECT_VERSION

COMMON = "Common"
TRANSFORMS = "Transforms"
PREDICATES = "Predicates"
ERRORS = "Error Handling"
TOPIC_CREATION = "Topic Creation"
EXACTLY_ONCE = "Exactly Once Support"
OFFSETS_TOPIC = "offsets.topic"
CONVERTER_KINDS = {"key.converter": "converter", "value.converter": "converter", "header.converter": "header_converter"}
CHAINS = {"transforms": "transformation", "predicates": "predicate"}


CONVERTER_TEXT = (
    "Converter class for {what}, between Connect's data format and the bytes in Kafka. Any connector works with any "
    "converter. Default: the worker's converter."
)
VERSION_TEXT = "Accepted for compatibility: the worker always uses the installed version of the {what}."


class _Group:
    """Defines one group's settings, with rising order."""

    def __init__(self, definition: ConfigDef, group: str, order: int = 0) -> None:
        self._definition = definition
        self._group = group
        self._order = order

    def add(
        self,
        name: str,
        kind: Type,
        default: Any,
        importance: Importance,
        display_name: str,
        width: Width,
        documentation: str,
        validator: Validator | None = None,
        group: str | None = None,
        order: int | None = None,
    ) -> None:
        self._order += 1
        self._definition.define(
            name,
            kind,
            default,
            importance,
            documentation,
            validator,
            group=group or self._group,
            order=self._order if order is None else order,
            width=width,
            display_name=display_name,
        )


# One setting is one row here.
# fmt: off
def common_config() -> ConfigDef:
    """The settings of source and sink connectors (org.apache.kafka.connect.runtime.ConnectorConfig)."""
    definition = ConfigDef()
    common = _Group(definition, COMMON)
    common.add("name", Type.STRING, NO_DEFAULT, HIGH, "Connector name", Width.MEDIUM,
        "Name of the connector, unique within its cluster.", non_empty_without_control_characters)
    common.add("connector.class", Type.STRING, NO_DEFAULT, HIGH, "Connector class", Width.LONG,
        "Class of the connector: its full name, the name of the Kafka class that it replaces, an entry point of "
        "the group penstock.connectors, or the class name with or without the suffix `Connector`.")
    common.add("connector.plugin.version", Type.STRING, None, MEDIUM, "Connector version", Width.MEDIUM,
        VERSION_TEXT.format(what="connector"))
    common.add("tasks.max", Type.INT, 1, HIGH, "Tasks max", Width.SHORT,
        "Maximum number of tasks of the connector.", at_least(1))
    common.add("tasks.max.enforce", Type.BOOLEAN, True, LOW, "Enforce tasks max", Width.SHORT,
        "Whether the connector and its tasks fail if it generates more than tasks.max tasks. "
        "Deprecated in Kafka Connect.")
    for which, shown in (("key", "Key converter"), ("value", "Value converter"), ("header", "Header converter")):
        what = {"key": "keys", "value": "values", "header": "the values of headers"}[which]
        common.add(f"{which}.converter", Type.CLASS, None, LOW, f"{shown} class", Width.SHORT,
            CONVERTER_TEXT.format(what=what))
        common.add(f"{which}.converter.plugin.version", Type.STRING, None, LOW, f"{shown} version", Width.SHORT,
            VERSION_TEXT.format(what=shown.lower()))
    common.add("transforms", Type.LIST, "", LOW, "Transforms", Width.LONG,
        "Aliases of the transforms that are applied to each record, in this order. Each is configured by "
        "transforms.<alias>.type and its own settings.", validate_unique_aliases, group=TRANSFORMS)
    common.add("predicates", Type.LIST, "", LOW, "Predicates", Width.LONG,
        "Aliases of the predicates that transforms may refer to. Each is configured by predicates.<alias>.type and "
        "its own settings.",
        validate_unique_aliases, group=PREDICATES)
    common.add("config.action.reload", Type.STRING, "restart", LOW, "Reload Action", Width.MEDIUM,
        "Accepted for compatibility: values from config providers do not expire.",
        one_of("none", "restart", ignore_case=True))
    _define_error_handling(_Group(definition, ERRORS))
    return definition


def _define_error_handling(errors: _Group) -> None:
    errors.add("errors.retry.timeout", Type.LONG, 0, MEDIUM, "Retry Timeout for Errors", Width.MEDIUM,
        "Maximum time in ms for which a failed operation is retried. 0: no retries. -1: no limit.", at_least(-1))
    errors.add("errors.retry.delay.max.ms", Type.LONG, 60_000, MEDIUM, "Maximum Delay Between Retries for Errors",
        Width.MEDIUM, "Maximum delay between retries, in ms. Longer ones become a random delay below it.", at_least(0))
    errors.add("errors.tolerance", Type.STRING, "none", MEDIUM, "Error Tolerance", Width.SHORT,
        "none: an error that remains after all retries fails the task. all: the record is skipped.",
        one_of("none", "all", ignore_case=True))
    errors.add("errors.log.enable", Type.BOOLEAN, False, MEDIUM, "Log Errors", Width.SHORT,
        "Whether every error is logged with the failed operation. false: only errors that fail the task.")
    errors.add("errors.log.include.messages", Type.BOOLEAN, False, MEDIUM, "Log Error Details", Width.SHORT,
        "Whether these log lines identify the record: by topic, partition and timestamp, and by its offset or its "
        "source partition and source offset. Keys, values and headers are never logged.")


def sink_config() -> ConfigDef:
    """The settings of every sink (org.apache.kafka.connect.runtime.SinkConnectorConfig)."""
    definition = common_config()
    common = _Group(definition, COMMON)
    common.add("topics", Type.LIST, "", HIGH, "Topics", Width.LONG, "Topics to consume, comma-separated.", order=4)
    common.add("topics.regex", Type.STRING, "", HIGH, "Topics regex", Width.LONG,
        "Python regular expression of the topics to consume, matched against whole names. Set this or topics.", regex,
        order=4)
    errors = _Group(definition, ERRORS, 5)
    errors.add("errors.deadletterqueue.topic.name", Type.STRING, "", MEDIUM, "Dead Letter Queue Topic Name",
        Width.MEDIUM, "Topic for records that could not be converted, transformed or written. Empty: none.")
    errors.add("errors.deadletterqueue.topic.replication.factor", Type.SHORT, 3, MEDIUM,
        "Dead Letter Queue Topic Replication Factor", Width.MEDIUM,
        "Replication factor of the dead letter queue topic if the worker creates it.")
    errors.add("errors.deadletterqueue.context.headers.enable", Type.BOOLEAN, False, MEDIUM,
        "Enable Error Context Headers", Width.MEDIUM,
        "Whether dead letters get headers with the error context (__connect.errors.*) after the record's own.")
    return definition


def source_config(props: Mapping[str, str] | None = None) -> ConfigDef:
    """The settings of every source (SourceConnectorConfig), with those of the topic creation groups in `props`."""
    definition = common_config()
    creation = _Group(definition, TOPIC_CREATION)
    creation.add("topic.creation.groups", Type.LIST, "", LOW, "Topic Creation Groups", Width.LONG,
        "Aliases of groups of topics with their own topic creation settings. The first group that matches a topic "
        "applies, then the group default.", validate_unique_aliases)
    once = _Group(definition, EXACTLY_ONCE, 1)
    once.add("exactly.once.support", Type.STRING, "requested", MEDIUM, "Exactly once support", Width.SHORT,
        "required: the configuration is invalid unless the connector reports that it supports exactly-once and the "
        "worker has it enabled. requested: no check; see the connector's documentation.",
        one_of("requested", "required", ignore_case=True))
    once.add("transaction.boundary", Type.STRING, "poll", MEDIUM, "Transaction Boundary", Width.SHORT,
        "poll: one transaction for each batch from poll. interval: one for each transaction.boundary.interval.ms. "
        "connector: the task defines the boundaries.", one_of("poll", "interval", "connector", ignore_case=True))
    once.add("transaction.boundary.interval.ms", Type.LONG, None, LOW, "Transaction boundary interval", Width.SHORT,
        "Interval between transaction commits under transaction.boundary=interval, in ms. Default: the worker's "
        "offset.flush.interval.ms.", _validate_unless_none(at_least(0)))
    _Group(definition, OFFSETS_TOPIC).add("offsets.storage.topic", Type.STRING, None, LOW, "Offsets topic", Width.LONG,
        "Accepted for compatibility: source offsets are always stored in the worker's offset topic.",
        _validate_unless_none(non_empty_without_control_characters))
    return _with_topic_creation(definition, props or {})
# fmt: on
def _with_topic_creation(definition: ConfigDef, props: Mapping[str, str]) -> ConfigDef:
    groups = parse_aliases(props, "topic.creation.groups")
    if not groups and not any(name.startswith("topic.creation.default.") for name in props):
        return definition
    for alias in dict.fromkeys([*groups, DEFAULT_GROUP]):
        fallback = alias == DEFAULT_GROUP
        prefix = f"topic.creation.{alias}."
        group = _Group(definition, f"{TOPIC_CREATION}: {alias}")
        group.add(
            prefix + "include",
            Type.LIST,
            ".*" if fallback else NO_DEFAULT,
            LOW,
            f"{alias} inclusion",
            Width.LONG,
            "Regular expressions of the topics in this group.",
            _validate_regexes,
        )
        group.add(
            prefix + "exclude",
            Type.LIST,
            "",
            LOW,
            f"{alias} exclusion",
            Width.LONG,
            "Regular expressions of topics that are not in this group. They take precedence over include.",
            _validate_regexes,
        )
        inherited = NO_DEFAULT if fallback else None
        group.add(
            prefix + "replication.factor",
            Type.SHORT,
            inherited,
            LOW,
            f"{alias} replication factor",
            Width.LONG,
            "Replication factor of new topics. -1: the broker's default.",
            _validate_unless_none(_replicas_or_default),
        )
        group.add(
            prefix + "partitions",
            Type.INT,
            inherited,
            LOW,
            f"{alias} partitions",
            Width.LONG,
            "Number of partitions of new topics. -1: the broker's default.",
            _validate_unless_none(_replicas_or_default),
        )
    return definition


def validate_unique_aliases(name: str, value: Any) -> None:
    """Validate that the aliases in a setting, such as `transforms`, are unique. Accepts null."""
    if value and len(set(value)) < len(value):
        raise invalid(name, value, "Duplicate alias provided.")


def _validate_unless_none(validator: Validator) -> Validator:
    return lambda name, value: None if value is None else validator(name, value)


def _replicas_or_default(name: str, value: Any) -> None:
    if value != -1:
        at_least(1)(name, value)


def _validate_regexes(name: str, value: Any) -> None:
    for item in value or ():
        regex(name, item)


def connector_definition(
    plugin: type[Connector], plugins: Plugins, props: Mapping[str, str], worker: Mapping[str, Any]
) -> ConfigDef:
    """Return the definition of one connector's common settings, with those of its transforms and predicates.

    The default converters are the worker's.
    """
    base = sink_config() if issubclass(plugin, SinkConnector) else source_config(props)
    defaults: dict[str, Any] = {"connector.plugin.version": plugin_version(plugin)}
    for name in CONVERTER_KINDS:
        defaults[name] = worker[name]
        defaults[f"{name}.plugin.version"] = CONNECT_VERSION
    definition = ConfigDef(_with_installed_plugins(base.with_defaults(defaults), plugins, props))
    for chain, kind in CHAINS.items():
        _define_transform_settings(definition, chain, kind, plugins, props)
    return definition


def _with_installed_plugins(definition: ConfigDef, plugins: Plugins, props: Mapping[str, str]) -> list[ConfigKey]:
    """Return the settings with recommended converters and versions, and with validators of the connector's own
    converters."""
    keys = []
    for key in definition:
        if key.name in CONVERTER_KINDS:
            kind = CONVERTER_KINDS[key.name]
            names = [desc.name for desc in plugins.of_kind(kind)]
            validator = _validate_plugin_kind(plugins, kind) if key.name in props else None
            key = replace(key, recommender=_recommend_values(names), validator=validator)
        elif key.name.endswith("plugin.version"):
            key = replace(key, recommender=_recommend_values([key.default]))
        keys.append(key)
    return keys


def _recommend_values(values: list[Any]) -> Recommender:
    return Recommender(lambda _name, _values: values)


def _define_transform_settings(
    definition: ConfigDef, chain: str, kind: str, plugins: Plugins, props: Mapping[str, str]
) -> None:
    """Add to a connector's settings those of each transform or predicate that it names. Each gets its own group."""
    singular = chain.removesuffix("s").capitalize()
    for alias in dict.fromkeys(parse_aliases(props, chain)):
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
        if value is not None and value not in parse_aliases(props, "predicates"):
            raise invalid(name, value, "Predicate is not listed in 'predicates'.")

    return check_predicate_name
