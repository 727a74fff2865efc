"""Converters between bytes in Kafka and values with schemas: the base classes of the built-in and of a user's
converters.

A converter never waits. If it needs data of a schema registry, it raises `MoreNeeded` with a function that fetches the
data. The task awaits that function, then converts again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from penstock.shared.common.records import Headers
from penstock.shared.connect.config_def import ConfigDef
from penstock.shared.connect.schema import Schema
from penstock.shared.connect.version import CONNECT_VERSION

Converted = tuple[Schema | None, Any]


class Converter(ABC):
    """Turns keys or values into bytes and back; raises DataError."""

    kafka_class: ClassVar[str | None] = None

    def version(self) -> str:
        """Return the converter's version: by default, that of Connect."""
        return CONNECT_VERSION

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        """Take the converter's settings, without their prefix, such as `key.converter.`."""

    @abstractmethod
    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        """Return the bytes of a value."""

    @abstractmethod
    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        """Return the value of the bytes, with its schema."""

    def to_connect_values(self, topic: str, datas: Sequence[bytes | None]) -> tuple[Schema | None, list[Any]] | None:
        """Convert many values that share one schema at once.

        Returns None or raises an error if that is not possible, for example because the schemas differ. The caller then
        converts the values one by one. The default returns None.
        """
        return None

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()


class HeaderConverter(ABC):
    """Turns headers' values into bytes and back; raises DataError."""

    kafka_class: ClassVar[str | None] = None

    def version(self) -> str:
        """Return the header converter's version: by default, that of Connect."""
        return CONNECT_VERSION

    def configure_headers(self, configs: Mapping[str, Any]) -> None:
        """Take the converter's settings, without their prefix."""

    @abstractmethod
    def from_connect_header(self, topic: str, name: str, schema: Schema | None, value: Any) -> bytes | None:
        """Return the bytes of a header's value."""

    @abstractmethod
    def to_connect_header(self, topic: str, name: str, data: bytes | None) -> Converted:
        """Return the schema and the value of a header's bytes."""

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()


class ConverterAndHeaderConverter(Converter, HeaderConverter):
    """A converter of keys and values that converts headers in the same way."""

    def configure_headers(self, configs: Mapping[str, Any]) -> None:
        self.configure(configs, False)

    def from_connect_header(self, topic: str, name: str, schema: Schema | None, value: Any) -> bytes | None:
        return self.from_connect_data(topic, schema, value)

    def to_connect_header(self, topic: str, name: str, data: bytes | None) -> Converted:
        return self.to_connect_data(topic, data)
