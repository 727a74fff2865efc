"""Validation of connector configurations: equal to what a real Kafka Connect answered."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.connect.connectors.http import HttpSinkConnector
from penstock.shared.connect.errors import ConfigError
from penstock.shared.connect.runtime.config_validation import plugin_definitions, validate_connector
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.worker_config import WORKER_ONLY

RECORDING = Path(__file__).parents[3] / "data" / "kafka_connect_rest.jsonl.gz"
WORKER = {"connect.files.allowed": ["/"]}
FREE = ("documentation", "recommended_values")  # our own words; lists of plugins


def recorded() -> list[dict[str, Any]]:
    with gzip.open(RECORDING, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def without_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_words(item) for name, item in value.items() if name not in FREE}
    return [without_words(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.installed()


def test_validation_equals_the_recording(plugins: Plugins) -> None:
    """Every recorded validation gives the same settings, values, errors, groups and order."""
    cases = [line for line in recorded() if line.get("path", "").endswith("/validate") and line["status"] == 200]
    assert len(cases) == 2
    for case in cases:
        found = validate_connector(plugins, case["body"], WORKER).as_json()
        assert without_words(found) == without_words(case["response"])


def test_definitions_equal_the_recording(plugins: Plugins) -> None:
    """A connector's settings are listed as Kafka Connect lists them: its own, then the common ones."""
    (case,) = [line for line in recorded() if line.get("path") == "/connector-plugins/FileStreamSink/config"]
    assert without_words(plugin_definitions(*plugins.config_of("FileStreamSink"))) == without_words(case["response"])


def test_refusals_equal_the_recording(plugins: Plugins) -> None:
    """A connector that is refused for its settings is refused in the recorded words."""
    cases = [
        line
        for line in recorded()
        if line.get("path") == "/connectors" and str(line.get("response", {})).count("contains the following")
    ]
    assert len(cases) == 4
    for case in cases:
        props = {"name": case["body"]["name"], **case["body"]["config"]}
        assert validate_connector(plugins, props, WORKER).refusal() == case["response"]["message"]


