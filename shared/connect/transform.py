"""The bases of transforms and predicates, for those that ship and for a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.shared.connect.config_def import ConfigDef
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.version import CONNECT_VERSION


class Transformation(ABC):
    """Returns one record for each record, or None to drop it. Never waits. Raises DataError for an invalid record."""

    kafka_class: ClassVar[str | None] = None

    def version(self) -> str:
        """Return the transform's version: by default, that of Connect."""
        return CONNECT_VERSION

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take the transform's settings, parsed by `config()`."""

    @abstractmethod
    def apply(self, record: ConnectRecord) -> ConnectRecord | None:
        """Return the transformed record, or None to drop it."""

    def close(self) -> None:
        """Release all resources. No record follows."""

    @classmethod
    @abstractmethod
    def config(cls) -> ConfigDef: ...


class Predicate(ABC):
    """Decides whether a transform applies to a record."""

    kafka_class: ClassVar[str | None] = None

    def version(self) -> str:
        """Return the predicate's version: by default, that of Connect."""
        return CONNECT_VERSION

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take the predicate's settings, parsed by `config()`."""

    @abstractmethod
    def test(self, record: ConnectRecord) -> bool:
        """Return whether the predicate is true of the record."""

    def close(self) -> None:
        """Release all resources. No record follows."""

    @classmethod
    @abstractmethod
    def config(cls) -> ConfigDef: ...
