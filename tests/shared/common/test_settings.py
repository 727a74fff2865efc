"""Settings from flags, environment, file and defaults, and the names that each command accepts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, SecretStr

from penstock.api.settings import GuardedSettings
from penstock.services import settings_of_all_commands
from penstock.services.admin.settings import AdminServiceSettings
from penstock.services.aggregator.settings import AggregatorSettings, SessionsSettings
from penstock.services.cli import COMMANDS as CLI
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.settings import ConnectWorkerSettings, DoctorSettings, GatewaySettings, UpSettings
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.compaction.settings import CompactSettings, MaintenanceSettings
from penstock.services.spark.settings import JobSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.setting_names import (
    OTHER_VARIABLES,
    flag,
    paths,
    siblings,
    unknown_keys,
    unknown_variables,
    variable,
)
from penstock.shared.common.settings import (
    CommandSettings,
    DaemonSettings,
    HttpSettings,
    KafkaSettings,
    PositiveMs,
    Section,
    ServiceSettings,
    load_settings_or_exit,
)

ROOT = Path(__file__).resolve().parents[3]


class Store(Section):
    """A service's own table."""

    path: str = "data"
    token: SecretStr | None = None
    limit: PositiveMs = 10


class Lakes(Section):
    """A table with a list."""

    tables: tuple[str, ...] = ()


class Service(ServiceSettings):
    """A service for tests."""

    http: HttpSettings = HttpSettings(port=8081)
    name: str = Field(min_length=1)
    store: Store = Store()
    options: dict[str, str] = Field({})
    lakes: Lakes = Lakes()


NAMED = ["--name=me"]


def load(*flags: str, **environ: str) -> Service:
    return Service.load([*NAMED, *flags], program="penstock test", environ=environ)


