"""Plugins: what a class may be called."""

from __future__ import annotations

import gzip
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.shared.connect.builtin import BUILTIN
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector, FileStreamSourceConnector
from penstock.shared.connect.errors import ConfigError, ConnectorNotFound
from penstock.shared.connect.runtime.plugins import KINDS, Plugins, class_name, connector_type
from tests.documents import ROOT

PATH = "penstock.connect.connectors.FileStreamSinkConnector"


@pytest.mark.parametrize(
    "name",
    [
        "FileStreamSink",
        "FileStreamSinkConnector",
        "org.apache.kafka.connect.file.FileStreamSinkConnector",
        PATH,
        "penstock.connect.connectors:FileStreamSinkConnector",
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
        "penstock.connect.SinkRecord",
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
    with gzip.open(Path(__file__).parents[3] / "data" / "kafka_connect_rest.jsonl.gz", "rt", encoding="utf-8") as lines:
        (case,) = [one for one in map(json.loads, lines) if one.get("path", "").endswith("?connectorsOnly=false")]
    listed = Plugins.installed().listed(connectors_only=False)
    assert [plugin for plugin in case["response"] if plugin not in listed] == []


def test_every_name_that_is_listed_can_be_put_into_a_configuration() -> None:
    """A name that REST lists finds its class and is not a private one; each class has a public path too."""
    plugins = Plugins.installed()
    for kind in KINDS:
        for desc in plugins.of_kind(kind):
            assert "penstock.shared" not in desc.name
            assert plugins.find(kind, desc.name) is desc.plugin
            assert plugins.find(kind, f"{desc.plugin.__module__}.{desc.plugin.__name__}") is desc.plugin
            assert desc.plugin.__module__.startswith("penstock.connect.")


@pytest.mark.parametrize("module", BUILTIN)
def test_a_public_module_has_the_plugins_that_ship(module: str) -> None:
    """Each class that ships is in `__all__` of its module and can be imported from there; another name cannot."""
    public = importlib.import_module(module)
    assert set(public.__all__) == set(dir(public)) == set(BUILTIN[module])
    for name in public.__all__:
        assert getattr(public, name).__module__ == module
    with pytest.raises(AttributeError, match="'NoSuch'"):
        _ = public.NoSuch


def test_a_class_is_imported_when_it_is_used() -> None:
    """A process that needs one connector does not load Delta's or Postgres's."""
    script = """
import sys
from penstock.connect.connectors import FileStreamSinkConnector
assert "deltalake" not in sys.modules
assert "penstock.shared.connect.connectors.http" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_kinds_are_told_apart() -> None:
    """A connector is a source or a sink."""
    assert [connector_type(c) for c in (FileStreamSourceConnector, FileStreamSinkConnector)] == ["source", "sink"]


def test_a_subclass_does_not_inherit_kafkas_name() -> None:
    """Who derives from a class that stands for Kafka's has a name of his own."""

    class Own(FileStreamSinkConnector):
        pass

    assert class_name(Own).endswith("Own")
