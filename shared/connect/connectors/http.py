"""The HTTP sink posts records in batches; the HTTP source polls a URL for records.

Both retry temporary errors (no complete response, 408, 425, 429, 5xx), at most `max.retries` times in a row. Errors of
the endpoint (3xx, 401, 403, 405, 407) fail the sink's task. Any other 4xx is an error of the posted records. The
source's task fails after any 3xx or 4xx that is not retried, except 304.

The source sends one request after another. In its URL, `${offset}` is replaced by the offset of the last record read,
at first by `http.offset.initial`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.common.http_responses import ACCEPTED_ENCODING, UnreadableResponse, read_response
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.json_decoding import JSON_POINTER, InvalidJson, decode_json
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.config_def import (
    HIGH,
    LOW,
    MEDIUM,
    NO_DEFAULT,
    ConfigDef,
    Password,
    Type,
    at_least,
    invalid,
    one_of,
)
from penstock.shared.connect.connector import Props, SinkConnector, SourceConnector
from penstock.shared.connect.connectors.poll_wait import PollWait
from penstock.shared.connect.connectors.retries import Retries
from penstock.shared.connect.converters.json import decimals_are_numeric, value_to_json, with_decimal_format
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Offset, Partition, SinkRecord, SourceRecord
from penstock.shared.connect.redaction import without_passwords
from penstock.shared.connect.task import SinkTask, SourceTask

log = get_logger(__name__)

RETRIED = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS)
ENDPOINT_ERRORS = (
    httpx.codes.UNAUTHORIZED,
    httpx.codes.FORBIDDEN,
    httpx.codes.METHOD_NOT_ALLOWED,
    httpx.codes.PROXY_AUTHENTICATION_REQUIRED,
)
"""Statuses, in addition to 3xx, that do not depend on the posted records. Other statuses, such as 404, 410 and 415, may
be errors of a record."""
BODY_BYTES_MAX = 64 << 20
"""A larger response of a polled URL, decompressed, fails the task before it uses up memory."""
REPLY_BYTES_MAX = 1 << 20
"""The sink reads no more of a response: it needs the status, and the beginning of an error. A response that is read to
its end keeps the connection open."""
RETRY_AFTER_MAX_MS = 300_000
WRITTEN_MAX = 10_000
"""Records of one offset that are remembered to detect repeats. If there are more, the others are written again."""


def http_client_config() -> ConfigDef:
    """Return the settings that the HTTP sink and the HTTP source have in common."""
    return (
        ConfigDef()
        .define("http.url", Type.STRING, NO_DEFAULT, HIGH, "URL of the requests.", _validate_http_url)
        .define("http.headers", Type.PASSWORD, "", MEDIUM,
                "Additional request headers (Name:value, comma-separated), hidden like a password.",
                _validate_http_headers)
        .define("http.auth.type", Type.STRING, "none", MEDIUM, "Authentication: none, basic or bearer.",
                one_of("none", "basic", "bearer"))
        .define("http.auth.user", Type.STRING, "", MEDIUM, "User for basic authentication.")
        .define("http.auth.password", Type.PASSWORD, "", MEDIUM, "Password for basic authentication.")
        .define("http.auth.token", Type.PASSWORD, "", MEDIUM, "Token for bearer authentication.")
        .define("request.timeout.ms", Type.INT, 30_000, LOW, "Maximum time of one request.", at_least(1))
        .define("max.retries", Type.INT, 10, MEDIUM, "Maximum number of retries after a temporary error.", at_least(0))
        .define("retry.backoff.ms", Type.INT, 3_000, MEDIUM, "Delay before each retry.", at_least(1))
    )  # fmt: skip


def _validate_http_url(name: str, value: Any) -> None:
    if value is not None and not re.match(r"https?://[^/]", value):
        raise invalid(name, value, "must be an http:// or https:// URL")


def _validate_http_headers(name: str, value: Any) -> None:
    try:
        _parse_http_headers(value)
    except ValueError:
        raise invalid(name, value, "each header must be Name:value") from None


def _parse_http_headers(given: Password) -> dict[str, str]:
    """Return `http.headers` by name. Raises ValueError if one is invalid."""
    pairs = [item.split(":", 1) for item in given.value.split(",") if item.strip()]
    headers = {name.strip(): value.strip() for name, value in pairs}
    if "" in headers:
        raise ValueError("a header without a name")
    return headers


def make_http_client(values: Mapping[str, Any]) -> httpx.AsyncClient:
    """Return the client of an HTTP connector, with the configured headers, credentials and timeout.

    The client's timeout applies to each read and write. The callers limit the whole request.
    """
    headers = httpx.Headers(ACCEPTED_ENCODING)
    headers.update(_parse_http_headers(values["http.headers"]))
    auth = None
    if values["http.auth.type"] == "basic":
        auth = httpx.BasicAuth(values["http.auth.user"], values["http.auth.password"].value)
    elif values["http.auth.type"] == "bearer":
        headers["Authorization"] = f"Bearer {values['http.auth.token'].value}"
    timeout_s = values["request.timeout.ms"] / 1000
    return httpx.AsyncClient(headers=headers, auth=auth, timeout=timeout_s, verify=client_tls())


def _request_failure(error: httpx.HTTPError | TimeoutError, timeout_ms: int) -> str:
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return f"no complete response within request.timeout.ms ({timeout_ms} ms)"
    return f"{type(error).__name__}: {error}"


def is_passing(status: int) -> bool:
    """Return whether a request with this response status can be retried."""
    return status in RETRIED or status >= httpx.codes.INTERNAL_SERVER_ERROR


def retry_after_ms(response: httpx.Response) -> int:
    """Return the seconds of a `Retry-After` header in ms, at most five minutes; 0 without the header or with a date."""
    text = response.headers.get("Retry-After", "")
    return min(int(text) * 1000, RETRY_AFTER_MAX_MS) if text.isdecimal() and len(text) < 10 else 0


class HttpSinkTask(SinkTask):
    """Sends the records to the URL, by `http.method`."""

    async def start(self, props: Mapping[str, str]) -> None:
        self._values = HttpSinkConnector.config().parse(props)
        self._tolerates = props.get("errors.tolerance", "").strip().lower() == "all"
        self._client = make_http_client(self._values)
        kind = "application/x-ndjson" if self._values["batch.format"] == "ndjson" else "application/json"
        self._client.headers.setdefault("Content-Type", kind)
        self._retries = Retries(self._values["max.retries"])
        # The offset up to which each partition was posted, by topic too, since a transform may change records' topics.
        self._posted: dict[tuple[str, TopicPartition], int] = {}
        self._next_request_s = 0.0
        """The event loop's time before which no request is sent, after a temporary error."""

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        self._forget_posted_offsets(partitions)

    async def close(self, partitions: frozenset[TopicPartition]) -> None:
        self._forget_posted_offsets(partitions)

    def _forget_posted_offsets(self, partitions: frozenset[TopicPartition]) -> None:
        self._posted = {key: offset for key, offset in self._posted.items() if key[1] not in partitions}

    async def put(self, records: list[SinkRecord]) -> None:
        left_ms = int((self._next_request_s - asyncio.get_running_loop().time()) * 1000)
        if records and left_ms > 0:
            # The context's timeout is a maximum: a commit that is due ends it early. This is not another retry.
            self.context.timeout(left_ms)
            raise RetriableError(f"the next request follows in {left_ms} ms")
        size = 1 if self._values["batch.format"] == "single" else self._values["batch.max.size"]
        by_topic: dict[str, list[SinkRecord]] = {}
        for record in records:
            # After a temporary error all records are delivered again. Those that were posted before are skipped.
            if not self._is_posted_record(record):
                by_topic.setdefault(record.topic, []).append(record)
        for own in by_topic.values():
            for at in range(0, len(own), size):
                await self._send_batch(own[at : at + size])
        self._posted.clear()

    def _is_posted_record(self, record: SinkRecord) -> bool:
        return record.kafka_offset < self._posted.get((record.topic, record.original_tp), 0)

    def _note_posted_offsets(self, batch: list[SinkRecord]) -> None:
        for record in batch:
            self._posted[record.topic, record.original_tp] = record.kafka_offset + 1
        # Not at the end of `put`: its requests, up to one for each record, would share the retries.
        self._retries.succeeded()

    async def _send_batch(self, batch: list[SinkRecord]) -> None:
        try:
            async with asyncio.timeout(self._values["request.timeout.ms"] / 1000):
                response = await self._send_request(batch)
        except (httpx.HTTPError, TimeoutError) as e:
            self._delay_next_request(self._values["retry.backoff.ms"])
            raise self._retries.failed(_request_failure(e, self._values["request.timeout.ms"])) from e
        except DataError as e:
            await self._reject_batch(batch, e)
            return
        if is_passing(response.status_code):
            self._delay_next_request(max(self._values["retry.backoff.ms"], retry_after_ms(response)))
            raise self._retries.failed(f"HTTP {response.status_code}: {response.text[:200]}")
        if response.is_redirect or response.status_code in ENDPOINT_ERRORS:
            url = without_passwords(self._values["http.url"])
            raise ConnectError(f"HTTP {response.status_code} from {url}: {response.text[:200]}")
        if not response.is_success:
            await self._reject_batch(batch, DataError(f"HTTP {response.status_code}: {response.text[:200]}"))
        else:
            self._note_posted_offsets(batch)

    async def _send_request(self, batch: list[SinkRecord]) -> httpx.Response:
        url = self._values["http.url"].replace("${topic}", quote(batch[0].topic, safe=""))
        content = self._encode_request_body(batch)
        async with self._client.stream(self._values["http.method"], url, content=content) as response:
            try:
                return await read_response(response, REPLY_BYTES_MAX)
            except (UnreadableResponse, httpx.DecodingError):
                # The request succeeded, and the sink needs only the status.
                return response

    def _delay_next_request(self, wait_ms: int) -> None:
        self._next_request_s = asyncio.get_running_loop().time() + wait_ms / 1000
        self.context.timeout(wait_ms)

    async def _reject_batch(self, batch: list[SinkRecord], error: DataError) -> None:
        reporter = self.context.errant_record_reporter
        # An error that is not tolerated fails the task. Records that were sent alone before would be sent again by each
        # new task.
        if reporter is None or (len(batch) > 1 and not self._tolerates):
            which = f"{batch[0].coordinates} to {batch[-1].coordinates}"
            raise ConnectError(f"{len(batch)} records were rejected ({which}): {error}") from error
        if len(batch) == 1:
            await reporter.report(batch[0], error)
            self._note_posted_offsets(batch)
            return
        # Each record is sent alone, to find the rejected ones.
        for record in batch:
            await self._send_batch([record])

    def _encode_request_body(self, batch: list[SinkRecord]) -> bytes:
        numeric = decimals_are_numeric(self._values)
        values = [value_to_json(record.value_schema, record.value, numeric) for record in batch]
        encoder = msgspec.json.Encoder(decimal_format="number")
        match self._values["batch.format"]:
            case "ndjson":
                return encoder.encode_lines(values)
            case "single":
                return encoder.encode(values[0])
        return encoder.encode(values)

    async def stop(self) -> None:
        if hasattr(self, "_client"):
            await self._client.aclose()


