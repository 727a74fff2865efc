"""Helpers that create records and transforms."""

from __future__ import annotations

from typing import Any

from penstock.shared.connect.record import ConnectRecord, SinkRecord
from penstock.shared.connect.schema import Schema
from penstock.shared.connect.transform import Transformation


def configured(kind: type[Transformation], **settings: str) -> Transformation:
    """A configured transform. In names of settings underscores stand for dots."""
    made = kind()
    made.configure(kind.config().parse({name.replace("_", "."): value for name, value in settings.items()}))
    return made


def record(value: Any = None, schema: Schema | None = None, **more: Any) -> SinkRecord:
    return SinkRecord("clicks", 3, None, more.pop("key", None), schema, value, kafka_offset=7, **more)


def applied(kind: type[Transformation], value: Any, schema: Schema | None = None, **settings: str) -> ConnectRecord:
    """The record that a transform returns for a value."""
    found = configured(kind, **settings).apply(record(value, schema))
    assert found is not None
    return found
