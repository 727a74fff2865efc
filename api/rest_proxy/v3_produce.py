"""Confluent REST Proxy v3: the routes that produce records, as a stream and as `records:batch`.

A produce request is a stream of JSON objects. Its response is a stream of delivery reports in the same order, each with
its own `error_code` (200: stored). If a request of known length has a single record and it fails, the response has the
error's status, and `Retry-After` if the same request may succeed later. A client that sends a stream without
Content-Length must read while it writes: one that does not read is disconnected after `body_timeout_ms`.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.body import (
    BodyReader,
    BodyStalled,
    ClientDisconnected,
    ServiceShuttingDown,
    body_error_status,
    next_turn,
    read_body,
)
from penstock.api.http.content_encoding import CorruptBody
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import ErrorKind, Problem, rest_error_code
from penstock.api.http.status_codes import BAD_REQUEST, CLIENT_CLOSED_REQUEST, MULTI_STATUS, OK
from penstock.api.http.turns import Turn
from penstock.api.http.unread_response import disconnect_if_unread
from penstock.api.ingest.admission import client_of
from penstock.api.ingest.event import EventRejected
from penstock.api.ingest.result import Outcome
from penstock.api.rest_proxy.embedded_format import EmbeddedFormat
from penstock.api.rest_proxy.record_errors import error_code_of, error_message_of, error_status_of
from penstock.api.rest_proxy.rest_producer import RestProducer, SentRecords
from penstock.api.rest_proxy.v3_records import (
    Decoded,
    NotAnObject,
    RecordStreamSplitter,
    id_of_invalid_entry,
    v3_entries,
    v3_entry,
    v3_record,
)
from penstock.api.rest_proxy.v3_resources import check_cluster
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import BrokerNotAvailable, KafkaTimeout
from penstock.shared.common.records import RecordMetadata
from penstock.shared.common.time_text import EPOCH

ENTRIES_MAX = 1_000
"""The most entries of one records:batch."""
GROUP_OBJECTS = 1_000
"""The most objects of a stream whose records are sent together, as a group."""
GROUPS_IN_FLIGHT_MAX = 64
"""The most groups of one stream that are not acknowledged."""
NO_RECORD = "the body holds no record"
EntryId = Annotated[str, Field(examples=["1"])]

RECORD_EXAMPLE = {
    "key": {"type": "STRING", "data": "ann"},
    "value": {"type": "JSON", "data": {"id": 1}},
    "headers": [{"name": "trace", "value": "YTE="}],
}
SCHEMA = {
    "type": "object",
    "properties": {"partition_id": {"type": "integer"}, "value": {"type": "object"}},
    "examples": [RECORD_EXAMPLE],
}
BATCH_SCHEMA = {
    "type": "object",
    "required": ["entries"],
    "properties": {"entries": {"type": "array"}},
    "examples": [{"entries": [{"id": "1", **RECORD_EXAMPLE}]}],
}
RECORD_BODY = {"required": True, "content": {"application/json": {"schema": SCHEMA}}}
BATCH_BODY = {"required": True, "content": {"application/json": {"schema": BATCH_SCHEMA}}}


class DataSize(TypedDict):
    """The type and the size in bytes of a key or a value."""

    type: Literal["BINARY", "JSON", "STRING"]
    size: of.Count


class DeliveryReport(TypedDict):
    """The coordinates of a stored record, and the sizes of its key and value."""

    cluster_id: of.ClusterId
    topic_name: of.Topic
    partition_id: of.Partition
    offset: of.Offset
    timestamp: Annotated[str, Field(examples=["2013-01-01T05:15:00Z"])]
    key: DataSize | None
    value: DataSize | None


class StoredReport(DeliveryReport):
    """The report of a stored record, as a line of the response."""

    error_code: Literal[200]


class FailedReport(TypedDict):
    """The error of a record, or the error that ended the stream."""

    error_code: Annotated[int, Field(examples=[400])]
    message: Annotated[str, Field(examples=["value is not base64"])]


class SuccessfulEntry(DeliveryReport):
    """The report of a stored entry of a batch."""

    id: EntryId


class FailedEntry(FailedReport):
    """The error of an entry of a batch."""

    id: EntryId


class BatchResponse(TypedDict):
    """The outcome of every entry of a batch."""

    successes: list[SuccessfulEntry]
    failures: list[FailedEntry]


class SentObjects(NamedTuple):
    """The result of `DeliveryReports.send`: each object's record or decoding error, and the records that were sent."""

    decoded: list[Decoded | EventRejected]
    records: SentRecords


