"""Settings of connectors, compared with the responses of a real Kafka Connect, of their clients, and of workers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.connectors.file_stream import FileStreamSourceConnector
from penstock.shared.connect.connectors.http import HttpSinkConnector
from penstock.shared.connect.runtime.client_settings import (
    consumer_settings,
    kafka_settings,
    producer_settings,
    sink_group_id,
    unknown_properties,
)
from penstock.shared.connect.runtime.config_validation import plugin_definitions, validate_connector
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker_config import WORKER_ONLY, StandaloneConfig, WorkerConfig, worker_config
from tests.shared.connect.harness import Store
from tests.shared.connect.recordings import recorded_requests

FREE = ("documentation", "recommended_values")  # our own texts, and lists of plugins

STANDALONE = {
    "bootstrap.servers": "a:9092",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
}
WORKER = worker_config().parse({**STANDALONE, "connect.files.allowed": "/"})


def without_free_members(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_free_members(item) for name, item in value.items() if name not in FREE}
    return [without_free_members(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.installed()


def test_validation_equals_the_recording(plugins: Plugins) -> None:
    """Every recorded validation has the same settings, values, errors, groups and order."""
    cases = [
        line for line in recorded_requests() if line.get("path", "").endswith("/validate") and line["status"] == 200
    ]
    assert len(cases) == 2
    for case in cases:
        found = validate_connector(plugins, case["body"], WORKER).as_json()
        assert without_free_members(found) == without_free_members(case["response"])


def test_definitions_equal_the_recording(plugins: Plugins) -> None:
    """A connector's settings are listed as in Kafka Connect: its own, and then the common ones."""
    (case,) = [line for line in recorded_requests() if line.get("path") == "/connector-plugins/FileStreamSink/config"]
    assert without_free_members(plugin_definitions(*plugins.config_of("FileStreamSink"))) == without_free_members(
        case["response"]
    )


def test_validation_errors_equal_the_recording(plugins: Plugins) -> None:
    """An invalid connector config has Kafka Connect's error message."""
    cases = [
        line
        for line in recorded_requests()
        if line.get("path") == "/connectors" and str(line.get("response", {})).count("contains the following")
    ]
    assert len(cases) == 4
    for case in cases:
        props = {"name": case["body"]["name"], **case["body"]["config"]}
        assert validate_connector(plugins, props, WORKER).error_message() == case["response"]["message"]


def test_settings_of_transforms_are_validated(plugins: Plugins) -> None:
    """The settings of a named transform are validated, in a group of their own. An empty predicate is unknown."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", "transforms": "one"}
    infos = validate_connector(plugins, {**props, "transforms.one.type": "no.Such"}, WORKER)
    assert "Transforms: one" in infos.groups
    assert "no.Such for configuration transforms.one.type" in infos.errors[0]
    flatten = {"transforms.one.type": "org.apache.kafka.connect.transforms.Flatten$Value"}
    (error,) = validate_connector(plugins, {**props, **flatten, "transforms.one.predicate": ""}, WORKER).errors
    assert "transforms.one.predicate" in error


def test_a_sink_reads_topics_or_a_pattern(plugins: Plugins) -> None:
    """A sink without topics, with topics and a pattern, or with its own dead-letter topic is invalid."""
    base = {"connector.class": "FileStreamSink", "name": "x"}

    def errors(**more: str) -> list[str]:
        return validate_connector(plugins, base | {k.replace("_", "."): v for k, v in more.items()}, WORKER).errors

    assert errors() == ["Must configure one of topics or topics.regex"]
    assert len(errors(topics="a", topics_regex="b.*")) == 2
    dlq = "errors.deadletterqueue.topic.name"
    assert "dead-letter" in validate_connector(plugins, base | {"topics": "a,d", dlq: "d"}, WORKER).errors[0]
    assert "dead-letter" in validate_connector(plugins, base | {"topics.regex": "d.*", dlq: "dl"}, WORKER).errors[0]
    assert "must be a regular expression" in errors(topics_regex="(")[0]


def test_required_exactly_once_is_checked(plugins: Plugins) -> None:
    """`exactly.once.support=required` needs the support of the worker and of the connector."""
    props = {"connector.class": "FileStreamSource", "name": "x", "topic": "t", "exactly.once.support": "required"}
    enabled = WORKER | {"exactly.once.source.support": "enabled"}
    assert validate_connector(plugins, props, WORKER).errors == [
        "This worker does not have exactly-once source support enabled."
    ]
    assert validate_connector(plugins, props | {"file": "f"}, enabled).errors == []
    assert "does not support" in validate_connector(plugins, props, enabled).errors[0]  # standard input
    boundary = validate_connector(plugins, props | {"file": "f", "transaction.boundary": "connector"}, enabled)
    assert "boundaries" in boundary.errors[0]


def test_a_declared_support_must_be_of_the_enum(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that returns True for its exactly-once support gets an error that names the type."""
    monkeypatch.setattr(FileStreamSourceConnector, "exactly_once_support", lambda self, props: True)
    props = {"connector.class": "FileStreamSource", "name": "x", "topic": "t", "exactly.once.support": "required"}
    (error,) = validate_connector(plugins, props, WORKER | {"exactly.once.source.support": "enabled"}).errors
    assert re.search("True.*ExactlyOnceSupport", error)


