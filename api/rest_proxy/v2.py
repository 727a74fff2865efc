"""Confluent REST Proxy v2: produce (json, binary), and topics with partitions, so that its clients work unchanged.

As in REST Proxy, an accepted request with a valid body is answered with 200, and with an `error_code` for each record:
null if it is stored, 1 if the error is permanent, 2 if the record may be sent again. Avro, Protobuf, JSON Schema and
consumers are not supported.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.body import next_turn, read_body
from penstock.api.http.problem import RETRIABLE, ErrorKind, Problem
from penstock.api.http.status_codes import (
    NOT_FOUND,
    OK,
    TOO_MANY_REQUESTS,
    UNPROCESSABLE_CONTENT,
    UNSUPPORTED_MEDIA_TYPE,
)
from penstock.api.ingest.admission import client_of
from penstock.api.ingest.event import EventRejected
from penstock.api.rest_proxy.embedded_format import INVALID, EmbeddedFormat, decode_embedded, decode_request
from penstock.api.rest_proxy.partitions import describe_partition, first_and_next_offset
from penstock.api.rest_proxy.record_errors import error_code_of, error_message_of
from penstock.api.rest_proxy.rest_producer import RestProducer
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.admin.types import PartitionDescription
from penstock.shared.common.records import ProducerRecord, RecordMetadata, TopicPartition

V2_TYPE = "application/vnd.kafka.v2+json"
_PRODUCE_TYPE = re.compile(r"application/vnd\.kafka\.(json|binary)\.v2\+json")
BODY = {
    f"application/vnd.kafka.{name}.v2+json": {
        "schema": {
            "type": "object",
            "required": ["records"],
            "properties": {"records": {"type": "array", "items": {"type": "object"}, "minItems": 1}},
            "examples": [{"records": [{"key": key, "value": value}]}],
        },
    }
    for name, key, value in (("json", "ann", {"id": 1}), ("binary", "YW5u", "eyJpZCI6MX0="))
}


class StoredRecord(TypedDict):
    """The coordinates of a stored record, or its error.

    `error_code` is null if the record is stored, 1 if the error is permanent, 2 if the record may be sent again.
    """

    partition: of.Partition | None
    offset: of.Offset | None
    error_code: Literal[1, 2] | None
    error: str | None


class ProduceResponse(TypedDict):
    """The outcome of each record, in the order of the request."""

    offsets: list[StoredRecord]
    key_schema_id: None
    value_schema_id: None


class Replica(TypedDict):
    """A replica of a partition."""

    broker: of.Broker
    leader: bool
    in_sync: bool


class PartitionOfTopic(TypedDict):
    """A partition with its replicas."""

    partition: of.Partition
    leader: of.Broker | None
    replicas: list[Replica]


class TopicWithPartitions(TypedDict):
    """A topic with its configs and partitions."""

    name: of.Topic
    configs: Annotated[dict[str, str | None], Field(examples=[{"cleanup.policy": "delete"}])]
    partitions: list[PartitionOfTopic]


class OffsetsOfPartition(TypedDict):
    """A partition's first offset and its high watermark."""

    beginning_offset: of.Offset
    end_offset: of.Offset


class BrokerIds(TypedDict):
    """The ids of the brokers."""

    brokers: list[of.Broker]


class V2Record(msgspec.Struct, forbid_unknown_fields=True):
    """One of the `records` of a v2 request."""

    key: msgspec.Raw = msgspec.Raw(b"null")
    value: msgspec.Raw = msgspec.Raw(b"null")
    partition: int | None = None