class DeliveryReports(Response):
    """The response to a stream of records: their delivery reports, written while the records arrive."""

    def __init__(
        self,
        body: BodyReader,
        producer: RestProducer,
        topic: str,
        cluster_id: str,
        partitions: list[int],
        client: str,
    ) -> None:
        super().__init__()
        self.reader = body
        self._producer = producer
        self._topic = topic
        self._cluster_id = cluster_id
        self._partitions = partitions
        self._client = client
        self._is_connected = True
        """If False, nothing more is read or written, and the outcomes of the sent records are awaited."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        queue: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(GROUPS_IN_FLIGHT_MAX)
        status = CLIENT_CLOSED_REQUEST
        send = disconnect_if_unread(scope, send, self._producer.settings.body_timeout_ms)
        with self._producer.ingest.admission.keep_tracking(self._client):
            try:
                await send({"type": "http.response.start", "status": OK, "headers": headers})
                # An error of one task ends the other one, which may wait for it at the queue.
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._read_record_stream(queue))
                    tasks.create_task(self._write_reports(queue, send))
                if self._is_connected:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    status = OK
            except ClientDisconnected:
                # The client disconnected before the first report, or after the last one.
                pass
            finally:
                self._producer.answered(self._topic, status, self.reader)

    async def _read_record_stream(self, queue: asyncio.Queue[asyncio.Task[bytes] | None]) -> None:
        """Read the stream, and send its records in groups, one group after the other.

        For each group, put into the queue a task that returns the reports of its records. None is the end.
        """
        splitter = RecordStreamSplitter(self._producer.settings.max_line_bytes)
        count = 0
        try:
            while self._is_connected and (chunk := await self.reader.next()) is not None:
                objects = splitter.feed(chunk)
                self.reader.chunk_split(ended=len(objects), unfinished=splitter.unfinished)
                count += len(objects)
                for start in range(0, len(objects), GROUP_OBJECTS):
                    group = objects[start : start + GROUP_OBJECTS]
                    await queue.put(await self._send_group(group, count))
                if splitter.error is not None:
                    break
            splitter.close()
            if not count:
                raise NotAnObject(NO_RECORD)
        except ClientDisconnected:
            self._is_connected = False
        except (NotAnObject, BodyStalled, CorruptBody, ServiceShuttingDown) as e:
            error_code = BAD_REQUEST if isinstance(e, NotAnObject) else body_error_status(e)
            await queue.put(asyncio.ensure_future(_error_reports({"error_code": error_code, "message": str(e)}, 1)))
        await queue.put(None)

    async def _write_reports(self, queue: asyncio.Queue[asyncio.Task[bytes] | None], send: Send) -> None:
        while (reports := await queue.get()) is not None:
            body = await reports
            if not self._is_connected:
                continue
            try:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            except ClientDisconnected:
                self._is_connected = False

    async def _send_group(self, objects: list[bytes], objects_read: int) -> asyncio.Task[bytes]:
        """Send the records of a group. Returns the task that returns their reports."""
        try:
            sent = await self.send(objects, objects_read)
        except Problem as e:
            # The response has begun, so one of its lines reports the error.
            row = {"error_code": rest_error_code(e.kind, "/v3/"), "message": e.detail}
            return asyncio.ensure_future(_error_reports(row, len(objects)))
        return asyncio.ensure_future(self._reports_of_group(sent))

    async def _reports_of_group(self, sent: SentObjects) -> bytes:
        reports, _ = await self.settle(sent)
        return reports_as_lines(reports)

    async def send(self, objects: list[bytes], objects_read: int) -> SentObjects:
        """Send the records of complete objects.

        `objects_read` is the number of the body's objects that were read so far. See `BodyReader.wait_for_turn`.

        Raises Problem (503) if their turn has not come at the deadline of a shutdown.
        """
        read_time = self._producer.ingest.reader(self._topic).time
        latest_ms = self._producer.ingest.latest_ms()
        decoded: list[Decoded | EventRejected] = []
        with await next_turn(self.reader, objects_read) as turn:
            for body in objects:
                try:
                    decoded.append(v3_record(body, self._topic, read_time, latest_ms))
                except EventRejected as e:
                    decoded.append(e)
            return SentObjects(decoded, await _send_v3_records(self._producer, decoded, self._partitions, turn))

    async def settle(self, sent: SentObjects) -> tuple[list[dict[str, Any]], list[Outcome]]:
        """Wait for the outcomes of sent records. Returns their reports and outcomes."""
        decoded, records = sent
        outcomes = await self._producer.settle(self._topic, records, self._client)
        rows = [report_of(self._cluster_id, record, outcome) for record, outcome in zip(decoded, outcomes, strict=True)]
        return rows, outcomes


def reports_as_lines(rows: list[dict[str, Any]]) -> bytes:
    """Return v3 delivery reports in the response's format: one a line."""
    return b"".join(msgspec.json.encode(row) + b"\r\n" for row in rows)


