"""Transforms and predicates: the bases of those that ship and of a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.shared.connect.config_def import ConfigDef
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.version import CONNECT_VERSION


class Transformation(ABC):
    """Makes one record of one record, or none; never waits, raises DataError."""

    kafka_class: ClassVar[str | None] = None

    def version(self) -> str:
        return CONNECT_VERSION

    def configure(self, values: Mapping[str, Any]) -> None:
        """Its settings, parsed by `config()`."""

    @abstractmethod
    def apply(self, record: ConnectRecord) -> ConnectRecord | None:
        """The record as it goes on; None: it ends here."""

    def close(self) -> None:
        """No record follows."""

    @classmethod
    @abstractmethod
    def config(cls) -> ConfigDef: ...


class Predicate(ABC):
    """Says whether a transform concerns a record."""

    kafka_class: ClassVar[str | None] = None

    def version(self) -> str:
        return CONNECT_VERSION

    def configure(self, values: Mapping[str, Any]) -> None:
        """Its settings, parsed by `config()`."""

    @abstractmethod
    def test(self, record: ConnectRecord) -> bool: ...

    def close(self) -> None:
        """No record follows."""

    @classmethod
    @abstractmethod
    def config(cls) -> ConfigDef: ...
