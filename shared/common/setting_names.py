"""The names of all settings, to distinguish a misspelled name from one that another command reads.

One file and one environment serve every command, so each command ignores the settings of the others. A name that no
command knows is rejected as a misspelling, with the most similar known name. The known names are those of the settings
models. Other commands' models are imported only if the command itself lacks a name. Only their top-level names are
compared: names within a section are checked by the command that reads the section.

>>> nearest("htpp", ["http", "kafka"])
' (did you mean http?)'
>>> nearest("colour", ["http", "kafka"])
''
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin

if TYPE_CHECKING:
    # Every start of the command line imports this module, and the import of pydantic takes a tenth of a second.
    from pydantic import BaseModel

ENV_PREFIX = "PENSTOCK_"
DELIMITER = "__"

_commands: Callable[[], Iterable[type[BaseModel]]] = tuple


def register_commands(commands: Callable[[], Iterable[type[BaseModel]]]) -> None:
    """Set the function that yields the settings models of all commands.

    Models are taken from it only if the settings file or the environment has a top-level name that the running
    command's own model lacks.
    """
    global _commands
    _commands = commands


OTHER_VARIABLES = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in ("CONFIG", "CONNECT_TOKEN", "CONNECT_URL", "CONNECT_USER", "MAVEN_REPOSITORY", "NO_INSTALL")
)
"""Variables that are not settings of a command."""
INHERITED_VARIABLE = f"{ENV_PREFIX}MAVEN_REPOSITORY"
"""The only one of OTHER_VARIABLES that child processes inherit."""

# Kubernetes puts the address of each Service into every container. A Service named penstock or penstock-producer makes
# variables with Penstock's prefix that the user did not set.
_OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process, without Penstock's own variables except PENSTOCK_MAVEN_REPOSITORY.

    PENSTOCK_CONFIG names an empty file, so the child reads no settings file.

    >>> without_settings({"PATH": "/bin", "PENSTOCK_LAKE": "lake", "PENSTOCK_MAVEN_REPOSITORY": "https://m.example"})
    {'PATH': '/bin', 'PENSTOCK_MAVEN_REPOSITORY': 'https://m.example', 'PENSTOCK_CONFIG': '/dev/null'}
    """
    found = {
        name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX) or name == INHERITED_VARIABLE
    }
    # An empty file, since without PENSTOCK_CONFIG a penstock.toml of the current folder is read.
    found[f"{ENV_PREFIX}CONFIG"] = os.devnull
    return found