async def _error_reports(row: dict[str, Any], count: int) -> bytes:
    """Return the report of an error, `count` times. It is a coroutine because the queue holds tasks."""
    return reports_as_lines([row] * count)


async def _send_v3_records(
    producer: RestProducer, decoded: list[Decoded | EventRejected], partitions: list[int], turn: Turn
) -> SentRecords:
    """Send the decoded records of a v3 request. The outcome of a record that could not be decoded is its error."""
    records = [d if isinstance(d, EventRejected) else d.record for d in decoded]
    return await producer.send(records, partitions, turn)


def report_of(cluster_id: str, decoded: Decoded | EventRejected, outcome: Outcome) -> dict[str, Any]:
    """Return the report of a v3 record: the delivery report if it is stored, else its error."""
    if isinstance(outcome, RecordMetadata) and not isinstance(decoded, EventRejected):
        return _delivery_report(cluster_id, decoded, outcome.partition, outcome.offset, outcome.timestamp)
    assert isinstance(outcome, BaseException)
    return {"error_code": error_code_of(outcome), "message": error_message_of(outcome)}


def _delivery_report(cluster_id: str, decoded: Decoded, partition: int, offset: int, timestamp: int) -> dict[str, Any]:
    """Return the delivery report of a stored v3 record; `timestamp` is in ms since the epoch."""
    record = decoded.record
    return {
        "error_code": OK,
        "cluster_id": cluster_id,
        "topic_name": record.topic,
        "partition_id": partition,
        "offset": offset,
        "timestamp": (EPOCH + timedelta(milliseconds=timestamp)).isoformat().replace("+00:00", "Z"),
        "key": _size_of_data(decoded.key_type, record.key),
        "value": _size_of_data(decoded.value_type, record.value),
    }


def _size_of_data(data_type: EmbeddedFormat | None, data: bytes | None) -> dict[str, Any] | None:
    """Return the type and the size of a key or a value, for a v3 delivery report."""
    return None if data_type is None else {"type": data_type, "size": 0 if data is None else len(data)}


