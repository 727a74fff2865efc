"""A Connect worker's start: its command line and files, its REST server, and the errors that prevent the start."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.connect.routes import StartingApp
from penstock.services.connect.daemon import KAFKA_UNREACHABLE, PORT_IN_USE, ConnectDaemon
from penstock.services.connect.main import main
from penstock.services.connect.property_files import ConnectorFile, read_connector_file
from penstock.services.connect.rest_server import guarded_rest_app, is_rest_open, rest_listener, worker_id_of
from penstock.services.connect.worker_command_line import CommandLine, Mode, misspelled_settings, read_command_line
from penstock.services.exit_status import ExitStatus, StartFailed
from penstock.services.service_lifecycle import leaf_exceptions
from penstock.shared.common.errors import ConfigError, KafkaTimeout
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.herder.distributed_config import DistributedConfig, distributed_config
from penstock.shared.connect.herder.leader_client import LeaderClient, LeaderRequestFailed
from penstock.shared.connect.runtime.states import TargetState
from penstock.shared.connect.runtime.worker_config import StandaloneConfig
from penstock.shared.testing.fake_broker import FakeCluster
from tests.documents import DOCS
from tests.services.stuck_thread import StuckThread

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


def test_variables_of_the_workers_file_are_resolved(worker: Path, tmp_path: Path) -> None:
    """Variables in the worker's own settings and flags are replaced by their values, also in the properties that
    converters and the processes of connectors get."""
    secrets = tmp_path / "secrets"
    secrets.write_text("kafka=s3cret\ntoken=0123456789abcdef\n")
    lines = [
        "config.providers=file",
        f'sasl.jaas.config=PlainLoginModule required username="ann" password="${{file:{secrets}:kafka}}";',
        f"value.converter.basic.auth.user.info=ann:${{file:{secrets}:kafka}}",
    ]
    worker.write_text(worker.read_text() + "\n".join(lines))
    config = read_command_line("distributed", [str(worker), f"--rest.auth.token=${{file:{secrets}:token}}"]).config
    assert config.kafka.sasl_password is not None
    assert config.kafka.sasl_password.get_secret_value() == "s3cret"
    assert config["rest.auth.token"].value == "0123456789abcdef"
    assert config.props["value.converter.basic.auth.user.info"] == "ann:s3cret"


def test_an_invalid_setting_is_reported_with_its_variable(worker: Path, tmp_path: Path) -> None:
    """The error for an invalid setting has the variable instead of its value, as the value may be a secret."""
    (tmp_path / "secret").write_text("s3cret")
    flags = ["--config.providers=dir", f"--session.timeout.ms=${{dir:{tmp_path}:secret}}"]
    with pytest.raises(ConfigError, match=r"session\.timeout\.ms") as raised:
        read_command_line("distributed", [str(worker), *flags])
    assert f"${{dir:{tmp_path}:secret}}" in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_documents_name_every_setting_of_a_worker() -> None:
    """The documents about Connect name each setting of a worker, since no command lists them."""
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("connect.md", "connect-rest.md"))
    names = [re.sub(r"^\w+\.storage\.(?=repl|part)", "<store>.storage.", key.name) for key in distributed_config()]
    assert [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", text)] == []


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


def test_a_plugin_of_the_current_folder_is_found(worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter or connector may be in a module of the folder in which the worker is started."""
    text = "from penstock.connect.converters import JsonConverter\nclass Own(JsonConverter): ..."
    (tmp_path / "plugins_of_the_folder.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    command_line = read_command_line("distributed", [str(worker), "--value.converter=plugins_of_the_folder.Own"])
    assert command_line.config["value.converter"] == "plugins_of_the_folder.Own"


def test_no_converter_is_imported_from_an_allowed_folder(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converter's module that connectors may write is not run, and the converter is unknown."""
    text = "from penstock.connect.converters import JsonConverter\nclass Own(JsonConverter): ..."
    (tmp_path / "written_by_a_connector.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    flags = [f"--connect.files.allowed={tmp_path}", "--key.converter=written_by_a_connector.Own"]
    with pytest.raises(ConfigError, match=r"key\.converter"):
        read_command_line("distributed", [str(worker), *flags])
    assert "written_by_a_connector" not in sys.modules


def test_a_standalone_worker_accepts_connector_files(tmp_path: Path) -> None:
    """A connector's file may be properties, a config in JSON, or a request to create it over REST: a JSON object with
    name, config and initial state."""
    worker = tmp_path / "worker.properties"
    worker.write_text(CONVERTERS + "offset.storage.file.filename=offsets\n")
    files = {"a.properties": "name=a\n", "b.json": '{"name": "b", "tasks.max": 1}',
             "c.json": '{"name": "c", "config": {"topic": "t"}}',
             "d.json": '{"name": " d ", "config": {}, "initial_state": "stopped"}'}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command_line = read_command_line("standalone", [str(worker), *(str(tmp_path / name) for name in files)])
    assert isinstance(command_line.config, StandaloneConfig)
    assert list(command_line.connectors.values()) == [
        ConnectorFile({"name": "a"}),
        ConnectorFile({"name": "b", "tasks.max": "1"}),
        ConnectorFile({"name": "c", "topic": "t"}),
        ConnectorFile({"name": "d"}, "STOPPED"),
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
    assert read_connector_file(file).config == {"name": "c", "tasks.max": "2", "auto.create": "true", "x": "1.5"}
    for value in ('["t"]', '{"a": 1}'):
        file.write_text(f'{{"name": "c", "topics": {value}}}')
        with pytest.raises(ConfigError, match=r"c\.json.*'topics'"):
            read_connector_file(file)


def test_two_escapes_may_be_one_character(tmp_path: Path) -> None:
    """Two escapes of a properties file that are a surrogate pair are one character, as in Java. A surrogate without its
    pair is a ConfigError.
    """
    file = tmp_path / "c.properties"
    file.write_text("password=a\\ud83d\\ude00\\u00e9\n")
    assert read_connector_file(file).config == {"password": "a\U0001f600é"}
    file.write_text("password=a\\ud83d\n")
    with pytest.raises(ConfigError, match=r"c\.properties"):
        read_connector_file(file)


def test_an_invalid_file_is_named_in_the_error(tmp_path: Path) -> None:
    """JSON that is invalid, nested too deeply or no object, a malformed create request, and bytes that are no text, are
    a ConfigError with the file's name."""
    for name, data in (
        ("a.json", b"{"),
        ("b.json", b"[]"),
        ("c.json", b'{"config": 3}'),
        ("d.properties", b"\xff"),
        ("e.json", b"[" * 100_000),
        ("f.json", b'{"name": "c", "config": {}, "initial_state": "ASLEEP"}'),
        ("g.json", b'{"name": 3, "config": {}}'),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=name):
            read_connector_file(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"name": "copy", "config": {"name": "orders"}}', "copy"),
        ('{"config": {"name": "orders"}}', "'name' is missing"),
        ('{"name": "c", "config": {}, "initialState": "STOPPED"}', "initialState"),
    ],
)
def test_a_connector_file_with_two_names_or_an_unknown_field_is_rejected(tmp_path: Path, text: str, field: str) -> None:
    """A name that only the config has, or that differs from the one in the config, and a field that REST rejects too,
    are a ConfigError that says which."""
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=field):
        read_connector_file(file)


def test_misspelled_settings_are_reported(worker: Path) -> None:
    """A misspelled setting is reported with a suggestion; settings with the prefix of a
    converter, provider, client or storage topic are not reported.
    """
    flags = [
        *("--grup.id=x", "--topic.creation.enabled=false", "--metrics.recording.levels=INFO", "--producer.linger.ms=1"),
        *("--key.converter.schemas.enable=false", "--security.protocol=SSL", "--status.storage.segment.bytes=1000"),
    ]
    assert misspelled_settings(read_command_line("distributed", [str(worker), *flags]).config) == [
        "grup.id (did you mean group.id?)",
        "topic.creation.enabled (did you mean topic.creation.enable?)",
        "metrics.recording.levels",
    ]


def test_rest_listens_at_the_first_listener(worker: Path) -> None:
    """The REST API listens at the first listener, and other workers use the advertised address."""
    config = read_command_line("distributed", [str(worker)]).config
    http = rest_listener(config)
    assert (http.host, http.port) == ("127.0.0.1", 18083)
    assert worker_id_of(config, http, 18083) == "127.0.0.1:18083"
    flags = ["--rest.advertised.host.name=proxy", "--rest.advertised.port=80"]
    assert worker_id_of(read_command_line("distributed", [str(worker), *flags]).config, http, 18083) == "proxy:80"
    everywhere = read_command_line("distributed", [str(worker), "--listeners=http://:8083"]).config
    assert rest_listener(everywhere).port == 8083
    assert not worker_id_of(everywhere, rest_listener(everywhere), 8083).startswith("0.0.0.0")
    for wrong in ("https://:8443", "http://:port", "8083"):
        with pytest.raises(ConfigError, match="listeners"):
            rest_listener(read_command_line("distributed", [str(worker), f"--listeners={wrong}"]).config)


async def test_rest_requires_the_configured_credentials(worker: Path) -> None:
    """A request needs a configured token or user; without any, only requests to this machine's own names are served."""

    async def status(flags: list[str], url: str = "http://127.0.0.1/connectors", **options: Any) -> int:
        config = read_command_line("distributed", [str(worker), *flags]).config
        app = guarded_rest_app(StartingApp(), config, rest_listener(config))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return (await client.get(url, **options)).status_code

    flags = ["--rest.auth.token=0123456789abcdef", "--rest.auth.users=ann:fedcba9876543210"]
    assert await status(flags) == 401
    assert await status(flags, headers={"Authorization": "Bearer 0123456789abcdef"}) == 503
    assert await status(flags, auth=("ann", "fedcba9876543210")) == 503
    assert await status(flags, auth=("ann", "0123456789abcdef")) == 401
    assert await status(flags, "http://worker.example/health") == 503
    assert await status(flags, "http://worker.example/metrics/") == 503, "a trailing slash makes no difference"
    assert (await status([]), await status([], "http://elsewhere.example/connectors")) == (503, 421)
    unset = "${env:TOKEN_THAT_IS_NOT_SET}"
    for wrong in (
        "--rest.auth.users=ann",
        "--rest.auth.token=short",
        f"--rest.auth.token={unset}",
        f"--rest.auth.users=ann:{unset}",
    ):
        config = read_command_line("distributed", [str(worker), wrong]).config
        with pytest.raises(ConfigError, match=r"rest\.auth"):
            guarded_rest_app(StartingApp(), config, rest_listener(config))


async def test_a_request_may_have_many_task_configs(worker: Path) -> None:
    """The REST server accepts a body of several MiB: the task configs of a connector with many tasks."""

    async def length(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(str(len(await Request(scope, receive).body())))(scope, receive, send)

    config = read_command_line("distributed", [str(worker)]).config
    starting = StartingApp()
    starting.app = length
    app = guarded_rest_app(starting, config, rest_listener(config))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        response = await client.post("http://127.0.0.1/connectors/c/tasks", content=b" " * 5_000_000)
    assert response.text == "5000000"


async def test_requests_to_the_leader_have_the_first_user(worker: Path) -> None:
    """A request to the leader has the credentials of the first user, without the spaces and commas around it."""
    users = "--rest.auth.users=, ann:0123456789abcdef , bob:fedcba9876543210"
    config = read_command_line("distributed", [str(worker), users]).config
    app = guarded_rest_app(StartingApp(), config, rest_listener(config))
    client = LeaderClient(user=config.rest_users[0])
    client._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), auth=client._client.auth)
    with pytest.raises(LeaderRequestFailed, match="503"):
        await client.put_tasks("http://127.0.0.1", "c", [], None)
    await client.close()


