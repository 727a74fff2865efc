"""Transforms of a record's destination: RegexRouter, TimestampRouter, Filter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.shared.common.errors import DataError
from penstock.shared.connect.config_def import HIGH, NO_DEFAULT, ConfigDef, Type, regex
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.schema import timestamp_from_ms
from penstock.shared.connect.transform import Transformation
from penstock.shared.connect.transforms.java_dates import DatePattern
from penstock.shared.connect.transforms.parts import PACKAGE


class Filter(Transformation):
    """Drops every record to which it is applied."""

    kafka_class = PACKAGE + "Filter"

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()

    def apply(self, record: ConnectRecord) -> None:
        return None


class RegexRouter(Transformation):
    """Renames the topic if the pattern matches all of it; `$1` in the replacement is the first group."""

    kafka_class = PACKAGE + "RegexRouter"

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("regex", Type.STRING, NO_DEFAULT, HIGH, "Pattern that the whole topic name must match.", regex)
            .define("replacement", Type.STRING, NO_DEFAULT, HIGH, "Replacement that makes the new topic name.")
        )

    def configure(self, values: Mapping[str, Any]) -> None:
        self._regex = re.compile(values["regex"])
        escaped = values["replacement"].replace("\\", "\\\\")
        self._replacement = re.sub(r"\$(?:(\d)|\{(\w+)\})", lambda m: f"\\g<{m[1] or m[2]}>", escaped)

    def apply(self, record: ConnectRecord) -> ConnectRecord:
        match = self._regex.fullmatch(record.topic)
        if match is None:
            return record
        try:
            return record.with_topic(match.expand(self._replacement))
        except (re.error, IndexError) as e:
            raise DataError(f"the replacement does not fit the regex: {e}") from None


class TimestampRouter(Transformation):
    """Makes the new topic's name from the old one and the record's timestamp."""

    kafka_class = PACKAGE + "TimestampRouter"

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("topic.format", Type.STRING, "${topic}-${timestamp}", HIGH,
                    "Format of the new topic. ${topic} is the old topic, ${timestamp} the record's timestamp.")
            .define("timestamp.format", Type.STRING, "yyyyMMdd", HIGH,
                    "Format of the timestamp, as a pattern of Java's SimpleDateFormat.")
        )  # fmt: skip

    def configure(self, values: Mapping[str, Any]) -> None:
        self._format = values["topic.format"]
        self._pattern = DatePattern(values["timestamp.format"])

    def apply(self, record: ConnectRecord) -> ConnectRecord:
        at = record.timestamp
        if at is None:
            raise DataError(f"Timestamp missing on record: {record.topic}")
        topic = self._format.replace("${topic}", record.topic)
        return record.with_topic(topic.replace("${timestamp}", self._pattern.format(timestamp_from_ms(at))))
