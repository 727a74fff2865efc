"""A worker's command line and files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.connect.routes import StartingApp
from penstock.services.connect.property_files import read_properties
from penstock.services.connect.settings import (
    advertised,
    guarded,
    is_open,
    listener,
    misspelled,
    read_command_line,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.herder.settings import DistributedConfig, StandaloneConfig

CONVERTERS = "key.converter=org.apache.kafka.connect.json.JsonConverter\n" + (
    "value.converter=org.apache.kafka.connect.json.JsonConverter\n"
)
DISTRIBUTED = CONVERTERS + "group.id=g\nconfig.storage.topic=c\noffset.storage.topic=o\nstatus.storage.topic=s\n"


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.properties"
    path.write_text(DISTRIBUTED + "listeners=http://127.0.0.1:18083\n")
    return path


def test_flags_go_before_the_file(worker: Path) -> None:
    """With or without an equals sign; the log's are the log's."""
    asked = read_command_line("distributed", [str(worker), "--group.id=h", "--log.level", "debug"])
    assert isinstance(asked.config, DistributedConfig)
    assert asked.config["group.id"] == "h"
    assert asked.log.level == "debug"


@pytest.mark.parametrize("setting", ["key.converter", "value.converter", "header.converter"])
@pytest.mark.parametrize("name", ["no.such.Converter", "FileStreamSink"])
def test_a_converter_that_is_not_there_is_refused(worker: Path, setting: str, name: str) -> None:
    """It is rejected by its setting before anything starts, and so is a class that is not a converter."""
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} for configuration {re.escape(setting)}: .*not be found"):
        read_command_line("distributed", [str(worker), f"--{setting}={name}"])


def test_standalone_takes_connectors(tmp_path: Path) -> None:
    """They are accepted as properties, as a config in JSON, and in the form of REST."""
    worker = tmp_path / "worker.properties"
    worker.write_text(CONVERTERS + "offset.storage.file.filename=offsets\n")
    files = {"a.properties": "name=a\n", "b.json": '{"name": "b", "tasks.max": 1}',
             "c.json": '{"name": "c", "config": {"topic": "t"}}'}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    asked = read_command_line("standalone", [str(worker), *(str(tmp_path / name) for name in files)])
    assert isinstance(asked.config, StandaloneConfig)
    assert list(asked.connectors.values()) == [
        {"name": "a"},
        {"name": "b", "tasks.max": "1"},
        {"name": "c", "topic": "t"},
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "properties file"),
        (["no-such-file"], "no-such-file"),
        (["WORKER", "connector.properties"], "over REST"),
        (["WORKER", "--group.id"], "needs a value"),
        (["WORKER", "--session.timeout.ms=soon"], r"session\.timeout\.ms"),
    ],
)
def test_wrong_command_lines_are_named(worker: Path, arguments: list[str], named: str) -> None:
    """Each is rejected with its error before anything starts."""
    given = [str(worker) if argument == "WORKER" else argument for argument in arguments]
    with pytest.raises(ConfigError, match=named):
        read_command_line("distributed", given)


def test_values_in_json_are_what_rest_takes_them_for(tmp_path: Path) -> None:
    """Null is no value, numbers and truth values are as they are written; lists and objects are refused by name."""
    file = tmp_path / "c.json"
    file.write_text('{"name": "c", "config": {"topics.regex": null, "tasks.max": 2, "auto.create": true, "x": 1.5}}')
    assert read_properties(file) == {"name": "c", "tasks.max": "2", "auto.create": "true", "x": "1.5"}
    for value in ('["t"]', '{"a": 1}'):
        file.write_text(f'{{"name": "c", "topics": {value}}}')
        with pytest.raises(ConfigError, match=r"c\.json: The config's 'topics' must be a text"):
            read_properties(file)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    """These are invalid JSON, JSON that is no object, and bytes that are no text."""
    for name, data in (("a.json", b"{"), ("b.json", b"[]"), ("c.json", b'{"config": 3}'), ("d.properties", b"\xff")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=name):
            read_properties(tmp_path / name)


def test_the_listener_is_where_rest_is(worker: Path) -> None:
    """The first of them; other workers are told what is advertised."""
    config = read_command_line("distributed", [str(worker)]).config
    http = listener(config)
    assert (http.host, http.port) == ("127.0.0.1", 18083)
    assert advertised(config, http, 18083) == "127.0.0.1:18083"
    flags = ["--rest.advertised.host.name=proxy", "--rest.advertised.port=80"]
    assert advertised(read_command_line("distributed", [str(worker), *flags]).config, http, 18083) == "proxy:80"
    everywhere = read_command_line("distributed", [str(worker), "--listeners=http://:8083"]).config
    assert listener(everywhere).port == 8083
    assert not advertised(everywhere, listener(everywhere), 8083).startswith("0.0.0.0")
    for wrong in ("https://:8443", "http://:port", "8083"):
        with pytest.raises(ConfigError, match="listeners"):
            listener(read_command_line("distributed", [str(worker), f"--listeners={wrong}"]).config)


def test_misspelled_settings_are_told(worker: Path) -> None:
    """Neither the worker's nor its clients'; what belongs to converters, providers and clients is theirs to know."""
    flags = ["--grup.id=x", "--producer.linger.ms=1", "--key.converter.schemas.enable=false", "--security.protocol=SSL"]
    assert misspelled(read_command_line("distributed", [str(worker), *flags]).config) == [
        "grup.id (did you mean group.id?)"
    ]


async def test_rest_asks_for_what_is_set(worker: Path) -> None:
    """A token or a user opens REST, nothing else does; without either it is open to this machine's own names."""

    async def answered(flags: list[str], url: str = "http://127.0.0.1/connectors", **asked: Any) -> int:
        config = read_command_line("distributed", [str(worker), *flags]).config
        app = guarded(StartingApp(), config, listener(config))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return (await client.get(url, **asked)).status_code

    flags = ["--rest.auth.token=0123456789abcdef", "--rest.auth.users=ann:fedcba9876543210"]
    assert await answered(flags) == 401
    assert await answered(flags, headers={"Authorization": "Bearer 0123456789abcdef"}) == 503
    assert await answered(flags, auth=("ann", "fedcba9876543210")) == 503
    assert await answered(flags, auth=("ann", "0123456789abcdef")) == 401
    assert await answered(flags, "http://worker.example/health") == 503
    assert (await answered([]), await answered([], "http://elsewhere.example/connectors")) == (503, 421)
    for wrong in ("--rest.auth.users=ann", "--rest.auth.token=short"):
        config = read_command_line("distributed", [str(worker), wrong]).config
        with pytest.raises(ConfigError, match=r"rest\.auth"):
            guarded(StartingApp(), config, listener(config))


def test_an_address_that_is_open_to_everyone_is_known(worker: Path) -> None:
    """One that other machines reach, where nothing is asked for: the worker says so when it starts."""

    def found(*flags: str) -> bool:
        config = read_command_line("distributed", [str(worker), *flags]).config
        return is_open(config, listener(config))

    assert not found()
    assert found("--listeners=http://:8083")
    assert not found("--listeners=http://:8083", "--rest.auth.token=0123456789abcdef")
