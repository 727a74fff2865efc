"""The settings that every connector has: Kafka Connect's names, types, defaults, groups and order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.shared.connect.config_def import (
    NO_DEFAULT,
    ConfigDef,
    ConfigValue,
    Importance,
    Type,
    Width,
    at_least,
    one_of,
)
from penstock.shared.connect.config_types import Validator, non_empty_without_control_characters, regex, unique_items

COMMON, TRANSFORMS, PREDICATES, ERRORS = "Common", "Transforms", "Predicates", "Error Handling"
TOPIC_CREATION, EXACTLY_ONCE, OFFSETS_TOPIC = "Topic Creation", "Exactly Once Support", "offsets.topic"
DEFAULT_GROUP = "default"

HIGH, MEDIUM, LOW = Importance.HIGH, Importance.MEDIUM, Importance.LOW

CONVERTER_TEXT = (
    "Turns {what} into bytes and back. Any connector works with any converter. Not given: the worker's own."
)
VERSION_TEXT = "The version of the {what}; only the installed one can be asked for."


class _Group:
    """Defines one group's settings, with rising order."""

    def __init__(self, definition: ConfigDef, group: str, order: int = 0) -> None:
        self._definition, self._group, self._order = definition, group, order

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
        "The connector's name, unique in its cluster.", non_empty_without_control_characters)
    common.add("connector.class", Type.STRING, NO_DEFAULT, HIGH, "Connector class", Width.LONG,
        "The connector's class: its full name, the name of Kafka's class that it stands for, an entry point of "
        "the group penstock.connectors, or the class's name with or without `Connector` at its end.")
    common.add("connector.plugin.version", Type.STRING, None, MEDIUM, "Connector version", Width.MEDIUM,
        VERSION_TEXT.format(what="connector"))
    common.add("tasks.max", Type.INT, 1, HIGH, "Tasks max", Width.SHORT,
        "The most tasks that the work is divided into.", at_least(1))
    common.add("tasks.max.enforce", Type.BOOLEAN, True, LOW, "Enforce tasks max", Width.SHORT,
        "Whether a connector that makes more tasks than tasks.max fails, and so do tasks beyond it. "
        "Kafka Connect has deprecated it.")
    for which, shown in (("key", "Key converter"), ("value", "Value converter"), ("header", "Header converter")):
        what = {"key": "keys", "value": "values", "header": "the values of headers"}[which]
        common.add(f"{which}.converter", Type.CLASS, None, LOW, f"{shown} class", Width.SHORT,
            CONVERTER_TEXT.format(what=what))
        common.add(f"{which}.converter.plugin.version", Type.STRING, None, LOW, f"{shown} version", Width.SHORT,
            VERSION_TEXT.format(what=shown.lower()))
    common.add("transforms", Type.LIST, "", LOW, "Transforms", Width.LONG,
        "Names of the transforms that each record goes through, in this order; each is set by "
        "transforms.<name>.type and its own settings.", unique_items, group=TRANSFORMS)
    common.add("predicates", Type.LIST, "", LOW, "Predicates", Width.LONG,
        "Names of the predicates that transforms may be bound to; each is set by predicates.<name>.type.",
        unique_items, group=PREDICATES)
    common.add("config.action.reload", Type.STRING, "restart", LOW, "Reload Action", Width.MEDIUM,
        "What happens when a config provider says that a value it gave has run out: restart the connector, or none.",
        one_of("none", "restart", ignore_case=True))
    _errors(_Group(definition, ERRORS))
    return definition


def _errors(errors: _Group) -> None:
    errors.add("errors.retry.timeout", Type.LONG, 0, MEDIUM, "Retry Timeout for Errors", Width.MEDIUM,
        "For how many ms a failed operation is tried again: 0 not at all, -1 without end.", at_least(-1))
    errors.add("errors.retry.delay.max.ms", Type.LONG, 60_000, MEDIUM, "Maximum Delay Between Retries for Errors",
        Width.MEDIUM, "The longest wait between two tries, in ms; from there on it is jittered.", at_least(0))
    errors.add("errors.tolerance", Type.STRING, "none", MEDIUM, "Error Tolerance", Width.SHORT,
        "none: the first error that retries do not mend fails the task. all: the record is skipped.",
        one_of("none", "all", ignore_case=True))
    errors.add("errors.log.enable", Type.BOOLEAN, False, MEDIUM, "Log Errors", Width.SHORT,
        "Whether each error is logged with what failed, and not only those that fail the task.")
    errors.add("errors.log.include.messages", Type.BOOLEAN, False, MEDIUM, "Log Error Details", Width.SHORT,
        "Whether the log says which record it was: topic, partition, offset and timestamp of a sink's, all but "
        "the payload's bytes of a source's.")