def test_settings_of_topic_creation_groups_are_validated(plugins: Plugins) -> None:
    """Each topic creation group needs its topics, and the default group partitions and a replication factor."""
    props = {"connector.class": "FileStreamSource", "name": "x", "topic": "t", "topic.creation.groups": "a"}
    infos = validate_connector(plugins, props, WORKER)
    assert infos.groups[-2:] == ["Topic Creation: a", "Topic Creation: default"]
    assert len(infos.errors) == 3
    fine = {
        "topic.creation.a.include": "t.*",
        "topic.creation.default.partitions": "-1",
        "topic.creation.default.replication.factor": "0",
    }
    assert validate_connector(plugins, props | fine, WORKER).errors == [
        "Invalid value 0 for configuration topic.creation.default.replication.factor: Value must be at least 1"
    ]


@pytest.mark.parametrize("name", WORKER_ONLY)
def test_worker_only_settings_are_errors(plugins: Plugins, name: str) -> None:
    """A connector config with a setting that only the worker has is invalid."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", name: "false"}
    infos = validate_connector(plugins, props, WORKER)
    assert [config["definition"]["name"] for config in infos.configs if config["value"]["errors"]] == [name]
    assert "setting of the worker" in infos.errors[0]


@pytest.mark.parametrize(
    ("isolation", "worker", "error"),
    [
        ("process", {}, None),
        ("asyncio", {"offset.storage.file.filename": "x"}, None),
        ("process", {"offset.storage.file.filename": "x"}, "needs a distributed worker"),
        ("thread", {}, "Invalid value thread"),
    ],
)
def test_an_isolation_that_the_worker_lacks_is_an_error(
    plugins: Plugins, isolation: str, worker: dict[str, str], error: str | None
) -> None:
    """Process isolation needs a distributed worker, and other values are invalid."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", "penstock.task.isolation": isolation}
    errors = validate_connector(plugins, props, WORKER | worker).errors
    assert len(errors) == (error is not None)
    assert all(error in error_text for error_text in errors if error)


def test_no_response_contains_a_secret(plugins: Plugins) -> None:
    """Validation responses contain no secret as a value or in an error."""
    props = {
        "connector.class": f"{HttpSinkConnector.__module__}.HttpSinkConnector",
        "name": "x",
        "topics": "t",
        "http.url": "http://ann:pl41n@api/x",
        "http.headers": "pl41n",
        "producer.override.ssl.keystore.key": "pl41n",
    }
    infos = validate_connector(plugins, props, WORKER | {"connector.client.config.override.policy": "None"})
    assert infos.errors == [
        "Invalid value [hidden] for configuration http.headers: each header must be Name:value",
        "The 'None' policy does not allow 'ssl.keystore.key' to be overridden in the connector configuration.",
    ]
    assert "pl41n" not in json.dumps(infos.as_json())


def test_without_a_class_nothing_can_be_checked(plugins: Plugins) -> None:
    """A config without a connector class or with an unknown one is a ConfigError."""
    with pytest.raises(ConfigError, match=r"a\.password=\[hidden\].*name=x.*connector type"):
        validate_connector(plugins, {"name": "x", "a.password": "p"}, WORKER)
    with pytest.raises(ConfigError, match=r"no\.such\.Class"):
        validate_connector(plugins, {"connector.class": "no.such.Class"}, WORKER)


