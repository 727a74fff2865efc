"""A topology is loaded by the name of its function, and the error names what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.topology_loading import load_topology

MODULE = """
from penstock.shared.streams.dsl.builder import StreamsBuilder

CONSTANT = 3

def build(topic="in", gap="10"):
    builder = StreamsBuilder()
    builder.stream(topic).to(f"{topic}-{gap}")
    return builder.build()

def unfinished():
    return StreamsBuilder()

def empty():
    return StreamsBuilder().build()
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_topologies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_topologies", None)


def test_a_function_of_the_current_folder() -> None:
    """A module of the current folder is found, and its function gets the options."""
    topology = load_topology("my_topologies:build", {"topic": "clicks", "gap": "5"})
    assert topology.source_topics() == ["clicks"]
    assert "clicks-5" in topology.output_topics()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:build", {}, "no_such_module:build: No module named 'no_such_module'"),
        ("my_topologies:biuld", {}, "my_topologies:biuld: module 'my_topologies' has no attribute 'biuld'"),
        ("my_topologies:CONSTANT", {}, "my_topologies:CONSTANT: 'int' object is not callable"),
        ("my_topologies:build", {"gpa": "5"}, "unexpected keyword argument 'gpa'"),
        ("my_topologies:unfinished", {}, "my_topologies:unfinished returned StreamsBuilder, not a Topology"),
        ("my_topologies:empty", {}, "no stream was defined"),
    ],
)
def test_what_is_wrong_with_a_topology(name: str, options: dict[str, str], message: str) -> None:
    """A module, function or option that does not exist, or a result that is not a topology, raises a ConfigError with
    the reason."""
    with pytest.raises(ConfigError, match="topology: ") as raised:
        load_topology(name, options)
    assert message in str(raised.value)


def test_an_error_of_the_modules_code_is_raised_unchanged(tmp_path: Path) -> None:
    """An AttributeError of the module's own code is no missing function, so it is raised unchanged."""
    (tmp_path / "my_topologies.py").write_text("import json\njson.dump_all\n")
    with pytest.raises(AttributeError, match="dump_all"):
        load_topology("my_topologies:build", {})
