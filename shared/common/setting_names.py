"""The names of all settings, to tell a misspelled name from one that another command reads.

One file and one environment serve every command, so each ignores the settings of the others. A name that no command
knows is a typing error. It is rejected, with the nearest known name.

>>> nearest("htpp", ["http", "kafka"])
' (did you mean http?)'
>>> nearest("colour", ["http", "kafka"])
''
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

ENV_PREFIX = "PENSTOCK_"
DELIMITER = "__"

SETTINGS_OF_ALL_COMMANDS = frozenset(
    (
        "after",
        "application",
        "auth_token",
        "batch_records_max",
        "broker",
        "buffered_records_max",
        "closed_retention_days",
        "commit_bytes",
        "commit_interval_ms",
        "commit_records",
        "compaction",
        "connect",
        "connect_files",
        "connect_port",
        "connect_worker",
        "conservation_only",
        "consumer",
        "continuation",
        "cors_origins",
        "create_dead_letter_topics",
        "credentials",
        "data_dir",
        "dead_letter_topic",
        "delete_covered",
        "deserialization_exception_handler",
        "differences_max",
        "every",
        "expect_records",
        "files",
        "format",
        "from_",
        "group_id",
        "handler",
        "handler_timeout_ms",
        "http",
        "ingest",
        "insecure_no_auth",
        "json_line",
        "kafka",
        "kafka_silence_max_ms",
        "kafka_timeout_ms",
        "key",
        "key_base64",
        "key_bytes_max",
        "key_column",
        "key_from",
        "key_to",
        "lag_interval_ms",
        "lake",
        "lake_options",
        "live_from",
        "log",
        "max_attempts",
        "max_concurrency",
        "max_future_ms",
        "max_request_size",
        "on_missing_source_offsets",
        "optimize_files_max",
        "ordering",
        "partitions",
        "processing_exception_handler",
        "processing_guarantee",
        "producer",
        "production_exception_handler",
        "queries",
        "reader_options",
        "replication_factor",
        "retention_hours",
        "retry",
        "rows_max",
        "run_records_max",
        "runs_max",
        "sample",
        "services",
        "services_auth_token",
        "services_timeout_ms",
        "shutdown_timeout_ms",
        "spark",
        "start_from_group_offsets",
        "status",
        "store",
        "streams",
        "stuck_after_ms",
        "time",
        "time_unit",
        "timestamp_column",
        "to",
        "topic",
        "topics",
        "topology",
        "topology_options",
        "transaction_timeout_ms",
        "until",
        "vacuum_every",
        "value",
        "value_column",
        "workers",
    )
)
"""The top-level names. The names within a section are checked by the command that reads it."""

OTHER_VARIABLES = frozenset(
    f"{ENV_PREFIX}{name}"
    for name in ("CONFIG", "CONNECT_TOKEN", "CONNECT_URL", "CONNECT_USER", "MAVEN_REPOSITORY", "NO_INSTALL")
)
"""Variables that are not settings of a command."""

# Kubernetes puts the address of each Service into every container. A Service named penstock or penstock-producer makes
# variables with Penstock's prefix that the user did not set.
_OF_KUBERNETES = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_KUBERNETES_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def paths(model: type[BaseModel], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Each setting of a model as its path of names, from the outermost in. Sections are included."""
    for name, field in model.model_fields.items():
        yield (*before, name)
        if (section := _section(field.annotation)) is not None:
            yield from paths(section, (*before, name))


def flag(path: Sequence[str]) -> str:
    """The flag of a setting."""
    return f"--{'.'.join(path).replace('_', '-')}"


def variable(path: Sequence[str]) -> str:
    """The environment variable of a setting."""
    return f"{ENV_PREFIX}{DELIMITER.join(path).upper()}"


_HINTS = {
    "enable_auto_commit": 'use commit_strategy="auto", or "none" to commit yourself',
    "enable_auto_offset_store": "what a poll returned counts as processed when the next is made; see commit_strategy",
    "key_serializer": "give it to Producer(...)",
    "value_serializer": "give it to Producer(...)",
    "key_deserializer": "give it to Consumer(...)",
    "value_deserializer": "give it to Consumer(...)",
    "partitioner": "give it to Producer(...)",
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
    "api_version": "it is found out from the broker",
}
"""Names of other Kafka clients (Java, aiokafka, librdkafka)."""


def hint(path: Sequence[str], known: Iterable[str], of_kafka: Collection[str] = ()) -> str:
    """A hint at the right name for an unknown setting, with a space in front. Dots count as underscores.

    `of_kafka` are the names of KafkaSettings, for a hint in another section.

    >>> hint(["enable.auto.commit"], [])
    ' (use commit_strategy="auto", or "none" to commit yourself)'
    >>> hint(["group.id"], ["group_id"]), hint(["consumer", "grup_id"], ["group_id"])
    (' (use group_id)', ' (did you mean consumer.group_id?)')
    """
    ours, known = path[-1].replace(".", "_").lower(), set(known)
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
    """One text for each invalid top-level key of a settings file."""
    known = model.model_fields.keys() | SETTINGS_OF_ALL_COMMANDS
    return [f"{key}: no such setting{nearest(key, known)}" for key in keys if key not in known]


def unknown_variables(model: type[BaseModel], environ: Mapping[str, str]) -> list[str]:
    """One text for each invalid variable with Penstock's prefix, without the variable's value."""
    spelled = {variable(path) for path in paths(model)} | {variable([name]) for name in SETTINGS_OF_ALL_COMMANDS}
    return [
        f"{name}: no such setting{nearest(name.upper(), spelled)}"
        for name, value in environ.items()
        if name.upper().startswith(ENV_PREFIX) and not _is_known_variable(model, name.upper(), value)
    ]


def unknown_flags(model: type[BaseModel], flags: Iterable[str]) -> str:
    """The unknown flags as text, with the most similar known ones."""
    spelled = [flag(path) for path in paths(model)]
    return ", ".join(name + nearest(name, spelled) for name in flags)


def siblings(model: type[BaseModel], path: Sequence[str]) -> Iterable[str]:
    """The valid names beside a path's last one; empty if any name is valid there."""
    at: Any = model
    for name in path[:-1]:
        section = _section(at)
        if section is not None:
            field = section.model_fields.get(name)
            at = None if field is None else field.annotation
        elif get_origin(at) is dict:
            at = get_args(at)[1]
    section = _section(at)
    return () if section is None else section.model_fields


def _is_known_variable(model: type[BaseModel], name: str, value: str) -> bool:
    if name in OTHER_VARIABLES or _OF_KUBERNETES.search(name):
        return True
    if name.endswith("_PORT") and _KUBERNETES_ADDRESS.match(value):
        return True
    first, *rest = name.removeprefix(ENV_PREFIX).lower().split(DELIMITER)
    if first not in model.model_fields:
        return first in SETTINGS_OF_ALL_COMMANDS
    at: Any = model.model_fields[first].annotation
    for part in rest:
        section = _section(at)
        if section is None:
            return _is_table(at)
        if part not in section.model_fields:
            return False
        at = section.model_fields[part].annotation
    return True


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _is_table(annotation: Any) -> bool:
    """Return whether the section is a table whose keys the user chooses, so that no key is unknown."""
    return get_origin(annotation) is dict or any(get_origin(one) is dict for one in get_args(annotation))