def load_error(*flags: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(*flags, **environ)
    return str(raised.value)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults() -> None:
    """A setting without a value has its default."""
    settings = load()
    assert (settings.name, settings.store, settings.http.port) == ("me", Store(), 8081)


def test_the_order_of_sources() -> None:
    """Flags precede variables, those the file, and that the defaults, key by key."""
    Path("my.toml").write_text('[store]\npath = "file"\nlimit = 2\n[http]\nhost = "file"\nport = 2\n')
    config = "--config=my.toml"
    settings = load(config, "--store.path=flag", PENSTOCK_STORE__PATH="env", PENSTOCK_STORE__LIMIT="3")
    assert (settings.store.path, settings.store.limit) == ("flag", 3)
    assert (settings.http.host, settings.http.port) == ("file", 2)
    assert load(config, PENSTOCK_STORE__PATH="env").store.path == "env"
    assert load(config).store.path == "file"
    assert load().store.path == "data"


def test_three_ways_to_name_the_file() -> None:
    """The file is that of --config, else of PENSTOCK_CONFIG, else penstock.toml in the current folder."""
    for name in ("flag", "env", "penstock"):
        Path(f"{name}.toml").write_text(f'[store]\npath = "{name}"\n')
    assert load("--config", "flag.toml", PENSTOCK_CONFIG="env.toml").store.path == "flag"
    assert load(PENSTOCK_CONFIG="env.toml").store.path == "env"
    assert load().store.path == load(PENSTOCK_CONFIG="").store.path == "penstock"


def test_one_file_serves_all() -> None:
    """Tables and variables of other commands are no error, whatever they contain."""
    Path("penstock.toml").write_text('group_id = "g"\n[streams]\nkey = 1\n[store]\npath = "p"\n')
    assert load(PENSTOCK_CONSUMER__KEY="1", PENSTOCK_TOPICS="a").store.path == "p"


def test_an_unknown_top_level_name_in_the_file() -> None:
    """A misspelled table or key of the file is an error with the file, the name and the nearest one."""
    Path("penstock.toml").write_text('grup_id = "hunter2"\n[stoer]\npath = "p"\n')
    assert load_error() == (
        "penstock test: penstock.toml: grup_id: no such setting (did you mean group_id?); "
        "penstock.toml: stoer: no such setting (did you mean store?)"
    )


def test_one_value_of_a_table_keeps_the_services_default_port() -> None:
    """A table that sets only the host keeps the service's default port."""
    Path("penstock.toml").write_text('[http]\nhost = "::1"\n')
    assert load().http == HttpSettings(host="::1", port=8081)


def test_only_given_settings_of_a_section_count_as_set() -> None:
    """`model_fields_set` has what a source or the service's own default gives, so that a rule can tell whether a
    setting was chosen."""
    Path("penstock.toml").write_text('[store]\npath = "p"\n')
    settings = load("--http.host=::1")
    assert settings.store.model_fields_set == {"path"}
    assert settings.http.model_fields_set == {"host", "port"}
    assert load(PENSTOCK_STORE__LIMIT="3").store.model_fields_set == {"path", "limit"}


def test_required_from_any_source() -> None:
    """A required setting may come from the environment or the file, and a missing one is an error with its name."""
    assert Service.load([], environ={"PENSTOCK_NAME": "env"}).name == "env"
    Path("penstock.toml").write_text('name = "file"\n')
    assert Service.load([], environ={}).name == "file"
    Path("penstock.toml").unlink()
    with pytest.raises(ConfigError, match=r"name: Field required \(--name, PENSTOCK_NAME\)"):
        Service.load([], environ={})


def test_a_dict_from_flags() -> None:
    """A table with free keys is set by repeated flags or as JSON."""
    assert load("--options", "a=1", "--options", "b=2").options == {"a": "1", "b": "2"}
    assert load(PENSTOCK_OPTIONS='{"a":"1"}').options == {"a": "1"}


@pytest.mark.parametrize(
    ("flags", "environ", "expected_message"),
    [
        (
            ["--http.port=70000"],
            {},
            "http.port: Input should be less than or equal to 65535, got '70000' (--http.port, PENSTOCK_HTTP__PORT)",
        ),
        ([], {"PENSTOCK_STORE__LIMIT": "0"}, "store.limit: Input should be greater than 0, got '0' (--store.limit, "),
        ([], {"PENSTOCK_STORE__LIMIT": "x"}, "store.limit: Input should be a valid integer"),
        (
            ["--shutdown-timeout-ms=0"],
            {},
            "shutdown_timeout_ms: Input should be greater than 0, got '0' (--shutdown-timeout-ms, "
            "PENSTOCK_SHUTDOWN_TIMEOUT_MS)",
        ),
        (["--log.level=loud"], {}, "log.level: Input should be 'debug', 'info', 'warning' or 'error', got 'loud'"),
        ([], {"PENSTOCK_HTTP__SSL_CERTFILE": ""}, "http.ssl_certfile: must not be empty"),
        (["--kafka.bootstrap-servers="], {}, "(--kafka.bootstrap-servers, PENSTOCK_KAFKA__BOOTSTRAP_SERVERS)"),
        (
            [],
            {"PENSTOCK_STORE__PTAH": "x"},
            "PENSTOCK_STORE__PTAH: no such setting (did you mean PENSTOCK_STORE__PATH?)",
        ),
        (
            [],
            {"PENSTOCK_KAFKA_BOOTSTRAP_SERVERS": "x"},
            "PENSTOCK_KAFKA_BOOTSTRAP_SERVERS: no such setting (did you mean PENSTOCK_KAFKA__BOOTSTRAP_SERVERS?)",
        ),
        ([], {"PENSTOCK_QUITE_ANOTHER": "x"}, "PENSTOCK_QUITE_ANOTHER: no such setting"),
        (["--store.ptah=x"], {}, "unrecognized arguments: --store.ptah (did you mean --store.path?)"),
        (["-store.path=x"], {}, "unrecognized arguments: -store.path (did you mean --store.path?)"),
        (["--unknown=x", "y", "--other"], {}, "unrecognized arguments: --unknown, --other"),
        (["positional"], {}, "unrecognized arguments: positional"),
        ([], {"PENSTOCK_STORE": "{"}, "penstock test: PENSTOCK_STORE, or one of PENSTOCK_STORE__*: not valid JSON"),
        ([], {"PENSTOCK_LAKES__TABLES": "["}, "penstock test: one of PENSTOCK_LAKES__*: not valid JSON"),
        ([], {"PENSTOCK_STORE": "5"}, "store: Input should be a table of settings, got 5 (--store, PENSTOCK_STORE)"),
        (
            [],
            {"PENSTOCK_KAFKA__SECURITY_PROTOCOL": "SASL_SSL"},
            "kafka: security_protocol=SASL_SSL also needs sasl_mechanism, sasl_username, sasl_password (--kafka, ",
        ),
    ],
)
def test_an_invalid_value_is_an_error_that_names_it(
    flags: list[str], environ: dict[str, str], expected_message: str
) -> None:
    """The error has the program, the setting, the reason, the value, and the names of flag and variable."""
    message = load_error(*flags, **environ)
    assert message.startswith("penstock test: ")
    assert expected_message in message


def test_all_invalid_values_are_reported_together() -> None:
    """One start-up reports all invalid settings."""
    message = load_error("--http.port=-1", "--store.limit=-1")
    assert "http.port: " in message
    assert "store.limit: " in message


def test_an_unknown_key_of_a_table_in_the_file() -> None:
    """A misspelled key of a known table is an error with its name."""
    Path("penstock.toml").write_text("[http]\nprot = 80\n")
    assert "http.prot: no such setting (did you mean http.port?)" in load_error()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no.toml: No such file"),
        (b"a = ", "no.toml: "),
        (b"[a]\n[a]", "no.toml: "),
        (b"# Gr\xf6\xdfe", "no.toml: 'utf-8'"),
    ],
)
def test_a_file_that_cannot_be_read(content: bytes | None, message: str) -> None:
    """A missing or malformed file, or one that is not UTF-8, is an error with its name."""
    if content is not None:
        Path("no.toml").write_bytes(content)
    assert load_error("--config=no.toml").startswith(message)


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    """Some editors write one."""
    Path("bom.toml").write_bytes(b'\xef\xbb\xbf[store]\r\npath = "p"\r\n')
    assert load("--config=bom.toml").store.path == "p"


