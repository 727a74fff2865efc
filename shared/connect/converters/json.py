"""JsonConverter: values as JSON, with their schemas (`schemas.enable`, the default) or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from penstock.shared.common.records import Headers
from penstock.shared.connect.config_def import ConfigDef, Importance, Type, at_least, one_of
from penstock.shared.connect.converter import Converted, Converter, HeaderConverter
from penstock.shared.connect.converters.json_schema import (
    has_decimals,
    schema_from_json,
    schema_to_json,
    value_from_json,
    value_to_json,
)
from penstock.shared.connect.errors import DataError
from penstock.shared.connect.schema import Schema

NOT_AN_ENVELOPE = (
    'JsonConverter with schemas.enable requires "schema" and "payload" fields and may not contain additional fields. '
    "If you are trying to deserialize plain JSON data, set schemas.enable=false in your converter configuration."
)
NO_JSON = "Converting byte[] to Kafka Connect data failed due to serialization error: "
"""The reason in dead letters for bytes that are not JSON."""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    schema: msgspec.Raw
    payload: msgspec.Raw


class JsonConverter(Converter, HeaderConverter):
    """JSON. With an envelope the value has a schema; without one it is plain JSON."""

    kafka_class = "org.apache.kafka.connect.json.JsonConverter"

    def __init__(self) -> None:
        self._enveloped = True
        self._numeric = False
        self._replace_null = True
        self._cache_size = 1000
        self._read: dict[bytes, tuple[Schema | None, bool]] = {}
        self._written: dict[Schema, bytes] = {}
        self._decode = msgspec.json.Decoder().decode
        self._decode_exactly = msgspec.json.Decoder(float_hook=Decimal).decode
        self._encode = msgspec.json.Encoder(decimal_format="number").encode
        self._decode_envelope = msgspec.json.Decoder(_Envelope).decode

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define(
                "schemas.enable", Type.BOOLEAN, True, Importance.HIGH, "Whether each value is stored with its schema."
            )
            .define(
                "schemas.cache.size",
                Type.INT,
                1000,
                Importance.HIGH,
                "Maximum number of schemas in the cache.",
                at_least(0),
            )
            .define(
                "decimal.format",
                Type.STRING,
                "BASE64",
                Importance.LOW,
                "How decimals are written: BASE64 of their unscaled bytes, or NUMERIC.",
                one_of("BASE64", "NUMERIC", ignore_case=True),
            )
            .define(
                "replace.null.with.default",
                Type.BOOLEAN,
                True,
                Importance.LOW,
                "Whether a null is replaced by the default value of its field.",
            )
        )

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        values = self.config().parse(configs)
        self._enveloped = values["schemas.enable"]
        self._cache_size = values["schemas.cache.size"]
        self._numeric = values["decimal.format"].upper() == "NUMERIC"
        self._replace_null = values["replace.null.with.default"]

    def configure_headers(self, configs: Mapping[str, Any]) -> None:
        self.configure(configs, False)

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if schema is None and value is None:
            return None
        payload = value_to_json(schema, value, self._numeric, self._replace_null)
        try:
            encoded = self._encode(payload)
        except (TypeError, ValueError, OverflowError) as e:
            raise DataError(f"Converting Kafka Connect data to byte[] failed due to serialization error: {e}") from e
        if not self._enveloped:
            return encoded
        return b'{"schema":' + self._schema_bytes(schema) + b',"payload":' + encoded + b"}"

    def _schema_bytes(self, schema: Schema | None) -> bytes:
        if schema is None:
            return b"null"
        try:
            known = self._written.get(schema)
        except TypeError:  # a default that is not hashable
            return self._encode(schema_to_json(schema, self._numeric))
        if known is None:
            known = self._encode(schema_to_json(schema, self._numeric))
            if len(self._written) < self._cache_size:
                self._written[schema] = known
        return known

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        if data is None or not self._enveloped:
            if not data:
                return None, None
            try:
                return None, self._decode(data)
            except msgspec.DecodeError as e:
                raise DataError(NO_JSON) from e
        try:
            envelope = self._decode_envelope(data)
        except msgspec.ValidationError:
            raise DataError(NOT_AN_ENVELOPE) from None
        except msgspec.DecodeError as e:
            raise DataError(NO_JSON) from e
        schema, exactly = self._read_envelope_schema(bytes(envelope.schema))
        decode = self._decode_exactly if exactly else self._decode
        return schema, value_from_json(schema, decode(envelope.payload), self._replace_null)

    def to_connect_values(self, topic: str, datas: Sequence[bytes | None]) -> tuple[Schema | None, list[Any]] | None:
        if self._enveloped:
            return None
        decode = self._decode
        try:
            return None, [decode(data) if data else None for data in datas]
        except msgspec.DecodeError:
            return None

    def _read_envelope_schema(self, raw: bytes) -> tuple[Schema | None, bool]:
        """The schema, and whether its values must be read without floats."""
        if raw in self._read:
            return self._read[raw]
        schema = schema_from_json(self._decode_exactly(raw))
        found = schema, has_decimals(schema)
        if len(self._read) < self._cache_size:
            self._read[raw] = found
        return found

    def from_connect_header(self, topic: str, name: str, schema: Schema | None, value: Any) -> bytes | None:
        return self.from_connect_data(topic, schema, value)

    def to_connect_header(self, topic: str, name: str, data: bytes | None) -> Converted:
        return self.to_connect_data(topic, data)
