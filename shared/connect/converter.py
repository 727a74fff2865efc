"""Converters: between bytes in Kafka and values with schemas. The base of those that ship and of a user's own.

A converter never waits. One that must ask a registry raises `MoreNeeded` and says how to get it: the task awaits that
and converts again.
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
        return CONNECT_VERSION

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        """Its settings, without the prefix that they have in the connector's configuration."""

    @abstractmethod
    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        """A value to bytes."""

    @abstractmethod
    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        """Bytes to a value with its schema."""

    def to_connect_values(self, topic: str, datas: Sequence[bytes | None]) -> tuple[Schema | None, list[Any]] | None:
        """Many at once where all have one schema; None where that is not so or any of them fails: go one by one."""
        return None

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()


class HeaderConverter(ABC):
    """Turns headers' values into bytes and back; raises DataError."""

    kafka_class: ClassVar[str | None] = None

    def version(self) -> str:
        return CONNECT_VERSION

    def configure_headers(self, configs: Mapping[str, Any]) -> None:
        """Its settings, without prefix."""

    @abstractmethod
    def from_connect_header(self, topic: str, name: str, schema: Schema | None, value: Any) -> bytes | None: ...

    @abstractmethod
    def to_connect_header(self, topic: str, name: str, data: bytes | None) -> Converted: ...

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()