class HttpSinkConnector(SinkConnector):
    """Sends records to a URL by POST, PUT or PATCH."""

    task_class = HttpSinkTask

    @classmethod
    def config(cls) -> ConfigDef:
        return with_decimal_format(
            http_client_config()
            .define("http.method", Type.STRING, "POST", MEDIUM,
                    "Request method: POST, PUT or PATCH.", one_of("POST", "PUT", "PATCH"))
            .define("batch.format", Type.STRING, "array", MEDIUM,
                    "array: one JSON array of records. ndjson: one line a record. single: one request a record.",
                    one_of("array", "ndjson", "single"))
            .define("batch.max.size", Type.INT, 500, MEDIUM, "Maximum number of records of one request.", at_least(1))
        )  # fmt: skip

    async def alter_offsets(self, props: Props, offsets: object) -> bool:
        return True


def _validate_json_pointer(name: str, value: Any) -> None:
    if not JSON_POINTER.fullmatch(value or ""):
        raise invalid(name, value, "a JSON pointer is empty or begins with '/', and has '~' only before 0 or 1")


def pointed(value: Any, pointer: str) -> Any:
    """Return the part of `value` that a JSON pointer (RFC 6901) refers to. Raises DataError if there is none.

    >>> pointed({"a": [{"b/c": 1}]}, "/a/0/b~1c")
    1
    """
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            raise DataError(f"there is no value at {pointer}")
    return value


