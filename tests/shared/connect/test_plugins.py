"""Plugins: what a class may be called."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from penstock.shared.connect.connectors.file import FileStreamSinkConnector, FileStreamSourceConnector
from penstock.shared.connect.errors import ConfigError, ConnectorNotFound
from penstock.shared.connect.plugins import Plugins, class_name, connector_type

PATH = "penstock.shared.connect.connectors.file.FileStreamSinkConnector"


@pytest.mark.parametrize(
    "name",
    [
        "FileStreamSink",
        "FileStreamSinkConnector",
        "org.apache.kafka.connect.file.FileStreamSinkConnector",
        PATH,
        "penstock.shared.connect.connectors.file:FileStreamSinkConnector",
        "to-file",
    ],
)
def test_a_connector_has_many_names(name: str) -> None:
    """Kafka's name, its short forms, the class path and an entry point's name all mean the class."""
    assert Plugins([("to-file", FileStreamSinkConnector)]).connector_class(name) is FileStreamSinkConnector


def test_a_class_path_needs_no_registration() -> None:
    """A class that can be imported is a plugin; one of another kind is not."""
    assert Plugins([]).connector_class(PATH) is FileStreamSinkConnector
    for name in (
        "penstock.shared.connect.connectors.file.FileStreamSinkTask",
        "no.such.Class",
        "os.path",
        "..",
        "",
        "a b.C",
    ):
        with pytest.raises(ConfigError, match="Failed to find any class that implements Connector"):
            Plugins([]).connector_class(name)


def test_plugins_are_listed_under_kafkas_names() -> None:
    """REST's list has sinks before sources, each with its kind and version."""
    plugins = Plugins([(None, FileStreamSourceConnector), (None, FileStreamSinkConnector)])
    assert plugins.listed() == [
        {"class": "org.apache.kafka.connect.file.FileStreamSinkConnector", "type": "sink", "version": "4.1.1"},
        {"class": "org.apache.kafka.connect.file.FileStreamSourceConnector", "type": "source", "version": "4.1.1"},
    ]
    assert plugins.config_of("FileStreamSource") == (FileStreamSourceConnector, "source")
    with pytest.raises(ConnectorNotFound, match="Unknown plugin None"):
        plugins.config_of("None")


def test_all_that_kafka_connect_ships_is_there() -> None:
    """Every plugin that a real worker listed is listed here under the same name and kind."""
    with gzip.open(Path(__file__).parents[2] / "data" / "kafka_connect_rest.jsonl.gz", "rt", encoding="utf-8") as lines:
        (case,) = [one for one in map(json.loads, lines) if one.get("path", "").endswith("?connectorsOnly=false")]
    listed = Plugins.installed().listed(connectors_only=False)
    assert [plugin for plugin in case["response"] if plugin not in listed] == []


def test_kinds_are_told_apart() -> None:
    """A connector is a source or a sink."""
    assert [connector_type(c) for c in (FileStreamSourceConnector, FileStreamSinkConnector)] == ["source", "sink"]


def test_a_subclass_does_not_inherit_kafkas_name() -> None:
    """Who derives from a class that stands for Kafka's has a name of his own."""

    class Own(FileStreamSinkConnector):
        pass

    assert class_name(Own).endswith("Own")
