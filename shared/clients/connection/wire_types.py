"""One version of one of Kafka's APIs, as a request that aiokafka's connection can send; wire.py lists them."""

from __future__ import annotations

import uuid
from io import BytesIO
from typing import Any

from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.types import (
    CompactString,
    Schema,
    String,
    TaggedFields,
)

from penstock.shared.common.errors import UnsupportedVersion
from penstock.shared.common.records import TopicPartition

TEXT = String("utf-8")
TEXT_FLEX = CompactString("utf-8")
TAGS = ("tags", TaggedFields)


class Uuid:
    """Kafka's uuid: sixteen bytes, as `uuid.UUID`."""

    @classmethod
    def encode(cls, value: uuid.UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> uuid.UUID:
        return uuid.UUID(bytes=data.read(16))

    @classmethod
    def repr(cls, value: uuid.UUID) -> str:
        return str(value)


NO_UUID = uuid.UUID(int=0)


class WireRequest:
    """A request of one version. aiokafka's connection calls `prepare` with the broker's versions."""

    def __init__(self, api: Api, fields: tuple[Any, ...]) -> None:
        self._api = api
        self._fields = fields
        self.name = api.name

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Any:
        low, high = versions.get(self._api.key, (0, -1))
        if not low <= self._api.version <= high:
            raise UnsupportedVersion(f"{self._api.name} v{self._api.version}: the broker speaks v{low} to v{high}")
        return self._api.struct(*self._fields)

    def __repr__(self) -> str:
        return f"{self._api.name} v{self._api.version}"


class Api:
    """One version of one of Kafka's APIs. Call it with the fields in order to make the request."""

    def __init__(
        self,
        name: str,
        key: int,
        version: int,
        request: tuple[Any, ...],
        response: tuple[Any, ...],
        *,
        flexible: bool = False,
    ) -> None:
        self.name = name
        self.key = key
        self.version = version
        if flexible:
            request = (*request, TAGS)
            response = (*response, TAGS)
        common = {"API_KEY": key, "API_VERSION": version}
        answer = type(f"{name}Response", (Response,), {**common, "SCHEMA": Schema(*response)})
        self.flexible = flexible
        self.struct = type(
            f"{name}Request",
            (RequestStruct,),
            {**common, "FLEXIBLE_VERSION": flexible, "RESPONSE_TYPE": answer, "SCHEMA": Schema(*request)},
        )

    def __call__(self, *fields: Any) -> WireRequest:
        return WireRequest(self, (*fields, {}) if self.flexible else fields)


def decode_assignment(data: bytes | None) -> frozenset[TopicPartition]:
    """Return the partitions in a member's assignment, as the consumer protocol encodes them; empty for no bytes."""
    if not data:
        return frozenset()
    return frozenset(TopicPartition(*tp) for tp in ConsumerProtocol.ASSIGNMENT.decode(data).partitions())