def test_overrides_of_clients_are_checked(plugins: Plugins) -> None:
    """Client overrides must be allowed by the worker's policy and have valid values."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t"}
    props |= {"consumer.override.max.poll.records": "5", "consumer.override.sasl.mechanism": "PLAIN"}
    assert validate_connector(plugins, props, WORKER).errors == []
    policy = "connector.client.config.override.policy"
    (error,) = validate_connector(plugins, props, WORKER | {policy: "Principal"}).errors
    assert error.startswith("The 'Principal' policy does not allow 'max.poll.records' to be overridden")
    assert len(validate_connector(plugins, props, WORKER | {policy: "None"}).errors) == 2
    infos = validate_connector(plugins, props | {"consumer.override.max.poll.records": "many"}, WORKER)
    assert [row["value"]["name"] for row in infos.configs if row["value"]["errors"]] == [
        "consumer.override.max.poll.records"
    ]


@pytest.mark.parametrize("override", [{"group.instance.id": "a"}, {"group.id": ""}])
def test_overrides_of_a_sink_are_checked_together_with_its_group(plugins: Plugins, override: dict[str, str]) -> None:
    """A sink's task has a group without an override too, so a static member or an empty group.id is valid."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t"}
    props |= {f"consumer.override.{name}": value for name, value in override.items()}
    assert validate_connector(plugins, props, WORKER).errors == []


def test_settings_of_the_connectors_converters_are_checked(plugins: Plugins) -> None:
    """Settings of a connector's own converter are validated, but not those of the worker's converter."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", "value.converter.schemas.enable": "maybe"}
    assert validate_connector(plugins, props, WORKER).errors == []
    own = {"value.converter": "org.apache.kafka.connect.json.JsonConverter"}
    (error,) = validate_connector(plugins, props | own, WORKER).errors
    assert "maybe for configuration schemas.enable" in error


@pytest.mark.parametrize(
    ("setting", "plugin"),
    [
        ("value.converter", "FileStreamSinkConnector"),
        ("value.converter", "SimpleHeaderConverter"),
        ("header.converter", "Filter"),
    ],
)
def test_a_converter_of_another_kind_is_an_error(plugins: Plugins, setting: str, plugin: str) -> None:
    """A plugin of another kind is no converter: a connector, a header converter for values, or a transform."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", setting: plugin}
    (error,) = validate_connector(plugins, props, WORKER).errors
    assert f"{plugin} is not a " in error


def test_names_are_java_names_with_underscores() -> None:
    """Each client takes the properties that it has a setting for."""
    props = {"bootstrap.servers": "a:1", "linger.ms": "7", "auto.offset.reset": "earliest", "acks": "all"}
    assert kafka_settings(props).bootstrap_servers == "a:1"
    assert producer_settings(props).linger_ms == 7
    assert consumer_settings(props, group_id="connect-x").auto_offset_reset == "earliest"
    assert consumer_settings(props, group_id="connect-x").group_id == "connect-x"


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ("org.apache.kafka.clients.consumer.CooperativeStickyAssignor", "cooperative-sticky"),
        ("org.apache.kafka.clients.consumer.RangeAssignor, a.b.CooperativeStickyAssignor", "range"),
        ("sticky", "sticky"),
    ],
)
def test_the_assignment_strategy_is_the_first_class(given: str, strategy: str) -> None:
    """`partition.assignment.strategy` is Java's list of classes, of which the first one is used, or our name."""
    settings = consumer_settings({"partition.assignment.strategy": given}, group_id="connect-x")
    assert settings.partition_assignment_strategy == strategy


def test_credentials_come_from_jaas() -> None:
    """User and password are read from `sasl.jaas.config`, quoted or not."""
    jaas = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="ann" password=s3cret;'
    props = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.jaas.config": jaas}
    kafka = kafka_settings(props)
    assert kafka.sasl_username == "ann"
    assert kafka.sasl_password is not None
    assert kafka.sasl_password.get_secret_value() == "s3cret"
    assert unknown_properties(props) == []


