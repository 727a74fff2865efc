"""Reads a worker's settings from its command line: Kafka Connect's properties file, overridden by flags.

`--group.id=orders` is `group.id=orders` in the file. The REST server listens at the first of `listeners`. Other workers
use the address in `rest.advertised.host.name` and `rest.advertised.port`, by default the listener's own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import SecretStr

from penstock.api.settings import Credential, check_secrets, is_loopback
from penstock.services.connect.property_files import read_properties
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.setting_names import nearest
from penstock.shared.common.settings import HttpSettings, LogSettings
from penstock.shared.connect.herder.settings import DistributedConfig, StandaloneConfig
from penstock.shared.connect.runtime.client_settings import unknown_properties
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.worker_config import WorkerConfig

if TYPE_CHECKING:
    from penstock.api.connect.routes import StartingApp
    from penstock.api.http.auth import Guard

Mode = Literal["standalone", "distributed"]

EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - Kafka Connect's default listener has no host
LOG_FLAGS = ("log.level", "log.format")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The parsed command line: the worker's settings, and a standalone worker's connectors by file."""

    mode: Mode
    config: DistributedConfig | StandaloneConfig
    connectors: dict[Path, dict[str, str]]
    log: LogSettings


def read_command_line(mode: Mode, arguments: Sequence[str]) -> CommandLine:
    """Reads the command line and the files that it names. Raises ConfigError."""
    files, flags = _split_arguments(arguments)
    if not files:
        raise ConfigError(f"the worker's properties file is missing: penstock connect {mode} WORKER.properties …")
    if mode == "distributed" and len(files) > 1:
        raise ConfigError("a distributed worker does not accept connectors on the command line; create them over REST")
    log = {name.removeprefix("log."): flags.pop(name) for name in LOG_FLAGS if name in flags}
    props = read_properties(files[0]) | flags
    converter_class = Plugins.installed().converter_class
    config = (DistributedConfig if mode == "distributed" else StandaloneConfig)(props, converter_class)
    connectors = {path: read_properties(path) for path in files[1:]}
    return CommandLine(mode, config, connectors, LogSettings.model_validate(log))


def _split_arguments(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Returns the files, and the flags by name. Accepts `--name=value` and `--name value`."""
    files: list[Path] = []
    flags: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("--"):
            files.append(Path(argument))
            continue
        name, equals, value = argument[2:].partition("=")
        if not equals:
            value = next(remaining, "")
            if not value:
                raise ConfigError(f"--{name}: needs a value")
        flags[name] = value
    return files, flags


def misspelled(config: WorkerConfig) -> list[str]:
    """Returns the settings that neither the worker nor its clients know, each with the nearest known name."""
    known = [key.name for key in config.definition]
    other = [name for name in config.props if name not in config.definition and not name.startswith(PREFIXES)]
    return [f"{name}{nearest(name, known)}" for name in unknown_properties(dict.fromkeys(other, ""))]


PREFIXES = (
    *("producer.", "consumer.", "admin.", "key.converter.", "value.converter.", "header.converter."),
    *("config.providers.", "config.storage.", "offset.storage.", "status.storage.", "metrics.", "topic."),
)
"""Prefixes of settings that another component checks."""


def listener(config: WorkerConfig) -> HttpSettings:
    """Returns the address of the REST server: the first of `listeners`. Raises ConfigError if it is invalid."""
    listeners = config["listeners"]
    text = listeners[0] if listeners else ""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as e:
        raise ConfigError(f"listeners: {text}: {e}") from None
    if parts.scheme.lower() != "http":
        raise ConfigError(
            f"listeners: {text!r}: must be http://HOST:PORT (for https use a reverse proxy that terminates TLS)"
        )
    return HttpSettings(
        host=parts.hostname or EVERY_ADDRESS,
        port=8083 if port is None else port,
        max_head_bytes=config["rest.max.head.bytes"],
    )


def guarded(app: StartingApp, config: WorkerConfig, http: HttpSettings) -> Guard:
    """Returns the REST app behind its authentication. Raises ConfigError if a secret is missing or too short.

    Without `rest.auth.token` and `rest.auth.users` REST is open, as in Kafka Connect. At a loopback address it then
    accepts only requests whose Host header names this machine.
    """
    token = SecretStr(config["rest.auth.token"].value) if config["rest.auth.token"].value else None
    users: dict[str, Credential] = {}
    for pair in filter(None, config["rest.auth.users"].value.split(",")):
        name, colon, password = pair.strip().partition(":")
        if not colon or not name:
            raise ConfigError("rest.auth.users: must be user:password, comma-separated")
        users[name] = Credential(secret=SecretStr(password), scopes=("admin",))
    secrets = [*([token] if token else []), *(user.secret for user in users.values())]
    try:
        check_secrets(http.host, secrets, insecure_no_auth=True)
    except ConfigError as e:
        raise ConfigError(str(e).replace("auth_token, credentials", "rest.auth.token, rest.auth.users")) from None
    local_hosts_only = not secrets and is_loopback(http.host) and not config["rest.advertised.host.name"]
    # Needs the extra `server`, which is not required to read the settings.
    from penstock.api.http.auth import Guard

    return Guard(app, auth_token=token, credentials=users, local_hosts_only=local_hosts_only)


def is_open(config: WorkerConfig, http: HttpSettings) -> bool:
    """Returns whether REST has no authentication and other machines can reach it."""
    has_auth = config["rest.auth.token"].value or config["rest.auth.users"].value
    return not has_auth and not is_loopback(http.host)


def advertised(config: WorkerConfig, http: HttpSettings, port: int) -> str:
    """Returns the worker's id: the `host:port` at which other workers reach it. `port` is the listener's."""
    host = config["rest.advertised.host.name"] or (
        socket.getfqdn() if http.host in (EVERY_ADDRESS, "::") else http.host
    )
    advertised_port = config["rest.advertised.port"] or port
    return f"[{host}]:{advertised_port}" if ":" in host else f"{host}:{advertised_port}"
