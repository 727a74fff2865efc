"""The predicates that are part of Penstock: HasHeaderKey, RecordIsTombstone, TopicNameMatches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.shared.connect.config_def import MEDIUM, NO_DEFAULT, ConfigDef, Type, non_empty, regex
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.transform import Predicate

PACKAGE = "org.apache.kafka.connect.transforms.predicates."


class HasHeaderKey(Predicate):
    """Records with a header of that name."""

    kafka_class = PACKAGE + "HasHeaderKey"

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define("name", Type.STRING, NO_DEFAULT, MEDIUM, "Name of the header.", non_empty)

    def configure(self, values: Mapping[str, Any]) -> None:
        self._name = values["name"]

    def test(self, record: ConnectRecord) -> bool:
        return any(header.name == self._name for header in record.headers)


class RecordIsTombstone(Predicate):
    """Records without a value."""

    kafka_class = PACKAGE + "RecordIsTombstone"

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()

    def test(self, record: ConnectRecord) -> bool:
        return record.value is None


class TopicNameMatches(Predicate):
    """Records whose topic matches the pattern as a whole."""

    kafka_class = PACKAGE + "TopicNameMatches"

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define(
            "pattern", Type.STRING, NO_DEFAULT, MEDIUM, "Regular expression that the topic name must match.", regex
        )

    def configure(self, values: Mapping[str, Any]) -> None:
        self._pattern = re.compile(values["pattern"])

    def test(self, record: ConnectRecord) -> bool:
        return self._pattern.fullmatch(record.topic) is not None