def test_a_user_has_one_password(worker: Path) -> None:
    """A user that is named twice is a ConfigError with the name and without a password."""
    flag = "--rest.auth.users=ann:0123456789abcdef,bob:abcdefabcdefabcd,ann:fedcba9876543210"
    config = read_command_line("distributed", [str(worker), flag]).config
    with pytest.raises(ConfigError, match="'ann'") as raised:
        guarded_rest_app(StartingApp(), config, rest_listener(config))
    assert "fedcba9876543210" not in str(raised.value)


def test_an_open_address_is_detected(worker: Path) -> None:
    """An address that other machines reach without authentication is detected."""

    def detected(*flags: str) -> bool:
        config = read_command_line("distributed", [str(worker), *flags]).config
        return is_rest_open(config, rest_listener(config))

    assert not detected()
    assert detected("--listeners=http://:8083")
    assert detected("--listeners=http://:8083", "--rest.auth.users=,")
    assert not detected("--listeners=http://:8083", "--rest.auth.token=0123456789abcdef")


CONVERTER = "org.apache.kafka.connect.json.JsonConverter"


async def failed_start(mode: Mode = "standalone", **settings: str) -> tuple[int, str]:
    """Return exit status and message of a worker that does not start. Names of settings have underscores for dots."""
    config_class = StandaloneConfig if mode == "standalone" else DistributedConfig
    async with FakeCluster() as cluster:
        props = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "key.converter": CONVERTER,
            "value.converter": CONVERTER,
            "offset.storage.file.filename": "unused",
            "listeners": "http://127.0.0.1:0",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        daemon = ConnectDaemon(CommandLine(config_class(props), {}, LogSettings()))
        try:
            with pytest.raises(StartFailed) as error:
                await daemon.startup()
        finally:
            await daemon.shutdown()
        return error.value.exit_status, str(error.value)