def _is_plain(offset: Any) -> bool:
    """Return whether an offset is not null, an object or an array.

    A stored null would make each later request ask for "None", also after restarts.
    """
    return offset is not None and not isinstance(offset, dict | list)


def _offset_at(item: Any, pointer: str) -> Any:
    """Return a record's offset. Raises DataError if it is missing or not plain."""
    offset = pointed(item, pointer)
    if not _is_plain(offset):
        raise DataError(f"there is no offset at {pointer}, but {offset!r:.100}")
    return offset


class HttpSourceTask(SourceTask):
    """Polls one URL."""

    async def start(self, props: Mapping[str, str]) -> None:
        self._values = HttpSourceConnector.config().parse(props)
        self._client = make_http_client(self._values)
        self._retries = Retries(self._values["max.retries"])
        # REST shows stored offsets. A secret that is replaced in the URL keeps the offset.
        self._partition = {"url": without_passwords(self._values["http.url"])}
        stored = await self.context.offset_storage_reader.offset(self._partition) or {}
        if not stored and self._values["http.offset.pointer"]:
            log.info("no offset of this URL is stored: reading from http.offset.initial", topic=self._values["topic"])
        self._offset: Any = stored.get("offset", self._values["http.offset.initial"])
        self._etag: tuple[str, str | None] = ("", None)
        """The URL of the last successful response, and its ETag."""
        self._wait = PollWait()
        # Digests of the records at the last offset: a server with inclusive offsets returns them again.
        self._written: frozenset[bytes] = frozenset()
        self._written_now: set[bytes] = set()

    async def poll(self) -> list[SourceRecord] | None:
        if not await self._wait.passed():
            return None
        self._wait.left_ms = self._values["poll.interval.ms"]
        url = self._values["http.url"].replace("${offset}", quote(str(self._offset), safe=""))
        try:
            async with asyncio.timeout(self._values["request.timeout.ms"] / 1000):
                response = await self._get_url(url)
        except (httpx.HTTPError, TimeoutError) as e:
            self._wait.left_ms = self._values["retry.backoff.ms"]
            raise self._retries.failed(_request_failure(e, self._values["request.timeout.ms"])) from e
        if is_passing(response.status_code):
            self._wait.left_ms = max(self._values["retry.backoff.ms"], retry_after_ms(response))
            raise self._retries.failed(f"HTTP {response.status_code}: {response.text[:200]}")
        self._retries.succeeded()
        if response.status_code in (httpx.codes.NO_CONTENT, httpx.codes.NOT_MODIFIED):
            return None
        if not response.is_success:
            raise ConnectError(f"HTTP {response.status_code}: {response.text[:200]}")
        requested = str(self._offset)
        records = self._records_of_response(response)
        if str(self._offset) != requested:
            # There may be another page.
            self._wait.left_ms = 0
        return records

    async def _get_url(self, url: str) -> httpx.Response:
        etag = self._etag[1] if self._etag[0] == url else None
        headers = {} if etag is None else {"If-None-Match": etag}
        async with self._client.stream("GET", url, headers=headers) as response:
            try:
                read = await read_response(response, BODY_BYTES_MAX)
            except UnreadableResponse as e:
                raise ConnectError(str(e)) from e
        if read.is_success:
            self._etag = (url, read.headers.get("ETag"))
        return read

    def _records_of_response(self, response: httpx.Response) -> list[SourceRecord]:
        try:
            found = pointed(decode_json(response.content), self._values["records.pointer"])
        except (InvalidJson, DataError) as e:
            raise ConnectError(f"the response does not match the settings: {e}") from e
        if found is None:
            # Some servers write an empty array as null, as Go does for a nil slice.
            found = []
        records = []
        for item in found if isinstance(found, list) else [found]:
            pointer = self._values["http.offset.pointer"]
            if pointer and not self._advance_offset(item, _offset_at(item, pointer)):
                continue
            key = pointed(item, self._values["key.pointer"]) if self._values["key.pointer"] else None
            records.append(
                SourceRecord(
                    self._values["topic"], None, None, key, None, item,
                    source_partition=self._partition, source_offset={"offset": self._offset},
                )
            )  # fmt: skip
        self._written = frozenset(self._written_now)
        return records

    def _advance_offset(self, item: Any, offset: Any) -> bool:
        """Move to a record's offset. Returns False for a duplicate: an earlier response had this record, and the offset
        has not changed since."""
        is_same = str(offset) == str(self._offset)
        digest = hashlib.sha256(msgspec.json.encode(item)).digest()
        if not is_same:
            self._written = frozenset()
            self._written_now = set()
        self._offset = offset
        if digest in self._written:
            return False
        if len(self._written_now) < WRITTEN_MAX:
            self._written_now.add(digest)
        return True

    async def stop(self) -> None:
        if hasattr(self, "_client"):
            await self._client.aclose()