def test_config_without_a_path() -> None:
    """--config without a path is an error."""
    assert load_error("--config") == "--config: needs the path of a TOML file"


def test_a_secret_is_not_shown() -> None:
    """A secret is in no repr, text or dump of the settings, and its value can be read explicitly."""
    settings = load(PENSTOCK_STORE__TOKEN="hunter2", PENSTOCK_KAFKA__SASL_PASSWORD="hunter2")
    assert settings.store.token is not None
    assert settings.store.token.get_secret_value() == "hunter2"
    for shown in (repr(settings), str(settings), repr(settings.kafka), settings.model_dump_json()):
        assert "hunter2" not in shown


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ([], {"PENSTOCK_STORE": '{"token": ["hunter2"]}'}),
        ([], {"PENSTOCK_STORE": '{"tokn": "hunter2"}'}),
        ([], {"PENSTOCK_STORE": '{"token": "hunter2"'}),
        ([], {"PENSTOCK_STORE__TOKN": "hunter2"}),
        (["--store.tokn=hunter2"], {}),
        (["--store.tokn", "hunter2"], {}),
        (["-store.token=hunter2"], {}),
        (["-store.token", "hunter2"], {}),
        (["\N{EM DASH}store.token=hunter2"], {}),
        (["\N{EM DASH}store.token", "hunter2"], {}),
        (["store.token=hunter2"], {}),
        (["-http.ssl-key-password=hunter2"], {}),
        ([], {"PENSTOCK_KAFKA__SASL_PASSWORD": "hunter2", "PENSTOCK_KAFKA__SECURITY_PROTOCOL": "SASL_SSL"}),
    ],
)
def test_a_secret_is_in_no_error(flags: list[str], environ: dict[str, str]) -> None:
    """An invalid secret, and a secret under a misspelled name, are not in the error."""
    message = load_error(*flags, **environ)
    assert message
    assert "hunter2" not in message


@pytest.mark.parametrize("variable", ["PENSTOCK_CREDENTIALS", "PENSTOCK_CREDENTIALS__SHOP"])
def test_a_credential_that_is_not_a_table_is_not_shown(variable: str) -> None:
    """The text in place of a credential's table is not in the error, since it may be the secret."""
    text = '{"shop": "hunter2"}' if variable == "PENSTOCK_CREDENTIALS" else "hunter2"
    with pytest.raises(ConfigError, match=r"credentials\.shop: .*got a hidden value") as raised:
        GuardedSettings.load([], environ={variable: text})
    assert "hunter2" not in str(raised.value)


def test_a_misspelled_secret_in_the_file_is_not_shown() -> None:
    """The value of an unknown key in the file is not in the error, since it may be a secret."""
    Path("penstock.toml").write_text('[store]\ntokn = "hunter2"\n')
    message = load_error()
    assert "store.tokn: no such setting" in message
    assert "hunter2" not in message


