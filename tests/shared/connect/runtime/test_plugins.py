"""Plugins and the names under which their classes are found."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import structlog.testing

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.allowed_files import FILES_ALLOWED
from penstock.shared.connect.builtin import BUILTIN
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector, FileStreamSourceConnector
from penstock.shared.connect.converters.json import JsonConverter
from penstock.shared.connect.errors import ConnectorNotFound
from penstock.shared.connect.runtime.config_validation import validate_connector
from penstock.shared.connect.runtime.plugins import (
    ENTRY_POINT_GROUP,
    KINDS,
    Plugins,
    class_name,
    connector_type,
)
from penstock.shared.connect.runtime.worker_config import worker_config
from tests.documents import ROOT
from tests.shared.connect.harness import STRING, running
from tests.shared.connect.recordings import recorded_requests

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
        f" {PATH} ",
    ],
)
def test_a_connector_has_many_names(name: str) -> None:
    """Kafka's class name, its short forms, our class path and an entry point's name all find the class. Blanks around
    them are ignored, since a properties file keeps them."""
    assert Plugins([("to-file", FileStreamSinkConnector)]).connector_class(name) is FileStreamSinkConnector


def test_a_class_path_needs_no_registration() -> None:
    """An importable class of the right type is a plugin; any other name is an error."""
    assert Plugins([]).connector_class(PATH) is FileStreamSinkConnector
    for name in (
        "penstock.connect.SinkRecord",
        "no.such.Class",
        "os.path",
        "..",
        "",
        "a b.C",
    ):
        with pytest.raises(ConfigError, match=f"name matches {re.escape(name)}, "):
            Plugins([]).connector_class(name)


def test_a_class_whose_module_cannot_be_imported_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the module of a class path lacks one of its own dependencies, the log names the dependency. If the module
    itself does not exist, nothing is logged."""
    (tmp_path / "connector_with_dependency.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with structlog.testing.capture_logs() as logged:
        for name in ("connector_with_dependency.Own", "no.such.Class"):
            with pytest.raises(ConfigError):
                Plugins([]).connector_class(name)
    assert {(line["module"], line["error"]) for line in logged} == {
        ("connector_with_dependency", "No module named 'nowhere_at_all'")
    }


def test_a_module_that_exits_when_it_is_imported_has_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the module of a class path or of an entry point is a script that exits, the worker logs this and goes on."""
    (tmp_path / "script_that_exits.py").write_text("raise SystemExit('usage: script_that_exits FILE')")
    installed = tmp_path / "script-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: script\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nscript = script_that_exits:Own\n")
    monkeypatch.syspath_prepend(tmp_path)
    with structlog.testing.capture_logs() as logged, pytest.raises(ConfigError):
        Plugins.installed().connector_class("script_that_exits.Own")
    errors = {line["event"]: line["error"] for line in logged}
    assert errors == {
        "a plugin cannot be loaded": "SystemExit: usage: script_that_exits FILE",
        "a plugin's module cannot be imported": "usage: script_that_exits FILE",
    }


@pytest.mark.parametrize("name", ["files.pwn.X", "files.X", "project_with_data.files.pwn.X", "linked.X"])
async def test_the_content_of_a_topic_is_no_plugin(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class path is not imported from a file below a folder that connectors may write, also if this folder itself is
    a package, and if a link leads there. The log names the file."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "project_with_data").mkdir()
    (tmp_path / "project_with_data" / "files").symlink_to(tmp_path / "files")
    (tmp_path / "linked.py").symlink_to(tmp_path / "files" / "pwn.py")
    (tmp_path / "files").mkdir()
    for file in ("pwn.py", "__init__.py"):
        (tmp_path / "files" / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    async with running(connect_files_allowed=str(tmp_path / "files")) as run:
        with structlog.testing.capture_logs() as logged:
            assert run.worker.plugins.any_kind(name) is None
    assert not (tmp_path / "ran").exists()
    assert FILES_ALLOWED in logged[0]["error"]


def test_only_a_config_imports_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a class are shown only if it is installed, or if a connector's config has named it before.
    A known name of any kind imports nothing."""
    (tmp_path / "own_connector.py").write_text(
        "from penstock.connect.connectors import FileStreamSinkConnector\nclass Own(FileStreamSinkConnector): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins = Plugins([("own_connector.OfAnEntryPoint", JsonConverter)])
    with pytest.raises(ConnectorNotFound):
        plugins.config_of("own_connector.Own")
    assert plugins.any_kind(" own_connector.OfAnEntryPoint ") is JsonConverter
    assert "own_connector" not in sys.modules
    own = plugins.connector_class("own_connector.Own")
    assert plugins.config_of("own_connector.Own") == (own, "sink")


def test_plugins_are_listed_under_kafkas_names() -> None:
    """Plugins are listed under Kafka's names, sinks before sources, with type and version."""
    plugins = Plugins([(None, FileStreamSourceConnector), (None, FileStreamSinkConnector)])
    assert plugins.listed() == [
        {"class": "org.apache.kafka.connect.file.FileStreamSinkConnector", "type": "sink", "version": "4.1.1"},
        {"class": "org.apache.kafka.connect.file.FileStreamSourceConnector", "type": "source", "version": "4.1.1"},
    ]
    assert plugins.config_of("FileStreamSource") == (FileStreamSourceConnector, "source")
    with pytest.raises(ConnectorNotFound, match="Unknown plugin None"):
        plugins.config_of("None")


def test_all_of_kafka_connects_plugins_are_listed() -> None:
    """Every plugin that a real worker lists is listed with the same name and type."""
    (case,) = [one for one in recorded_requests() if one.get("path", "").endswith("?connectorsOnly=false")]
    listed = Plugins.installed().listed(connectors_only=False)
    assert [plugin for plugin in case["response"] if plugin not in listed] == []


def test_every_listed_name_finds_its_class() -> None:
    """Every listed name finds its class and is no private name, and each class has a public path."""
    plugins = Plugins.installed()
    for kind in KINDS:
        for desc in plugins.of_kind(kind):
            assert "penstock.shared" not in desc.name
            assert plugins.find(kind, desc.name) is desc.plugin
            assert plugins.find(kind, f"{desc.plugin.__module__}.{desc.plugin.__name__}") is desc.plugin
            assert desc.plugin.__module__.startswith("penstock.connect.")


@pytest.mark.parametrize("module", BUILTIN)
def test_a_public_module_has_the_plugins_that_ship(module: str) -> None:
    """A public module's `__all__` contains its built-in classes, which can be imported from it."""
    public = importlib.import_module(module)
    assert set(public.__all__) == set(dir(public)) == set(BUILTIN[module])
    for name in public.__all__:
        assert getattr(public, name).__module__ == module
    with pytest.raises(AttributeError, match="'NoSuch'"):
        _ = public.NoSuch


def test_plugin_classes_are_imported_lazily() -> None:
    """Importing one connector does not load the others' modules."""
    script = """
import sys
from penstock.connect.connectors import FileStreamSinkConnector
assert "deltalake" not in sys.modules
assert "penstock.shared.connect.connectors.http" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_connector_types() -> None:
    """A connector is a source or a sink by its class."""
    assert [connector_type(c) for c in (FileStreamSourceConnector, FileStreamSinkConnector)] == ["source", "sink"]


def test_a_subclass_does_not_inherit_kafkas_name() -> None:
    """A subclass of a built-in class is listed under its own name."""

    class Own(FileStreamSinkConnector):
        pass

    assert class_name(Own).endswith("Own")


class Unversioned(FileStreamSinkConnector):
    """A connector whose `version` needs its constructor."""

    def __init__(self) -> None:
        self.own_version = "1"

    def version(self) -> str:
        return self.own_version


def test_a_plugin_whose_version_fails_is_listed() -> None:
    """A plugin whose `version` raises an error is logged, listed with the version `undefined`, and can be used."""
    with structlog.testing.capture_logs() as logged:
        plugins = Plugins([(None, Unversioned)])
        worker = worker_config().parse({"key.converter": STRING, "value.converter": STRING})
        props = {"connector.class": "Unversioned", "name": "x", "topics": "t"}
        infos = validate_connector(plugins, props, worker)
    assert [plugin["version"] for plugin in plugins.listed()] == ["undefined"]
    assert infos.errors == []
    assert "version" in logged[0]["event"]
