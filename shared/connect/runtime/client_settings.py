"""Translates the Java clients' properties in worker and connector configurations to the settings of Penstock's clients.

`security.protocol` becomes `security_protocol`, and so on. User and password are read from `sasl.jaas.config`. A
truststore must be a PEM file, and a keystore a PEM file with the key and its certificates. Of the classes in
`partition.assignment.strategy` the first one is used. Properties without a counterpart are left out.
`unknown_properties` returns those that deserve a warning.

>>> props = {"bootstrap.servers": "a:9092", "metric.reporters": "1"}
>>> kafka_settings(props).bootstrap_servers, unknown_properties(props)
('a:9092', ['metric.reporters'])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from penstock.shared.clients.consumer import ConsumerSettings
from penstock.shared.clients.producer import ProducerSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import KafkaSettings, Section

S = TypeVar("S", bound=Section)

RENAMED = {
    "ssl.truststore.location": "ssl_cafile",
    "ssl.keystore.location": "ssl_certfile",
}
PEM_TEXTS = {
    "ssl.keystore.key": "ssl.keystore.location",
    "ssl.keystore.certificate.chain": "ssl.keystore.location",
    "ssl.truststore.certificates": "ssl.truststore.location",
}
"""Properties with PEM text, and for each one the property that names a file instead."""
GROUP_ID_OVERRIDE = "consumer.override.group.id"
WITHOUT_COUNTERPART = {
    *("key.serializer", "value.serializer", "key.deserializer", "value.deserializer", "enable.auto.commit"),
    *("ssl.truststore.type", "ssl.keystore.type", "sasl.jaas.config", "allow.auto.create.topics"),
}
"""Properties that need no warning: they have no effect here, or are read elsewhere."""
PRINCIPAL = ("security.protocol", "sasl.jaas.config", "sasl.mechanism")
"""The client settings that the override policy Principal allows."""
ASSIGNORS = {
    "RangeAssignor": "range",
    "RoundRobinAssignor": "roundrobin",
    "StickyAssignor": "sticky",
    "CooperativeStickyAssignor": "cooperative-sticky",
}
"""The classes of Java's `partition.assignment.strategy`, and our names of these strategies."""
JAAS = re.compile(r"""(\w+)\s*=\s*(?:(["'])((?:\\.|(?!\2)[^\\])*)\2|([^\s;]+))""")
_JAAS_ESCAPE = re.compile(r"\\(?:([0-3][0-7]{0,2}|[4-7][0-7]?)|(.))")
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def kafka_settings(props: Mapping[str, Any]) -> KafkaSettings:
    """Return the connection settings.

    Raises ConfigError, which names the setting, if one is invalid, or has PEM text in place of a file.
    """
    fields = {}
    if jaas := props.get("sasl.jaas.config"):
        given = {name: _unescape_jaas(quoted) or plain for name, _, quoted, plain in JAAS.findall(str(jaas))}
        fields = {f"sasl_{name}": given[name] for name in ("username", "password") if name in given}
    return _client_settings_of_props(KafkaSettings, props, fields)


def _unescape_jaas(quoted: str) -> str:
    """Return a quoted value of `sasl.jaas.config` as Java's StreamTokenizer reads it."""

    def unescape_character(match: re.Match[str]) -> str:
        return chr(int(match[1], 8)) if match[1] else _ESCAPED.get(match[2], match[2])

    return _JAAS_ESCAPE.sub(unescape_character, quoted)


def producer_settings(props: Mapping[str, Any], **fixed: Any) -> ProducerSettings:
    """Return a producer's settings. `fixed` settings take precedence over the properties."""
    return _client_settings_of_props(ProducerSettings, props, fixed)


def consumer_settings(props: Mapping[str, Any], **fixed: Any) -> ConsumerSettings:
    """Return a consumer's settings. `fixed` settings take precedence over the properties."""
    return _client_settings_of_props(ConsumerSettings, props, fixed)


def sink_group_id(connector: str, config: Mapping[str, str]) -> str:
    """Return the `group.id` of the consumers of a sink connector's tasks. An empty override is ignored."""
    return config.get(GROUP_ID_OVERRIDE) or f"connect-{connector}"


def rejected_overrides(policy: str, overrides: Iterable[str]) -> list[str]:
    """Return the client settings that `connector.client.config.override.policy` does not let a connector override.

    >>> rejected_overrides("Principal", ["sasl.jaas.config", "max.poll.records"])
    ['max.poll.records']
    """
    kind = policy.lower()
    if kind == "all":
        return []
    return [name for name in overrides if kind == "none" or name not in PRINCIPAL]


def unknown_properties(props: Mapping[str, Any]) -> list[str]:
    """Return the names of the properties that no client has a setting for, except those in WITHOUT_COUNTERPART."""
    known = {*KafkaSettings.model_fields, *ProducerSettings.model_fields, *ConsumerSettings.model_fields}
    return [name for name in props if _settings_field_name(name) not in known and name not in WITHOUT_COUNTERPART]


def _settings_field_name(name: str) -> str:
    return RENAMED.get(name, name.replace(".", "_"))


def _client_settings_of_props(section: type[S], props: Mapping[str, Any], fixed: Mapping[str, Any]) -> S:
    for name, location in PEM_TEXTS.items():
        if props.get(name):
            raise ConfigError(f"{name} is not supported: write the PEM text to a file, and set {location}")
    given = {_settings_field_name(name): value for name, value in props.items() if value is not None}
    if (strategy := given.get("partition_assignment_strategy")) is not None:
        first = str(strategy).partition(",")[0].strip()
        given["partition_assignment_strategy"] = ASSIGNORS.get(first.rpartition(".")[2], first)
    return section(**{name: value for name, value in given.items() if name in section.model_fields} | dict(fixed))