@contextlib.asynccontextmanager
async def started_standalone(tmp_path: Path, files: Mapping[Path, ConnectorFile]) -> AsyncIterator[ConnectDaemon]:
    async with FakeCluster() as cluster:
        props = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "key.converter": CONVERTER,
            "value.converter": CONVERTER,
            "offset.storage.file.filename": str(tmp_path / "offsets"),
            "connect.files.allowed": str(tmp_path),
            "listeners": "http://127.0.0.1:0",
        }
        daemon = ConnectDaemon(CommandLine(StandaloneConfig(props), files, LogSettings()))
        try:
            await daemon.startup()
            yield daemon
        finally:
            await daemon.shutdown()


async def test_a_connector_of_the_command_line_is_created_in_its_initial_state(tmp_path: Path) -> None:
    """A standalone worker creates a connector of the command line in the initial state that its file requests."""
    connector = {"name": "c", "connector.class": "FileStreamSource", "file": str(tmp_path / "in"), "topic": "t"}
    files = {tmp_path / "c.json": ConnectorFile(connector, "STOPPED")}
    async with started_standalone(tmp_path, files) as daemon:
        assert daemon.herder is not None
        assert daemon.herder.snapshot().target_state("c") is TargetState.STOPPED


async def test_the_herder_answers_until_the_shutdown(tmp_path: Path) -> None:
    """After the signal, which cancels the main loop, requests in flight are still answered: the REST server ends before
    the herder's loop."""
    async with started_standalone(tmp_path, {}) as daemon:
        assert daemon.herder is not None
        main = asyncio.create_task(daemon.main_loop())
        await asyncio.sleep(0)
        main.cancel()
        await asyncio.wait([main])
        assert await daemon.herder.is_healthy()