def test_transforms_bring_their_settings(plugins: Plugins) -> None:
    """A transform that a configuration names has its settings checked, in a group of its own."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", "transforms": "one"}
    infos = validate_connector(plugins, {**props, "transforms.one.type": "no.Such"}, {})
    assert "Transforms: one" in infos.groups
    assert "Invalid value no.Such for configuration transforms.one.type" in infos.errors[0]


def test_a_sink_reads_topics_or_a_pattern(plugins: Plugins) -> None:
    """A sink without topics, with both kinds, or that reads its own dead letters is refused."""
    base = {"connector.class": "FileStreamSink", "name": "x"}

    def errors(**more: str) -> list[str]:
        return validate_connector(plugins, base | {k.replace("_", "."): v for k, v in more.items()}, {}).errors

    assert errors() == ["Must configure one of topics or topics.regex"]
    assert len(errors(topics="a", topics_regex="b.*")) == 2
    dlq = "errors.deadletterqueue.topic.name"
    assert "dead-letter" in validate_connector(plugins, base | {"topics": "a,d", dlq: "d"}, {}).errors[0]
    assert "dead-letter" in validate_connector(plugins, base | {"topics.regex": "d.*", dlq: "dl"}, {}).errors[0]
    assert "no regular expression" in errors(topics_regex="(")[0]


def test_required_exactly_once_is_checked(plugins: Plugins) -> None:
    """`exactly.once.support=required` needs the worker's support and the connector's word."""
    props = {"connector.class": "FileStreamSource", "name": "x", "topic": "t", "exactly.once.support": "required"}
    enabled = {**WORKER, "exactly.once.source.support": "enabled"}
    assert validate_connector(plugins, props, {}).errors == [
        "This worker does not have exactly-once source support enabled."
    ]
    assert validate_connector(plugins, props | {"file": "f"}, enabled).errors == []
    assert "does not support" in validate_connector(plugins, props, enabled).errors[0]  # standard input
    boundary = validate_connector(plugins, props | {"file": "f", "transaction.boundary": "connector"}, enabled)
    assert "boundaries" in boundary.errors[0]


def test_topic_creation_groups_bring_their_settings(plugins: Plugins) -> None:
    """Each topic creation group must say which topics it has; the default one how many partitions."""
    props = {"connector.class": "FileStreamSource", "name": "x", "topic": "t", "topic.creation.groups": "a"}
    infos = validate_connector(plugins, props, {})
    assert infos.groups[-2:] == ["Topic Creation: a", "Topic Creation: default"]
    assert len(infos.errors) == 3
    fine = {
        "topic.creation.a.include": "t.*",
        "topic.creation.default.partitions": "-1",
        "topic.creation.default.replication.factor": "0",
    }
    assert validate_connector(plugins, props | fine, {}).errors == [
        "Invalid value 0 for configuration topic.creation.default.replication.factor: Value must be at least 1"
    ]


@pytest.mark.parametrize("name", WORKER_ONLY)
def test_settings_of_the_worker_alone_are_refused(plugins: Plugins, name: str) -> None:
    """A connector that sets what only the worker has would be as if it had not: it is told so."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", name: "false"}
    infos = validate_connector(plugins, props, {})
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
    """A standalone worker has no processes, and nothing else than a process isolates."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", "penstock.task.isolation": isolation}
    errors = validate_connector(plugins, props, worker).errors
    assert len(errors) == (error is not None)
    assert all(error in said for said in errors if error)


def test_no_answer_has_a_secret(plugins: Plugins) -> None:
    """Neither as a value nor within an error: headers, passwords of URLs, keys in PEM, what the policy refuses."""
    props = {
        "connector.class": f"{HttpSinkConnector.__module__}.HttpSinkConnector",
        "name": "x",
        "topics": "t",
        "http.url": "http://ann:pl41n@api/x",
        "http.headers": "pl41n",
        "producer.override.ssl.keystore.key": "pl41n",
    }
    infos = validate_connector(plugins, props, {"connector.client.config.override.policy": "None"})
    assert infos.errors == [
        "Invalid value [hidden] for configuration http.headers: each header is Name:value",
        "The 'None' policy does not allow 'ssl.keystore.key' to be overridden in the connector configuration.",
    ]
    assert "pl41n" not in json.dumps(infos.as_json())


def test_without_a_class_nothing_can_be_checked(plugins: Plugins) -> None:
    """A configuration that names no connector, or none that exists, is refused as a whole."""
    with pytest.raises(ConfigError, match=r"config {a.password=\[hidden\], name=x} contains no connector type"):
        validate_connector(plugins, {"name": "x", "a.password": "p"}, {})
    with pytest.raises(ConfigError, match="Failed to find any class that implements Connector"):
        validate_connector(plugins, {"connector.class": "no.such.Class"}, {})


def test_overrides_of_clients_are_checked(plugins: Plugins) -> None:
    """What the worker's policy does not allow, and what is no value of the client's setting."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t"}
    props |= {"consumer.override.max.poll.records": "5", "consumer.override.sasl.mechanism": "PLAIN"}
    assert validate_connector(plugins, props, {}).errors == []
    policy = {"connector.client.config.override.policy": "Principal"}
    (error,) = validate_connector(plugins, props, policy).errors
    assert error.startswith("The 'Principal' policy does not allow 'max.poll.records' to be overridden")
    assert len(validate_connector(plugins, props, {"connector.client.config.override.policy": "None"}).errors) == 2
    infos = validate_connector(plugins, props | {"consumer.override.max.poll.records": "many"}, {})
    assert [row["value"]["name"] for row in infos.configs if row["value"]["errors"]] == [
        "consumer.override.max.poll.records"
    ]


def test_settings_of_the_connectors_converters_are_checked(plugins: Plugins) -> None:
    """Those of a converter of its own; the worker's are the worker's."""
    props = {"connector.class": "FileStreamSink", "name": "x", "topics": "t", "value.converter.schemas.enable": "maybe"}
    assert validate_connector(plugins, props, {}).errors == []
    own = {"value.converter": "org.apache.kafka.connect.json.JsonConverter"}
    (error,) = validate_connector(plugins, props | own, {}).errors
    assert "Invalid value maybe for configuration schemas.enable" in error