@pytest.mark.parametrize(
    ("quoted", "password"),
    [
        (r'"a\"b\\c; d"', 'a"b\\c; d'),
        (r"'a\'b\"c\\'", "a'b\"c\\"),
        (r'"it\'s 100\%\t\41\1411"', "it's 100%\t!a1"),
    ],
)
def test_quoted_credentials_are_unescaped(quoted: str, password: str) -> None:
    """A quoted value of `sasl.jaas.config` is in double or single quotes, with Java's escapes."""
    jaas = f"org.apache.kafka.common.security.plain.PlainLoginModule required password={quoted} username='ann';"
    kafka = kafka_settings({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.jaas.config": jaas})
    assert kafka.sasl_password is not None
    assert (kafka.sasl_username, kafka.sasl_password.get_secret_value()) == ("ann", password)


def test_a_keystore_is_a_pem_file() -> None:
    """As in Java, a PEM keystore is one file with key and certificates. PEM text in a setting is an error."""
    props = {"security.protocol": "SSL", "ssl.keystore.type": "PEM"}
    stored = {**props, "ssl.keystore.location": "/x/client.pem", "ssl.key.password": "s3cret"}
    kafka = kafka_settings(stored)
    assert (str(kafka.ssl_certfile), kafka.ssl_keyfile) == ("/x/client.pem", None)
    assert unknown_properties(stored) == []
    text = {"ssl.keystore.certificate.chain": "-----BEGIN CERTIFICATE-----", "ssl.keystore.key": "-----BEGIN PRIV"}
    with pytest.raises(ConfigError, match=r"ssl\.keystore\.key .*ssl\.keystore\.location") as raised:
        kafka_settings({**props, **text})
    assert "BEGIN" not in str(raised.value)


def test_invalid_values_are_named() -> None:
    """An invalid property is a ConfigError that names it."""
    with pytest.raises(ConfigError, match="linger_ms"):
        producer_settings({"linger.ms": "soon"})


def test_unknown_properties_are_listed() -> None:
    """Properties without an equivalent are listed, except those that may be ignored silently."""
    props = {"metric.reporters": "1", "key.serializer": "x", "linger.ms": "1"}
    assert unknown_properties(props) == ["metric.reporters"]


def test_a_sink_reads_in_its_own_group() -> None:
    """A sink's group is named after the connector, unless its config overrides it."""
    assert sink_group_id("snk", {}) == "connect-snk"
    assert sink_group_id("snk", {"consumer.override.group.id": "g"}) == "g"
    assert sink_group_id("snk", {"consumer.override.group.id": ""}) == "connect-snk"


def test_clients_of_tasks_have_ids_of_their_own(plugins: Plugins) -> None:
    """As in Kafka Connect, the worker's `client.id` does not name its tasks' clients. `consumer.client.id` does, and
    the connector's override counts before it. The worker's other client settings apply to the tasks' clients.
    """
    config = WorkerConfig(
        STANDALONE
        | {"client.id": "worker", "consumer.client.id": "consumers", "security.protocol": "SSL", "linger.ms": "1"}
        | {"producer.linger.ms": "2"}
    )
    factory = TaskFactory(config, plugins, Store())
    id = ConnectorTaskId("snk", 0)
    producer = factory.client_props(id, "producer", {})
    assert producer["client.id"] == "connector-producer-snk-0"
    assert (producer["security.protocol"], producer["linger.ms"]) == ("SSL", "2")
    assert factory.client_props(id, "admin", {})["client.id"] == "connector-admin-snk-0"
    assert factory.client_props(id, "consumer", {})["client.id"] == "consumers"
    assert factory.client_props(id, "consumer", {"consumer.override.client.id": "own"})["client.id"] == "own"
    assert config.kafka.client_id == "worker"


def test_standalone_needs_a_file() -> None:
    """A standalone worker requires an offset file."""
    with pytest.raises(ConfigError, match=r"offset\.storage\.file\.filename"):
        StandaloneConfig(STANDALONE)
    StandaloneConfig(STANDALONE | {"offset.storage.file.filename": "x"})


def test_standalone_workers_have_no_processes() -> None:
    """A standalone worker rejects process isolation, since one process uses its offset file."""
    with pytest.raises(ConfigError, match=r"penstock\.task\.isolation"):
        StandaloneConfig(STANDALONE | {"offset.storage.file.filename": "x", "penstock.task.isolation": "process"})
