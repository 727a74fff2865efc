"""Reads the command line of `penstock connect`: Kafka Connect's properties files, overridden by flags.

`--group.id=orders` overrides the `group.id` of the worker's file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.services.connect.property_files import ConnectorFile, read_connector_file
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.setting_names import nearest
from penstock.shared.common.settings import LogSettings
from penstock.shared.common.user_modules import add_to_search_path
from penstock.shared.connect.config_def import Type, parse
from penstock.shared.connect.config_provider import ConfigTransformer
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.runtime.client_settings import unknown_properties
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.worker_config import StandaloneConfig, WorkerConfig

Mode = Literal["standalone", "distributed"]

LOG_FLAGS = ("log.level", "log.format")
PREFIXES = (
    *("producer.", "consumer.", "admin.", "key.converter.", "value.converter.", "header.converter."),
    *("config.providers.", "config.storage.", "offset.storage.", "status.storage."),
)
"""Prefixes of settings that the worker passes on: to its clients, converters, config providers or storage topics."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The parsed command line: the worker's settings, and a standalone worker's connectors by file."""

    config: DistributedConfig | StandaloneConfig
    connectors: dict[Path, ConnectorFile]
    log: LogSettings


def read_command_line(mode: Mode, arguments: Sequence[str]) -> CommandLine:
    """Read the command line of `penstock connect` and the files that it names.

    The current folder is added to Python's search path, so that the user's connectors and converters are found there.
    Raises ConfigError if the command line, a file or a setting of the worker is invalid.
    """
    files, flags = _split_arguments(arguments)
    if not files:
        raise ConfigError(f"the worker's properties file is missing: penstock connect {mode} WORKER.properties …")
    if mode == "distributed" and len(files) > 1:
        raise ConfigError("a distributed worker does not accept connectors on the command line; create them over REST")
    log = {name.removeprefix("log."): flags.pop(name) for name in LOG_FLAGS if name in flags}
    props = read_connector_file(files[0]).config | flags
    add_to_search_path()
    config = _resolved_worker_config(DistributedConfig if mode == "distributed" else StandaloneConfig, props)
    connectors = {path: read_connector_file(path) for path in files[1:]}
    return CommandLine(config, connectors, LogSettings.model_validate(log))


def _resolved_worker_config(
    config_class: type[DistributedConfig | StandaloneConfig], props: Mapping[str, str]
) -> DistributedConfig | StandaloneConfig:
    """Return the worker's settings with variables replaced by their values. An error has the variables instead."""
    names = parse("config.providers", Type.LIST, props.get("config.providers", ""))
    transformer = ConfigTransformer.of_worker(names, props)
    try:
        resolved = transformer.resolve(props)
        return config_class(resolved, Plugins.of_worker(resolved).converter_class)
    except ConfigError as e:
        raise ConfigError(transformer.masking(props)(str(e))) from None


def _split_arguments(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Return the files, and the flags by name, of a worker's command line.

    Accepts `--name=value` and `--name value`.
    """
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


def misspelled_settings(config: WorkerConfig) -> list[str]:
    """Return the settings of a worker's command line and file that neither the worker nor its Kafka clients know.

    Settings with a prefix of `PREFIXES` are left out. Each setting is returned as its name and a hint with the most
    similar known name, if there is one.
    """
    known = [key.name for key in config.definition]
    other = [name for name in config.props if name not in config.definition and not name.startswith(PREFIXES)]
    return [f"{name}{nearest(name, known)}" for name in unknown_properties(dict.fromkeys(other, ""))]