def paths(model: type[BaseModel], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each setting of a model: the names of its sections, outermost first, then its own name.

    Sections are included as settings.
    """
    for name, field in model.model_fields.items():
        yield (*before, name)
        if (section := _settings_section(field.annotation)) is not None:
            yield from paths(section, (*before, name))


def flag(path: Sequence[str]) -> str:
    """The name of a setting's flag."""
    return f"--{'.'.join(path).replace('_', '-')}"


def variable(path: Sequence[str]) -> str:
    """The name of a setting's environment variable."""
    return f"{ENV_PREFIX}{DELIMITER.join(path).upper()}"


_HINTS = {
    "enable_auto_commit": 'use commit_strategy="auto", or "none" to commit yourself',
    "enable_auto_offset_store": "records of a poll count as processed at the next poll; see commit_strategy",
    "key_serializer": "pass it to Producer(...)",
    "value_serializer": "pass it to Producer(...)",
    "key_deserializer": "pass it to Consumer(...)",
    "value_deserializer": "pass it to Consumer(...)",
    "partitioner": "pass it to Producer(...)",
    "max_batch_size": "use batch_size",
    "batch_num_messages": "use batch_size, in bytes",
    "queue_buffering_max_ms": "use linger_ms",
    "queue_buffering_max_kbytes": "use buffer_memory, in bytes",
    "message_timeout_ms": "use delivery_timeout_ms",
    "message_send_max_retries": "use retries",
    "message_max_bytes": "use max_request_size",
    "request_required_acks": "use acks",
    "compression_codec": "use compression_type",
    "max_in_flight": "use max_in_flight_requests_per_connection",
    "rebalance_timeout_ms": "use max_poll_interval_ms",
    "group_protocol": "a consumer always uses the classic protocol",
    "client_rack": "a consumer always reads from the leader",
    "consumer_timeout_ms": "use poll(timeout_ms)",
    "fetch_wait_max_ms": "use fetch_max_wait_ms",
    "fetch_message_max_bytes": "use max_partition_fetch_bytes",
    "queued_max_messages_kbytes": "use fetch_buffer_bytes",
    "sasl_plain_username": "use sasl_username of KafkaSettings",
    "sasl_plain_password": "use sasl_password of KafkaSettings",
    "sasl_mechanisms": "use sasl_mechanism of KafkaSettings",
    "sasl_oauth_token_provider": 'use KafkaSettings(sasl_oauth_token_provider="module:function")',
    "oauth_cb": 'use KafkaSettings(sasl_oauth_token_provider="module:function")',
    "ssl_context": "use ssl_cafile, ssl_certfile and ssl_keyfile of KafkaSettings",
    "ssl_ca_location": "use ssl_cafile of KafkaSettings",
    "ssl_certificate_location": "use ssl_certfile of KafkaSettings",
    "ssl_key_location": "use ssl_keyfile of KafkaSettings",
    "api_version": "it is negotiated with the broker",
}
"""Names of other Kafka clients (Java, aiokafka, librdkafka)."""


def hint(path: Sequence[str], known: Iterable[str], of_kafka: Collection[str] = ()) -> str:
    """A hint at the right name for an unknown setting, with a leading space; empty if no known name is similar.

    Dots in names count as underscores. If the name is in `of_kafka`, the hint says that it is a setting of
    KafkaSettings.

    >>> hint(["enable.auto.commit"], [])
    ' (use commit_strategy="auto", or "none" to commit yourself)'
    >>> hint(["group.id"], ["group_id"]), hint(["consumer", "grup_id"], ["group_id"])
    (' (use group_id)', ' (did you mean consumer.group_id?)')
    """
    ours = path[-1].replace(".", "_").lower()
    known = set(known)
    if ours in known:
        return f" (use {ours})"
    if ours in of_kafka:
        return " (it is a setting of KafkaSettings)"
    if ours in _HINTS:
        return f" ({_HINTS[ours]})"
    return nearest(".".join(path), [".".join([*path[:-1], one]) for one in known])


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the most similar known name, with a space in front; empty if none is similar."""
    found = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def unknown_keys(model: type[BaseModel], keys: Iterable[str]) -> list[str]:
    """One text for each key of a settings file that is no command's top-level name."""
    foreign = [key for key in keys if key not in model.model_fields]
    known = model.model_fields.keys() | _top_level_names(foreign)
    return [f"{key}: no such setting{nearest(key, known)}" for key in foreign if key not in known]


def unknown_variables(model: type[BaseModel], environ: Mapping[str, str]) -> list[str]:
    """One text for each variable that is meant as a setting and is unknown. The text does not contain the value.

    Only the top-level name of another command's setting is checked.
    """
    given = {name: _setting_path(name) for name, value in environ.items() if _is_setting_variable(name.upper(), value)}
    others = _top_level_names(path[0] for path in given.values() if path[0] not in model.model_fields)
    spelled = {variable(path) for path in paths(model)} | {variable([name]) for name in others}
    return [
        f"{name}: no such setting{nearest(name.upper(), spelled)}"
        for name, path in given.items()
        if not (_has_setting(model, path) if path[0] in model.model_fields else path[0] in others)
    ]


def _top_level_names(wanted: Iterable[str]) -> set[str]:
    """Return top-level setting names of commands, enough to tell which of the `wanted` names no command has.

    Commands are added one by one until their names include all `wanted` names, or no command is left.
    """
    missing = set(wanted)
    found = set[str]()
    commands = iter(_commands())
    while missing and (command := next(commands, None)) is not None:
        found |= command.model_fields.keys()
        missing -= found
    return found


def unknown_flags(model: type[BaseModel], flags: Iterable[str]) -> str:
    """The unknown flags as text for an error, each with the most similar name of a setting."""
    spelled = [flag(path) for path in paths(model)]
    return ", ".join(name + nearest(name, spelled) for name in flags)


def siblings(model: type[BaseModel], path: Sequence[str]) -> Iterable[str]:
    """The valid names beside a path's last one; empty if any name is valid there."""
    at: Any = model
    for name in path[:-1]:
        section = _settings_section(at)
        if section is not None:
            field = section.model_fields.get(name)
            at = None if field is None else field.annotation
        elif get_origin(at) is dict:
            at = get_args(at)[1]
    section = _settings_section(at)
    return () if section is None else section.model_fields


def _is_setting_variable(name: str, value: str) -> bool:
    """Return whether a variable is meant as a setting: it has the prefix, and no other use."""
    if not name.startswith(ENV_PREFIX) or name in OTHER_VARIABLES or _OF_KUBERNETES.search(name):
        return False
    return not (name.endswith("_PORT") and _KUBERNETES_ADDRESS.match(value))


def _setting_path(name: str) -> list[str]:
    return name.upper().removeprefix(ENV_PREFIX).lower().split(DELIMITER)


def _has_setting(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Return whether a settings model, which has the first name of a setting's path, has its other names too."""
    at: Any = model.model_fields[path[0]].annotation
    for part in path[1:]:
        section = _settings_section(at)
        if section is None:
            return _is_free_table(at)
        if part not in section.model_fields:
            return False
        at = section.model_fields[part].annotation
    return True


def _settings_section(annotation: Any) -> type[BaseModel] | None:
    is_model = isinstance(annotation, type) and hasattr(annotation, "model_fields")
    return cast("type[BaseModel]", annotation) if is_model else None


def _is_free_table(annotation: Any) -> bool:
    """Return whether a setting is a table whose names the user chooses, so that no name in it is unknown."""
    return get_origin(annotation) is dict or any(get_origin(one) is dict for one in get_args(annotation))