async def test_an_unknown_config_provider_is_an_invalid_setting() -> None:
    """The error for an unknown config provider names the setting and the known providers."""
    status, reason = await failed_start(config_providers="env,vault")
    assert status == ExitStatus.WRONG_SETTING
    assert reason == "config.providers.vault.class: there is no config provider vault, only env, file, dir"


async def test_a_rejected_creation_of_a_storage_topic_is_an_invalid_setting() -> None:
    """A replication factor of the storage topics that the brokers reject is an invalid setting."""
    topics = {f"{store}_storage_topic": store for store in ("config", "offset", "status")}
    status, reason = await failed_start("distributed", group_id="g", config_storage_replication_factor="3", **topics)
    assert status == ExitStatus.WRONG_SETTING
    assert "replication" in reason.lower()


async def test_a_port_in_use_is_reported_for_listeners() -> None:
    """A port in use is reported for `listeners`, because a worker's properties have no http.port."""
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        status, reason = await failed_start(listeners=f"http://127.0.0.1:{port}")
    assert status == PORT_IN_USE
    assert reason.startswith(f"listeners: port {port} on 127.0.0.1 is in use")


async def test_an_unexpected_error_of_a_start_step_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of errors ends the start with its first error, or unchanged if one of them is unexpected."""
    errors: list[Exception] = [KafkaTimeout("no answer"), ConfigError("acks: wrong")]

    async def fail(daemon: ConnectDaemon) -> None:
        raise ExceptionGroup("step", [ExceptionGroup("inner", errors)])

    monkeypatch.setattr(ConnectDaemon, "_connect_kafka", fail)
    assert await failed_start() == (KAFKA_UNREACHABLE, "no answer")
    errors.append(TypeError("unexpected"))
    with pytest.raises(ExceptionGroup) as raised:
        await failed_start()
    assert list(leaf_exceptions(raised.value)) == errors


def test_a_thread_delays_the_exit_only_for_a_grace_period(worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a connector's thread has not ended after the shutdown, the process ends without it."""
    stuck = StuckThread(monkeypatch)
    monkeypatch.setattr(ConnectDaemon, "startup", stuck.start)
    monkeypatch.setattr(ConnectDaemon, "main_loop", stuck.start)
    assert main(["distributed", str(worker)]) == 0
    assert stuck.exits == [0]