class V2Request(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a v2 request. Its fields for schemas are ignored, since formats with schemas are not supported.

    As in REST Proxy, an unknown field is an error: a misspelled `value` would store a tombstone.
    """

    records: list[V2Record]
    key_schema: Any = None
    key_schema_id: Any = None
    value_schema: Any = None
    value_schema_id: Any = None


class V2Response(JSONResponse):
    """A plain value as JSON, with v2's content type."""

    media_type = V2_TYPE

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def v2_produce_router(producer: RestProducer) -> APIRouter:
    """Return the routes `POST /topics/{topic}` and `POST /topics/{topic}/partitions/{partition}`."""
    router = APIRouter(tags=["rest proxy v2"], default_response_class=V2Response)
    openapi: dict[str, Any] = {
        "openapi_extra": {"requestBody": {"required": True, "content": BODY}},
        "responses": {200: {"model": ProduceResponse}},
    }

    @router.post("/topics/{topic}", summary="REST Proxy v2: produce", **openapi)
    async def produce_to_topic(topic: of.Topic, request: Request) -> Response:
        with producer.ingest.tracking(topic, client_of(request)):
            return await _produce_v2_records(producer, topic, None, request)

    @router.post("/topics/{topic}/partitions/{partition}", summary="REST Proxy v2: produce to a partition", **openapi)
    async def produce_to_partition(topic: of.Topic, partition: of.Partition, request: Request) -> Response:
        with producer.ingest.tracking(topic, client_of(request)):
            return await _produce_v2_records(producer, topic, partition, request)

    return router


async def _produce_v2_records(producer: RestProducer, topic: str, partition: int | None, request: Request) -> Response:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    content_type = _PRODUCE_TYPE.fullmatch(media_type)
    if content_type is None:
        detail = "Content-Type must be application/vnd.kafka.json.v2+json or application/vnd.kafka.binary.v2+json"
        raise Problem(ErrorKind(UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_MEDIA_TYPE", "Unsupported media type"), detail)
    client = client_of(request)
    body = producer.ingest.admission.body(request)
    partitions = await producer.check(topic, client)
    if partition is not None and partition not in partitions:
        raise Problem(ErrorKind(NOT_FOUND, "UNKNOWN_PARTITION", "Partition not found"), "Partition not found.")
    content = await read_body(body, producer.settings.max_body_bytes)
    embedded: EmbeddedFormat = "JSON" if content_type[1] == "json" else "BINARY"
    with await next_turn(body, 0) as turn:
        try:
            records = _decode_v2_records(content, topic, embedded, partition)
        except EventRejected as e:
            raise Problem(ErrorKind(UNPROCESSABLE_CONTENT, "INVALID_REQUEST", "Wrong request"), str(e)) from None
        producer.check_count(len(records))
        sent = await producer.send(records, partitions, turn)
    outcomes = await producer.settle(topic, sent, client)
    producer.answered(topic, OK, body)
    return V2Response(
        ProduceResponse(offsets=[_stored_record_row(o) for o in outcomes], key_schema_id=None, value_schema_id=None)
    )


def _decode_v2_records(
    body: bytes, topic: str, embedded: EmbeddedFormat, partition: int | None
) -> list[ProducerRecord | EventRejected]:
    """Return the records of a v2 request; a record that cannot be decoded is its error.

    `partition` replaces the partition of each record, unless it is None. Raises EventRejected if the body is invalid.
    """
    request = decode_request(body, V2Request)
    if not request.records:
        raise EventRejected(INVALID, "records may not be empty")
    records: list[ProducerRecord | EventRejected] = []
    for item in request.records:
        try:
            key = decode_embedded(item.key, embedded, "key")
            value = decode_embedded(item.value, embedded, "value")
        except EventRejected as e:
            records.append(e)
            continue
        records.append(ProducerRecord(topic, value, key, (), item.partition if partition is None else partition))
    return records


def _stored_record_row(outcome: RecordMetadata | BaseException) -> StoredRecord:
    if isinstance(outcome, RecordMetadata):
        return {"partition": outcome.partition, "offset": outcome.offset, "error_code": None, "error": None}
    may_retry = error_code_of(outcome) in (RETRIABLE, TOO_MANY_REQUESTS)
    return {"partition": None, "offset": None, "error_code": 2 if may_retry else 1, "error": error_message_of(outcome)}


def v2_metadata_router(admin: Admin) -> APIRouter:
    """Return the routes of topics, their partitions, and brokers."""
    router = APIRouter(tags=["rest proxy v2"], default_response_class=V2Response)

    @router.get("/topics", summary="REST Proxy v2: topic names", responses={200: {"model": list[of.Topic]}})
    async def list_topics() -> Response:
        return V2Response(await admin.list_topics())

    @router.get(
        "/topics/{topic}",
        summary="REST Proxy v2: a topic with configs and partitions",
        responses={200: {"model": TopicWithPartitions}},
    )
    async def get_topic(topic: of.Topic) -> Response:
        rows = await _partition_rows(admin, topic)
        configs = await admin.describe_configs(topic)
        return V2Response(TopicWithPartitions(name=topic, configs=configs, partitions=rows))

    @router.get(
        "/topics/{topic}/partitions",
        summary="REST Proxy v2: a topic's partitions",
        responses={200: {"model": list[PartitionOfTopic]}},
    )
    async def list_partitions(topic: of.Topic) -> Response:
        return V2Response(await _partition_rows(admin, topic))

    @router.get(
        "/topics/{topic}/partitions/{partition}",
        summary="REST Proxy v2: a partition",
        responses={200: {"model": PartitionOfTopic}},
    )
    async def get_partition(topic: of.Topic, partition: of.Partition) -> Response:
        return V2Response(_row_of_partition(await describe_partition(admin, topic, partition)))

    @router.get(
        "/topics/{topic}/partitions/{partition}/offsets",
        summary="REST Proxy v2: a partition's offsets",
        responses={200: {"model": OffsetsOfPartition}},
    )
    async def get_partition_offsets(topic: of.Topic, partition: of.Partition) -> Response:
        description = await describe_partition(admin, topic, partition)
        earliest, latest = await first_and_next_offset(admin, TopicPartition(topic, description.partition))
        return V2Response(OffsetsOfPartition(beginning_offset=earliest, end_offset=latest))

    @router.get("/brokers", summary="REST Proxy v2: broker ids", responses={200: {"model": BrokerIds}})
    async def list_brokers() -> Response:
        return V2Response(BrokerIds(brokers=[broker.node_id for broker in (await admin.cluster()).brokers]))

    return router


def v2_consumers_router() -> APIRouter:
    """Return v2's consumer routes, which answer 404 and explain that consumers are not supported.

    Without the explanation, clients would conclude that their consumer has expired.
    """
    router = APIRouter(include_in_schema=False)
    detail = "consumers of REST Proxy v2 are not supported: use a Kafka client, or a sink connector (POST /connectors)"

    async def reject_consumer_request() -> Response:
        raise Problem(ErrorKind(NOT_FOUND, "NO_CONSUMERS", "No consumers"), detail)

    for path in ("/consumers", "/consumers/{rest:path}"):
        router.add_api_route(path, reject_consumer_request, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    return router


async def _partition_rows(admin: Admin, topic: str) -> list[PartitionOfTopic]:
    return [_row_of_partition(p) for p in (await admin.describe_topics([topic]))[topic].partitions]


def _row_of_partition(description: PartitionDescription) -> PartitionOfTopic:
    replicas: list[Replica] = [
        {"broker": broker, "leader": broker == description.leader, "in_sync": broker in description.isr}
        for broker in description.replicas
    ]
    return {"partition": description.partition, "leader": description.leader, "replicas": replicas}
