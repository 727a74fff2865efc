"""The names of all commands' settings, and errors for unknown ones."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.settings import GuardedSettings
from penstock.services.admin.settings import AdminServiceSettings
from penstock.services.aggregator.settings import AggregatorSettings, SessionsSettings
from penstock.services.cli import COMMANDS as CLI
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.settings import ConnectWorkerSettings, GatewaySettings, UpSettings
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.services.settings_discovery import settings_of_all_commands
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
from penstock.shared.common.settings import CommandSettings, DaemonSettings, ServiceSettings

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


def test_the_settings_of_all_commands_need_no_extra() -> None:
    """The settings of all commands are found without importing a package of an extra."""
    code = (
        "import sys; from penstock.services.settings_discovery import settings_of_all_commands as all_; "
        "assert len(list(all_())) > 9; "
        "print(*sorted({'starlette', 'fastapi', 'uvicorn', 'pyspark', 'deltalake', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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
