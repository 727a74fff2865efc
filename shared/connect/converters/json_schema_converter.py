"""JsonSchemaConverter: values in JSON, with their JSON Schemas in a schema registry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from penstock.shared.common.records import Headers
from penstock.shared.connect.config_def import ConfigDef, Importance, Type, one_of
from penstock.shared.connect.converter import Converted, Converter
from penstock.shared.connect.converters.json_schema import has_decimals
from penstock.shared.connect.converters.json_schema_documents import (
    from_json,
    from_json_schema,
    to_json,
    to_json_schema,
)
from penstock.shared.connect.converters.schema_registry_serde import Registry, framed, parsed, registry_config, unframed
from penstock.shared.connect.errors import DataError
from penstock.shared.connect.schema import Schema, infer_schema

KIND = "JSON"


class JsonSchemaConverter(Converter):
    """JSON in the registry's wire format. A value to write needs a schema, unless it is a plain scalar."""

    kafka_class = "io.confluent.connect.json.JsonSchemaConverter"

    def __init__(self) -> None:
        self._registry: Registry
        self._numeric = False
        self._read: dict[int, tuple[Schema | None, bool]] = {}
        self._written: dict[Schema, str] = {}
        self._decode = msgspec.json.Decoder().decode
        self._decode_exactly = msgspec.json.Decoder(float_hook=Decimal).decode
        self._encode = msgspec.json.Encoder(decimal_format="number").encode

    @classmethod
    def config(cls) -> ConfigDef:
        return registry_config().define(
            "decimal.format",
            Type.STRING,
            "BASE64",
            Importance.LOW,
            "How decimals are written: BASE64 of their unscaled bytes, or NUMERIC.",
            one_of("BASE64", "NUMERIC", ignore_case=True),
        )

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        self._numeric = self.config().parse(configs)["decimal.format"].upper() == "NUMERIC"
        self._registry = Registry.of(configs, KIND, is_key=is_key)

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if value is None and (schema is None or not schema.has_default):
            return None
        schema = schema or infer_schema(value)
        if schema is None:
            raise DataError("JsonSchemaConverter needs a schema for a value that is not a scalar")
        id, _ = self._registry.to_write(topic, self._json_schema_text(schema), schema.name)
        payload = to_json(schema, value, self._numeric)
        try:
            return framed(id, self._encode(payload))
        except (TypeError, ValueError, OverflowError) as e:
            raise DataError(f"Converting Kafka Connect data to byte[] failed due to serialization error: {e}") from e

    def _json_schema_text(self, schema: Schema) -> str:
        try:
            known = self._written.get(schema)
        except TypeError:  # a default that is not hashable
            return json.dumps(to_json_schema(schema), separators=(",", ":"))
        if known is None:
            known = self._written[schema] = json.dumps(to_json_schema(schema), separators=(",", ":"))
            if len(self._written) > self._registry.cache_size:
                self._written.pop(next(iter(self._written)))
        return known

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        if data is None:
            return None, None
        id, encoded = unframed(data)
        schema, exactly = self._schema_by_id(id)
        try:
            payload = (self._decode_exactly if exactly else self._decode)(encoded)
        except msgspec.DecodeError as e:
            raise DataError(f"Failed to deserialize data for topic {topic} to JSON, schema {id}: {e}") from e
        return schema, from_json(schema, payload)

    def _schema_by_id(self, id: int) -> tuple[Schema | None, bool]:
        """The schema, and whether its values must be read without floats."""
        if id not in self._read:
            found = self._registry.schema(id)
            references = {name: json.loads(text) for name, text in found.references}
            schema = from_json_schema(parsed(found), references)
            self._read[id] = schema, has_decimals(schema)
            if len(self._read) > self._registry.cache_size:
                self._read.pop(next(iter(self._read)))
        return self._read[id]