class HttpSourceConnector(SourceConnector):
    """Polls a URL for JSON and writes its items as records."""

    task_class = HttpSourceTask

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            http_client_config()
            .define("topic", Type.STRING, NO_DEFAULT, HIGH, "Topic to write to.")
            .define("poll.interval.ms", Type.INT, 60_000, MEDIUM,
                    "Interval between requests. After a response that moves the offset, the next one follows at once.",
                    at_least(1))
            .define("records.pointer", Type.STRING, "", MEDIUM,
                    "JSON pointer to the array of records in the response. Empty: the whole response. If its value is "
                    "null, there are no records.",
                    _validate_json_pointer)
            .define("key.pointer", Type.STRING, "", MEDIUM, "JSON pointer to the key within a record. Empty: no key.",
                    _validate_json_pointer)
            .define("http.offset.pointer", Type.STRING, "", MEDIUM,
                    "JSON pointer to the offset within a record. If the server returns the last record again, it is "
                    "skipped, unless the task was restarted.", _validate_json_pointer)
            .define("http.offset.initial", Type.STRING, "", MEDIUM, "Value of ${offset} in the first request.")
        )  # fmt: skip

    async def alter_offsets(self, props: Props, offsets: list[tuple[Partition, Offset | None]]) -> bool:
        for partition, offset in offsets:
            if offset is None:
                # This deletes it: it may be of another connector that had this name before.
                continue
            # The URL of `http.url` may have secrets. The task would not find its offset.
            if set(partition) != {"url"} or partition["url"] != without_passwords(str(partition["url"])):
                raise ConnectError('a partition is {"url": …}, with the URL as the connector\'s offsets show it')
            if set(offset) != {"offset"} or not _is_plain(offset["offset"]):
                raise ConnectError(f'{dict(offset)} is not an offset: expected {{"offset": …}} with a text or a number')
        return True