def test_a_class_may_have_a_property_keys() -> None:
    """A settings class with a property called `keys` can be loaded."""

    class OneOption(CommandSettings):
        key: str = "ann"

        @property
        def keys(self) -> list[str]:
            return [self.key]

    assert OneOption.load(["--key", "bob"], environ={}).keys == ["bob"]


def test_loading_leaves_the_class_alone() -> None:
    """A load does not affect the next one."""
    assert load("--store.path=a").store.path == "a"
    assert load().store.path == "data"
    assert type(load()) is Service


def test_load_or_exit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid setting at start-up is one line on standard error and exit status 2."""
    monkeypatch.setenv("PENSTOCK_NAME", "me")
    assert load_settings_or_exit(Service, [], "penstock test").name == "me"
    with pytest.raises(SystemExit) as left:
        load_settings_or_exit(Service, ["--http.port=x"], "penstock test")
    assert left.value.code == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.startswith("penstock test: http.port: ")


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists the flags and ends with status 0."""
    with pytest.raises(SystemExit) as left:
        load("--help")
    assert left.value.code == 0
    text = capsys.readouterr().out
    for name in ("--name", "--store.path", "--kafka.bootstrap-servers", "--shutdown-timeout-ms"):
        assert name in text


@pytest.mark.parametrize("servers", ["b:1", "a.b-c_d:9092, 10.0.0.1:65535", "[::1]:9092", " [fe80::1%eth0]:1"])
def test_bootstrap_servers(servers: str) -> None:
    """Bootstrap servers are names and addresses with ports, one or several.

    Spaces are removed, because errors name commands with `--bootstrap-server` and this text.
    """
    assert KafkaSettings(bootstrap_servers=servers).bootstrap_servers == servers.replace(" ", "")


@pytest.mark.parametrize(
    ("servers", "wrong"),
    [
        ("", "''"),
        ("kafka", "'kafka'"),
        ("a:1,", "''"),
        ("a:1,b", "'b'"),
        ("a:0", "'a:0'"),
        ("a:65536", "'a:65536'"),
        ("kafka://a:1", "'kafka://a:1'"),
        ("a b:1", "'a b:1'"),
        ("::1:9092", "'::1:9092'"),
        ("a:port", "'a:port'"),
    ],
)
def test_invalid_bootstrap_servers(servers: str, wrong: str) -> None:
    """A server that is not host and port is a ConfigError that names the setting, from a program as from a command."""
    with pytest.raises(ConfigError, match=r"^KafkaSettings: bootstrap_servers: ") as raised:
        KafkaSettings(bootstrap_servers=servers)
    assert f"{wrong} is not host:port" in str(raised.value)
    assert f"kafka.bootstrap_servers: {wrong} is not host:port" in load_error(f"--kafka.bootstrap-servers={servers}")


def test_an_invalid_section_in_a_program_is_an_error() -> None:
    """A section created in a program has the same errors as a command's: each setting with reason and value."""
    with pytest.raises(ConfigError) as raised:
        KafkaSettings(request_timeout_ms=0, clientid="c")
    assert str(raised.value) == (
        "KafkaSettings: request_timeout_ms: Input should be greater than 0, got 0; "
        "clientid: no such setting (did you mean client_id?)"
    )
    with pytest.raises(ConfigError, match=r"port.*70000"):
        HttpSettings.model_validate({"port": 70000})


