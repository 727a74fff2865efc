"""A Connect worker's command line and files: precedence and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.services.connect.main import main
from penstock.services.connect.property_files import read_properties
from penstock.services.connect.worker_command_line import misspelled_settings, read_command_line
from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.runtime.worker_config import StandaloneConfig

CONVERTERS = "key.converter=org.apache.kafka.connect.json.JsonConverter\n" + (
    "value.converter=org.apache.kafka.connect.json.JsonConverter\n"
)
DISTRIBUTED = CONVERTERS + "group.id=g\nconfig.storage.topic=c\noffset.storage.topic=o\nstatus.storage.topic=s\n"


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.properties"
    path.write_text(DISTRIBUTED + "listeners=http://127.0.0.1:18083\n")
    return path


def test_flags_override_the_file(worker: Path) -> None:
    """Flags with and without an equals sign override the file; the log's flags are not settings of the worker."""
    command_line = read_command_line("distributed", [str(worker), "--group.id=h", "--log.level", "debug"])
    assert isinstance(command_line.config, DistributedConfig)
    assert command_line.config["group.id"] == "h"
    assert command_line.log.level == "debug"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_mode_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints the usage, also after the mode and a file."""
    for arguments in ([flag], ["standalone", flag], ["distributed", "missing.properties", flag]):
        assert main(arguments) == 0
        assert capsys.readouterr().out.startswith("penstock connect standalone WORKER.properties")


@pytest.mark.parametrize("setting", ["key.converter", "value.converter", "header.converter"])
@pytest.mark.parametrize("name", ["no.such.Converter", "FileStreamSink"])
def test_an_unknown_converter_is_rejected(worker: Path, setting: str, name: str) -> None:
    """An unknown class, or one that is no converter, is a ConfigError with the setting's name."""
    with pytest.raises(ConfigError, match=rf"{re.escape(name)}.*{re.escape(setting)}"):
        read_command_line("distributed", [str(worker), f"--{setting}={name}"])


def test_a_standalone_worker_accepts_connector_files(tmp_path: Path) -> None:
    """A connector's file may be properties, a config in JSON, or a JSON object with name and config."""
    worker = tmp_path / "worker.properties"
    worker.write_text(CONVERTERS + "offset.storage.file.filename=offsets\n")
    files = {"a.properties": "name=a\n", "b.json": '{"name": "b", "tasks.max": 1}',
             "c.json": '{"name": "c", "config": {"topic": "t"}}'}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command_line = read_command_line("standalone", [str(worker), *(str(tmp_path / name) for name in files)])
    assert isinstance(command_line.config, StandaloneConfig)
    assert list(command_line.connectors.values()) == [
        {"name": "a"},
        {"name": "b", "tasks.max": "1"},
        {"name": "c", "topic": "t"},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "properties file"),
        (["no-such-file"], "no-such-file"),
        (["WORKER", "connector.properties"], "over REST"),
        (["WORKER", "--group.id"], "needs a value"),
        (["WORKER", "--session.timeout.ms=soon"], r"session\.timeout\.ms"),
    ],
)
def test_an_invalid_command_line_is_rejected(worker: Path, arguments: list[str], message: str) -> None:
    """An invalid command line is a ConfigError with its reason."""
    arguments = [str(worker) if argument == "WORKER" else argument for argument in arguments]
    with pytest.raises(ConfigError, match=message):
        read_command_line("distributed", arguments)


def test_values_in_json_are_converted_as_by_rest(tmp_path: Path) -> None:
    """Null is no value, numbers and booleans become text, and lists and objects are a ConfigError."""
    file = tmp_path / "c.json"
    file.write_text('{"name": "c", "config": {"topics.regex": null, "tasks.max": 2, "auto.create": true, "x": 1.5}}')
    assert read_properties(file) == {"name": "c", "tasks.max": "2", "auto.create": "true", "x": "1.5"}
    for value in ('["t"]', '{"a": 1}'):
        file.write_text(f'{{"name": "c", "topics": {value}}}')
        with pytest.raises(ConfigError, match=r"c\.json.*'topics'"):
            read_properties(file)


def test_an_invalid_file_is_named_in_the_error(tmp_path: Path) -> None:
    """JSON that is invalid, nested too deeply or no object, and bytes that are no text, are a ConfigError with the
    file's name."""
    for name, data in (
        ("a.json", b"{"),
        ("b.json", b"[]"),
        ("c.json", b'{"config": 3}'),
        ("d.properties", b"\xff"),
        ("e.json", b"[" * 100_000),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=name):
            read_properties(tmp_path / name)


def test_misspelled_settings_are_reported(worker: Path) -> None:
    """A misspelled setting is reported with a suggestion; settings with the prefix of a
    converter, provider or client are not reported.
    """
    flags = ["--grup.id=x", "--producer.linger.ms=1", "--key.converter.schemas.enable=false", "--security.protocol=SSL"]
    assert misspelled_settings(read_command_line("distributed", [str(worker), *flags]).config) == [
        "grup.id (did you mean group.id?)"
    ]