def v3_produce_router(producer: RestProducer, admin: Admin) -> APIRouter:
    """Return the routes `POST …/records` and `POST …/records:batch`."""
    router = APIRouter(tags=["rest proxy v3"])
    path = "/v3/clusters/{cluster_id}/topics/{topic}/records"

    async def accept(cluster_id: str, topic: str, client: str) -> list[int]:
        """Accept a request of the client for the cluster and the topic, and return the topic's partitions."""
        # `check` comes first: nothing asks Kafka for a request of a client beyond its rate, or while Kafka is down.
        partitions = await producer.check(topic, client)
        try:
            await check_cluster(admin, cluster_id)
        except KafkaTimeout as e:
            # KafkaTimeout would mean that records may be stored, but no record has been sent yet.
            raise BrokerNotAvailable(str(e)) from None
        return partitions

    @router.post(
        path,
        summary="REST Proxy v3: produce",
        responses={200: {"model": StoredReport | FailedReport}},
        openapi_extra={"requestBody": RECORD_BODY},
    )
    async def produce_record_stream(cluster_id: of.ClusterId, topic: of.Topic, request: Request) -> Response:
        client = client_of(request)
        with producer.ingest.tracking(topic, client):
            body = producer.ingest.admission.body(request)
            partitions = await accept(cluster_id, topic, client)
            reports = DeliveryReports(body, producer, topic, cluster_id, partitions, client)
            if "content-length" not in request.headers:
                return reports
            return await _produce_complete_body(producer, reports, topic)

    @router.post(
        f"{path}:batch",
        summary="REST Proxy v3: produce a batch",
        status_code=MULTI_STATUS,
        responses={207: {"model": BatchResponse}},
        openapi_extra={"requestBody": BATCH_BODY},
    )
    async def produce_record_batch(cluster_id: of.ClusterId, topic: of.Topic, request: Request) -> Response:
        client = client_of(request)
        with producer.ingest.tracking(topic, client):
            body = producer.ingest.admission.body(request)
            partitions = await accept(cluster_id, topic, client)
            content = await read_body(body, producer.settings.max_body_bytes)
            response = await _produce_batch(producer, body, content, topic, cluster_id, partitions, client)
            producer.answered(topic, response.status_code, body)
            return response

    return router


async def _produce_complete_body(producer: RestProducer, reports: DeliveryReports, topic: str) -> Response:
    """Answer a v3 produce request of known length, once its body is complete.

    If its only record failed, the response has the error's status.
    """
    content = await read_body(reports.reader, producer.settings.max_body_bytes)
    try:
        splitter = RecordStreamSplitter(producer.settings.max_line_bytes)
        objects = splitter.feed(content)
        splitter.close()
        if not objects:
            raise NotAnObject(NO_RECORD)
    except NotAnObject as e:
        raise Problem(ErrorKind(BAD_REQUEST, "INVALID_REQUEST", "Wrong request"), str(e)) from None
    producer.check_count(len(objects))
    rows, outcomes = await reports.settle(await reports.send(objects, len(objects)))
    status = OK
    headers: dict[str, str] = {}
    if len(outcomes) == 1 and isinstance(outcomes[0], BaseException):
        status, headers = error_status_of(outcomes[0])
    producer.answered(topic, status, reports.reader)
    return Response(reports_as_lines(rows), status, headers, "application/json")


async def _produce_batch(
    producer: RestProducer,
    body: BodyReader,
    content: bytes,
    topic: str,
    cluster_id: str,
    partitions: list[int],
    client: str,
) -> Response:
    """Send the entries of a v3 batch, and answer with the outcome of each."""
    read_time = producer.ingest.reader(topic).time
    latest_ms = producer.ingest.latest_ms()
    ids = []
    decoded: list[Decoded | EventRejected] = []
    with await next_turn(body, 0) as turn:
        try:
            entries = v3_entries(content, ENTRIES_MAX)
        except EventRejected as e:
            raise Problem(ErrorKind(BAD_REQUEST, "INVALID_REQUEST", "Wrong request"), str(e)) from None
        for entry in entries:
            try:
                id_, record = v3_entry(entry, topic, read_time, latest_ms)
                decoded.append(record)
            except EventRejected as e:
                id_ = id_of_invalid_entry(entry)
                decoded.append(e)
            ids.append(id_)
        sent = await _send_v3_records(producer, decoded, partitions, turn)
    outcomes = await producer.settle(topic, sent, client)
    rows = [
        {"id": id_} | report_of(cluster_id, entry, outcome)
        for id_, entry, outcome in zip(ids, decoded, outcomes, strict=True)
    ]
    successes = [row for row in rows if row["error_code"] == OK]
    failures = [row for row in rows if row["error_code"] != OK]
    for row in successes:
        del row["error_code"]
    return json_response({"successes": successes, "failures": failures}, MULTI_STATUS)