def test_invalid_command_settings_in_a_program_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a command that a program creates have the same errors. Variables of other commands are ignored."""
    monkeypatch.setenv("PENSTOCK_LINGER_MS", "5")
    named: dict[str, Any] = {"topics": ("t",), "group_id": "g", "handler": "visits:handle"}
    assert ConsumerServiceSettings(**named, _env_prefix="OTHER_").group_id == "g"
    with pytest.raises(ConfigError) as raised:
        ConsumerServiceSettings(**named, auto_offset_reset="earliest", max_attempt=3)
    assert str(raised.value) == (
        "ConsumerServiceSettings: auto_offset_reset: no such setting; "
        "max_attempt: no such setting (did you mean max_attempts?)"
    )
    with pytest.raises(ConfigError, match=r"^ConsumerServiceSettings: shutdown_timeout_ms: .* got 0$"):
        ConsumerServiceSettings(**named, shutdown_timeout_ms=0)
    monkeypatch.setenv("PENSTOCK_KAFKA", "{")
    with pytest.raises(ConfigError, match=r'^ConsumerServiceSettings: .*"kafka"'):
        ConsumerServiceSettings(**named)


def test_a_secret_of_the_wrong_kind_is_not_shown() -> None:
    """A secret of the wrong type is not in the error."""
    with pytest.raises(ConfigError) as raised:
        KafkaSettings.model_validate({"sasl_password": ["hunter2"]})
    assert "sasl_password: " in str(raised.value)
    assert "hunter2" not in str(raised.value) + repr(raised.value) + repr(raised.value.__cause__)


BASES = (CommandSettings, DaemonSettings, ServiceSettings, GuardedSettings, JobSettings, MaintenanceSettings)
COMMANDS: list[type[CommandSettings]] = [*dict.fromkeys(one for one in settings_of_all_commands() if one not in BASES)]
"""The settings of every command."""
NEEDED = {
    "--application": "visits",
    "--lake": "lake",
    "--topology": "visits:topology",
    "--handler": "visits:handle",
    "--topics": "visits",
    "--topic": "visits",
    "--group-id": "visitors",
}
"""A value for each setting that a command requires."""
DEFAULT_PORTS = {
    UpSettings: 8080,
    ProducerServiceSettings: 8081,
    ConsumerServiceSettings: 8082,
    AggregatorSettings: 8083,
    AdminServiceSettings: 8084,
}

STARTED = [target for _, target, _, _ in CLI.values()]
STARTED += ["penstock.services.local.gateway:main", "penstock.services.local.connect_worker:main"]


def test_the_settings_of_all_commands_are_found() -> None:
    """All settings of the started modules are found, so every other name is a typing error for each command."""
    for target in STARTED:
        importlib.import_module(target.partition(":")[0])
    defined = {one for one in subclasses(CommandSettings) if one.__module__.startswith("penstock.services.")}
    found = set(settings_of_all_commands())
    assert {one.__name__ for one in defined} <= {one.__name__ for one in found}
    # The first is public, so its `__module__` is another one.
    assert {ConsumerServiceSettings, UpSettings, ConnectWorkerSettings, SessionsSettings, CompactSettings} <= found


def test_a_setting_has_the_same_type_in_all_commands() -> None:
    """One settings file can serve all commands. Settings that only flags set are not read from it."""
    types: dict[str, set[Any]] = defaultdict(set)
    for command in settings_of_all_commands():
        for name in command.model_fields.keys() - command.FLAGS_ONLY:
            annotation: Any = command.model_fields[name].annotation
            # Another command may require an optional setting.
            types[name].add(annotation | None)
    assert {name: found for name, found in types.items() if len(found) > 1} == {}


def test_a_filter_of_one_call_comes_from_flags_alone(tmp_path: Path) -> None:
    """The key in the file and in the environment is that of `penstock up`. An error names only the flag."""
    (tmp_path / "penstock.toml").write_text('key = ["/user"]\napplication = "app"\n')
    environ = {"PENSTOCK_KEY": '["/user"]', "PENSTOCK_CONFIG": str(tmp_path / "penstock.toml")}
    assert (SessionsSettings.load(environ=environ).key, UpSettings.load(environ=environ).key) == (None, ("/user",))
    assert SessionsSettings.load(["--key=a"], environ=environ).key == "a"
    with pytest.raises(ConfigError, match=r"\(--to\)$"):
        SessionsSettings.load(["--to=later"], environ=environ)
    topics = {"PENSTOCK_TOPICS": "orders"}
    assert DoctorSettings.load(environ=topics).topics == ()
    assert DoctorSettings.load(["--topics=a,b"], environ=topics).topics == ("a", "b")


def test_the_settings_of_all_commands_need_no_extra() -> None:
    """The settings of all commands are found without importing a package of an extra."""
    code = (
        "import sys; from penstock.services import settings_of_all_commands as all_; "
        "assert len(list(all_())) > 9; "
        "print(*sorted({'starlette', 'fastapi', 'uvicorn', 'pyspark', 'deltalake', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def subclasses(base: type) -> set[type]:
    return {one for direct in base.__subclasses__() for one in (direct, *subclasses(direct))}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ignores_the_settings_of_others(command: type[CommandSettings]) -> None:
    """One environment with every variable of all commands is valid for each of them."""
    environ = {variable(path): "" for other in COMMANDS if other is not command for path in paths(other)}
    of_others = {name: "" for name in environ if name.split("__")[0][9:].lower() not in command.model_fields}
    assert unknown_variables(command, of_others | dict.fromkeys(OTHER_VARIABLES, "")) == []
    assert unknown_keys(command, {name for other in COMMANDS for name in other.model_fields}) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_starts_with_its_required_settings(command: type[CommandSettings]) -> None:
    """The required flags alone make a command's settings."""
    flags = [f"{name}={value}" for name, value in NEEDED.items() if is_needed(command, name)]
    settings = command.load(flags, program="penstock", environ={})
    assert isinstance(settings, command)
    assert set(settings.model_dump()) == set(command.model_fields)


