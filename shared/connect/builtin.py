"""The plugins that ship with Penstock: the modules of their classes, and the public modules that configurations name.

A class is imported on first use, because some need an extra. At its start, a Connect worker imports all those whose
extra is installed.
"""

from __future__ import annotations

import importlib

from penstock.shared.common.extras import needs
from penstock.shared.common.public_names import publish

_PATHS: tuple[str, ...] = (
    "connectors.file_stream.FileStreamSourceConnector",
    "connectors.file_stream.FileStreamSinkConnector",
    *(f"connectors.verifiable.{name}Connector" for name in ("MockSink", "MockSource")),
    *(f"connectors.verifiable.{name}Connector" for name in ("VerifiableSink", "VerifiableSource")),
    *("connectors.http.HttpSinkConnector", "connectors.http.HttpSourceConnector"),
    *("connectors.delta.DeltaSinkConnector", "connectors.files.FilesSinkConnector"),
    "connectors.postgres.sink.PostgresSinkConnector",
    "connectors.postgres.source.PostgresSourceConnector",
    *(
        f"converters.plain.{name}Converter"
        for name in ("Boolean", "ByteArray", "Double", "Float", "Integer", "Long", "Short", "String")
    ),
    *("converters.json.JsonConverter", "converters.avro.AvroConverter"),
    "converters.json_schema.JsonSchemaConverter",
    "converters.simple_header.SimpleHeaderConverter",
    *(
        f"transforms.{name}{part}"
        for name in (
            *("cast.Cast", "content.InsertField", "content.MaskField", "content.SetSchemaMetadata"),
            *("headers.HeaderFrom", "shape.ExtractField", "shape.Flatten", "shape.HoistField", "shape.ReplaceField"),
            "timestamps.TimestampConverter",
        )
        for part in ("Key", "Value")
    ),
    *("transforms.headers.DropHeaders", "transforms.headers.InsertHeader", "transforms.shape.ValueToKey"),
    *(f"transforms.routing.{name}" for name in ("Filter", "RegexRouter", "TimestampRouter")),
    *(f"transforms.predicates.{name}" for name in ("HasHeaderKey", "RecordIsTombstone", "TopicNameMatches")),
)
BUILTIN: dict[str, dict[str, str]] = {
    f"penstock.connect.{group}": {
        path.rpartition(".")[2]: path.rpartition(".")[0] for path in _PATHS if path.startswith(f"{group}.")
    }
    for group in ("connectors", "converters", "transforms")
}
"""By public module: the name of each class, and its module below penstock.shared.connect."""

EXTRAS = {"connectors.delta": ("streams",), "connectors.files": ("files",)}
"""Modules that import a package of an extra, and the extras they need."""


def builtin(public: str, name: str) -> type:
    """Return the class `name` of the public module `public`, a key of `BUILTIN`.

    Raises AttributeError for an unknown name, as a module does. Raises MissingExtra if the class's module imports
    a package that is not installed.
    """
    module = BUILTIN[public].get(name)
    if module is None:
        raise AttributeError(f"module {public!r} has no attribute {name!r}")
    with needs(f"{public}.{name}", *EXTRAS.get(module, ())):
        found: type = getattr(importlib.import_module(f"penstock.shared.connect.{module}"), name)
    publish(public, {name: found}, [name])
    return found