def sink_config() -> ConfigDef:
    """The settings of every sink (org.apache.kafka.connect.runtime.SinkConnectorConfig)."""
    definition = common_config()
    common = _Group(definition, COMMON)
    common.add("topics", Type.LIST, "", HIGH, "Topics", Width.LONG, "The topics to read, comma-separated.", order=4)
    common.add("topics.regex", Type.STRING, "", HIGH, "Topics regex", Width.LONG,
        "Read every topic whose whole name matches, a Python regular expression; either this or topics.", regex,
        order=4)
    errors = _Group(definition, ERRORS, 5)
    errors.add("errors.deadletterqueue.topic.name", Type.STRING, "", MEDIUM, "Dead Letter Queue Topic Name",
        Width.MEDIUM, "Where records go that could not be converted, transformed or written; empty: nowhere.")
    errors.add("errors.deadletterqueue.topic.replication.factor", Type.SHORT, 3, MEDIUM,
        "Dead Letter Queue Topic Replication Factor", Width.MEDIUM,
        "With how many replicas that topic is made where it does not exist.")
    errors.add("errors.deadletterqueue.context.headers.enable", Type.BOOLEAN, False, MEDIUM,
        "Enable Error Context Headers", Width.MEDIUM,
        "Whether a dead letter's headers say why it is one: __connect.errors.*, after its own.")
    return definition


def source_config(props: Mapping[str, str] | None = None) -> ConfigDef:
    """The settings of every source (SourceConnectorConfig), with those of the topic creation groups in `props`."""
    definition = common_config()
    creation = _Group(definition, TOPIC_CREATION)
    creation.add("topic.creation.groups", Type.LIST, "", LOW, "Topic Creation Groups", Width.LONG,
        "Names of groups of topics that are made with settings of their own; the first that matches counts, "
        "then the group default.", unique_items)
    once = _Group(definition, EXACTLY_ONCE, 1)
    once.add("exactly.once.support", Type.STRING, "requested", MEDIUM, "Exactly once support", Width.SHORT,
        "required: refuse the connector unless it says that it supports exactly-once and the worker has it "
        "switched on. requested: rely on the connector's own documentation.",
        one_of("requested", "required", ignore_case=True))
    once.add("transaction.boundary", Type.STRING, "poll", MEDIUM, "Transaction Boundary", Width.SHORT,
        "poll: a transaction for each batch. interval: one for each transaction.boundary.interval.ms. connector: "
        "the task says where.", one_of("poll", "interval", "connector", ignore_case=True))
    once.add("transaction.boundary.interval.ms", Type.LONG, None, LOW, "Transaction boundary interval", Width.SHORT,
        "The length of a transaction under transaction.boundary=interval, in ms; not given: the worker's "
        "offset.flush.interval.ms.", _optional(at_least(0)))
    _Group(definition, OFFSETS_TOPIC).add("offsets.storage.topic", Type.STRING, None, LOW, "Offsets topic", Width.LONG,
        "A topic of its own for this connector's offsets; not given: the worker's. Distributed workers alone use it.",
        _optional(non_empty_without_control_characters))
    return _with_topic_creation(definition, props or {})
# fmt: on
def _with_topic_creation(definition: ConfigDef, props: Mapping[str, str]) -> ConfigDef:
    groups = [name.strip() for name in props.get("topic.creation.groups", "").split(",") if name.strip()]
    if not groups and not any(name.startswith("topic.creation.default.") for name in props):
        return definition
    for alias in dict.fromkeys([*groups, DEFAULT_GROUP]):
        fallback = alias == DEFAULT_GROUP
        prefix, group = f"topic.creation.{alias}.", _Group(definition, f"{TOPIC_CREATION}: {alias}")
        group.add(
            prefix + "include",
            Type.LIST,
            ".*" if fallback else NO_DEFAULT,
            LOW,
            f"{alias} inclusion",
            Width.LONG,
            "Regular expressions of the topics in the group.",
            _all_regex,
        )
        group.add(
            prefix + "exclude",
            Type.LIST,
            "",
            LOW,
            f"{alias} exclusion",
            Width.LONG,
            "Regular expressions of topics that are not in it; they outweigh include.",
            _all_regex,
        )
        inherited = NO_DEFAULT if fallback else None
        group.add(
            prefix + "replication.factor",
            Type.SHORT,
            inherited,
            LOW,
            f"{alias} replication factor",
            Width.LONG,
            "Replicas of a new topic; -1: the broker's default.",
            _optional(_replicas_or_default),
        )
        group.add(
            prefix + "partitions",
            Type.INT,
            inherited,
            LOW,
            f"{alias} partitions",
            Width.LONG,
            "Partitions of a new topic; -1: the broker's default.",
            _optional(_replicas_or_default),
        )
    return definition


def _optional(validator: Validator) -> Validator:
    return lambda name, value: None if value is None else validator(name, value)


def _replicas_or_default(name: str, value: Any) -> None:
    if value != -1:
        at_least(1)(name, value)


def _all_regex(name: str, value: Any) -> None:
    for item in value or ():
        regex(name, item)


def check_sink_topics(values: Mapping[str, ConfigValue]) -> None:
    """Adds the errors of topics, topics.regex and the dead-letter topic, taken together, to their values."""
    topics, pattern = values["topics"], values["topics.regex"]
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