def is_needed(command: type[CommandSettings], given: str) -> bool:
    field = command.model_fields.get(given[2:].replace("-", "_"))
    return field is not None and (field.is_required() or bool(field.validate_default))


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (UpSettings, "--kafka.bootstrap-servers=a:1"),
        (CompactSettings, "--http.port=1"),
        (AuditSettings, "--http.port=1"),
        (CompactSettings, "--shutdown-timeout-ms=1"),
        (ConsumerServiceSettings, "--consumer.commit-strategy=auto"),
    ],
)
def test_a_flag_without_effect_is_rejected(command: type[CommandSettings], unused: str) -> None:
    """A flag that a command does not use is a ConfigError with its name."""
    with pytest.raises(ConfigError, match=f"unrecognized arguments: {unused.split('=')[0]}"):
        command.load([unused], environ={})


def test_each_service_has_a_port_of_its_own() -> None:
    """All services have different default ports, the documented ones."""
    ports = {command: command.model_fields["http"].default.port for command in DEFAULT_PORTS}
    assert ports == DEFAULT_PORTS


@pytest.mark.parametrize(
    ("name", "expected_message"),
    [
        ("PENSTOCK_HTPP__PORT", "did you mean PENSTOCK_HTTP__PORT?"),
        ("PENSTOCK_KAFAK__BOOTSTRAP_SERVERS", "did you mean PENSTOCK_KAFKA__BOOTSTRAP_SERVERS?"),
        ("PENSTOCK_STREAM__LAKE", "did you mean PENSTOCK_STREAMS__LAKE?"),
        ("PENSTOCK_HTTP__PORT__X", "no such setting"),
        ("PENSTOCK_PORT", "no such setting"),
        ("penstock_grup_id", "did you mean PENSTOCK_GROUP_ID?"),
    ],
)
def test_a_misspelled_variable(name: str, expected_message: str) -> None:
    """A misspelled variable is reported with the nearest existing one and without its value."""
    (message,) = unknown_variables(AggregatorSettings, {name: "hunter2", "OTHER_PORT": "1"})
    assert message.startswith(f"{name}: no such setting")
    assert expected_message in message
    assert "hunter2" not in message


def test_variables_of_kubernetes_are_ignored() -> None:
    """Kubernetes's variables for Services called penstock and penstock-producer, which have our prefix, are ignored."""
    environ = {
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_SERVICE_PORT": "80",
        "PENSTOCK_SERVICE_PORT_HTTP": "80",
        "PENSTOCK_PORT": "tcp://10.0.0.1:80",
        "PENSTOCK_PRODUCER_PORT_80_TCP": "tcp://10.0.0.1:80",
        "PENSTOCK_PRODUCER_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert unknown_variables(ConsumerServiceSettings, environ) == []


def test_free_keys_are_free() -> None:
    """Below a table with free keys any name is valid."""
    environ = {"PENSTOCK_SERVICES__ANY": "http://a", "PENSTOCK_INGEST__TOPICS__FLIGHTS__TIME": "/at"}
    assert unknown_variables(GatewaySettings, environ) == []
    assert "time" in siblings(GatewaySettings, ("ingest", "topics", "flights", "tiem"))
    assert list(siblings(GatewaySettings, ("services", "any"))) == []


@given(st.sampled_from([path for command in COMMANDS for path in paths(command)]))
def test_a_setting_is_spelled_three_ways_from_one_path(path: tuple[str, ...]) -> None:
    """Flag and variable can be converted back to the setting's path."""
    assert tuple(flag(path)[2:].replace("-", "_").split(".")) == path
    assert tuple(variable(path).removeprefix("PENSTOCK_").lower().split("__")) == path
