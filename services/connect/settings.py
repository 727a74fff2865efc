"""Reads a worker's settings from its command line: a properties file as Kafka Connect's, overridden by flags.

`--group.id=orders` is `group.id=orders` in the file. REST's address is the first of `listeners`. Other workers and
clients get the address in `rest.advertised.host.name` and `rest.advertised.port`, by default the listener's own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import SecretStr

from penstock.api.settings import Credential, is_loopback, require_auth
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
    """Reads the command line with its files. A ConfigError names the error."""
    files, flags = _split(arguments)
    if not files:
        raise ConfigError(f"name the worker's properties file: penstock connect {mode} WORKER.properties …")
    if mode == "distributed" and len(files) > 1:
        raise ConfigError("a distributed worker takes no connectors on the command line: create them over REST")
    log = {name.removeprefix("log."): flags.pop(name) for name in LOG_FLAGS if name in flags}
    props = read_properties(files[0]) | flags
    find = Plugins.installed().converter_class
    config = DistributedConfig(props, find) if mode == "distributed" else StandaloneConfig(props, find)
    return CommandLine(
        mode, config, {path: read_properties(path) for path in files[1:]}, LogSettings.model_validate(log)
    )


def _split(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    files: list[Path] = []
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            files.append(Path(argument))
            continue
        name, equals, value = argument[2:].partition("=")
        if not equals:
            value = next(rest, "")
            if not value:
                raise ConfigError(f"--{name}: needs a value")
        flags[name] = value
    return files, flags


def misspelled(config: WorkerConfig) -> list[str]:
    """Returns, for the log, the settings that neither the worker nor its clients know, each with a suggestion."""
    known = [key.name for key in config.definition]
    given = [name for name in config.props if name not in config.definition and not _is_prefixed(name)]
    return [f"{name}{nearest(name, known)}" for name in unknown_properties(dict.fromkeys(given, ""))]


PREFIXES = (
    *("producer.", "consumer.", "admin.", "key.converter.", "value.converter.", "header.converter."),
    *("config.providers.", "config.storage.", "offset.storage.", "status.storage.", "metrics.", "topic."),
)
"""Another component knows the settings that begin with one of these."""


def _is_prefixed(name: str) -> bool:
    return name.startswith(PREFIXES)


def listener(config: WorkerConfig) -> HttpSettings:
    """Returns REST's listener: the first of `listeners`. Raises ConfigError if it is invalid."""
    given = config["listeners"]
    text = given[0] if given else ""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as e:
        raise ConfigError(f"listeners: {text}: {e}") from None
    if parts.scheme.lower() != "http":
        raise ConfigError(
            f"listeners: {text!r}: must be http://HOST:PORT (put a proxy that speaks TLS in front for https)"
        )
    return HttpSettings(
        host=parts.hostname or EVERY_ADDRESS,
        port=8083 if port is None else port,
        max_head_bytes=config["rest.max.head.bytes"],
    )


def guarded(app: StartingApp, config: WorkerConfig, http: HttpSettings) -> Guard:
    """Returns REST behind its authentication. Raises ConfigError if a secret is too short, or a user has none.

    Without authentication it is open, as Kafka Connect's is. On a loopback address it then accepts only this machine's
    own names.
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
        require_auth(http.host, secrets, insecure_no_auth=True)
    except ConfigError as e:
        raise ConfigError(str(e).replace("auth_token, credentials", "rest.auth.token, rest.auth.users")) from None
    own_names_only = not secrets and is_loopback(http.host) and not config["rest.advertised.host.name"]
    from penstock.api.http.auth import Guard  # needs the extra `server`, which a reader of the settings may lack

    return Guard(app, auth_token=token, credentials=users, local_hosts_only=own_names_only)


def is_open(config: WorkerConfig, http: HttpSettings) -> bool:
    """Returns whether REST is open at an address that other machines reach, as Kafka Connect's is."""
    asks = config["rest.auth.token"].value or config["rest.auth.users"].value
    return not asks and not is_loopback(http.host)


def advertised(config: WorkerConfig, http: HttpSettings, port: int) -> str:
    """Returns the `host:port` by which other workers reach this one."""
    host = config["rest.advertised.host.name"] or (
        socket.getfqdn() if http.host in (EVERY_ADDRESS, "::") else http.host
    )
    shown = config["rest.advertised.port"] or port
    return f"[{host}]:{shown}" if ":" in host else f"{host}:{shown}"
