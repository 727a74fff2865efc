"""uvicorn's HTTP protocol with limits on a request's head, a connection's unparsed bytes and the number of connections.

Without these limits uvicorn reads a head of any size before any route or credential is checked. It also parses every
pipelined request, however many are not answered yet. So this class cuts the received bytes into segments before uvicorn
parses them. A segment ends at the end of a head, of a body, or of the received bytes:

1. A head ends with an empty line. A segment that would make it longer than `max_head_bytes` is not parsed: the response
   is 431, or 414 if the request line alone is too long, and the connection is closed.
2. A body of known length ends after that length. A chunked body ends with an empty line, after its trailers. Chunk
   extensions and trailers since the last data of the body have together the same limit as a head.
3. Bytes after a request that is not answered yet are buffered unparsed. The connection is not read until the response
   is complete. The buffer holds at most one read (256 KiB).

A client that does not read its responses for WRITE_TIMEOUT_MS is disconnected. A close alone would wait until the
client has read the bytes that are already written. So the connection is aborted.

The app may answer a request before the request's body has arrived. Then the rest of the body is discarded. The
keep-alive timeout counts from the response, so a body that is too slow closes the connection.

Trailers are not added to the request's headers: when trailers arrive, the app has already used the headers.

At most `concurrent_max` connections, and as many requests, are served at a time. The response to any other request is
503, and its connection is closed.

The header `Upgrade` is ignored (RFC 9110, section 7.8). httptools' parser treats a request with `Upgrade` as complete
after its head, so a second parser reads its body.
"""

from __future__ import annotations

import asyncio
import re
from enum import Enum
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.api.http.auth import SECURITY_HEADERS
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import (
    BAD_REQUEST,
    NOT_IMPLEMENTED,
    REQUEST_HEADER_FIELDS_TOO_LARGE,
    SERVICE_UNAVAILABLE,
    URI_TOO_LONG,
)
from penstock.api.http.unread_response import CONNECTION
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

CONCURRENT_MAX = 2_000
"""The most connections, and the most requests in progress, that a server serves at a time. Each request may buffer
`max_body_bytes`."""

HEAD_TIMEOUT_MS = 10_000
"""The time from the start of a connection, or the first byte of a request, to the end of the head. Without it a slow
client would hold its connection forever."""

WRITE_TIMEOUT_MS = 60_000
"""The time in which a client has to read so much that the server's socket accepts more bytes: about 100 KB to some MB.

With TLS, it has to read all that the app wrote at once, as asyncio's buffer below TLS is not seen. The time is the
default of nginx's `send_timeout`. Without it a client that never reads would hold its connection forever.
"""

HEADERS_MAX = 256
"""The most header fields of one request, trailers included: each needs about 150 bytes in addition to its own."""

LINGER_MS = 1_000
"""How long received data is discarded after a rejection. A connection that is closed with unread data is reset, and
the client may then never receive the response."""
DISCARDED_BYTES_MAX = 1_048_576
"""The most bytes that are discarded. Then the connection is closed."""

HEAD_END = b"\r\n\r\n"
OVERLAP = len(HEAD_END) - 1

HOST = re.compile(rb"(\[[^][/?#@\s]*\]|[^][:/?#@\s]*)(:[0-9]*)?")
"""A host and an optional port (RFC 9110, section 7.2), without user information."""

MALFORMED = ErrorKind(BAD_REQUEST, "MALFORMED_REQUEST", "Not an HTTP request")
UNKNOWN_CODING = ErrorKind(NOT_IMPLEMENTED, "UNSUPPORTED_TRANSFER_ENCODING", "Transfer-Encoding not supported")
REQUEST_LINE_TOO_LONG = ErrorKind(URI_TOO_LONG, "URI_TOO_LONG", "Request line too long")
TOO_BUSY = ErrorKind(SERVICE_UNAVAILABLE, "TOO_MANY_CONNECTIONS", "Too many connections", retry_after_s=1)
HEAD_TOO_LARGE = ErrorKind(REQUEST_HEADER_FIELDS_TOO_LARGE, "HEAD_TOO_LARGE", "Request head too large")


class Reading(Enum):
    """The part of a request that the next byte belongs to."""

    START = "start"
    HEAD = "head"
    BODY = "body"


class _Flow(FlowControl):
    """Resumes reading only if no unparsed bytes are buffered."""

    has_unparsed = False

    def resume_reading(self) -> None:
        if not self.has_unparsed:
            super().resume_reading()


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits on heads of requests, unparsed bytes and the number of connections.

    `guarded_http` sets `max_head_bytes`.
    """

    concurrent_max = CONCURRENT_MAX
    head_timeout_ms = HEAD_TIMEOUT_MS
    max_head_bytes: int

    flow: _Flow

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reading = Reading.START
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_request_line = True
        self._header_count = 0
        self._has_host = False
        # An empty line may have begun at the end of the last segment.
        self._last_bytes = b""
        # This is the field Content-Length or Transfer-Encoding. It is empty if the request has neither.
        self._body_header = b""
        # This is the number of bytes that remain of a body of known length.
        self._body_left: int | None = None
        # Extensions and trailers since the last data of a chunked body are counted.
        self._bytes_beside_data = 0
        # A second parser, which reads the body of a request with `Upgrade`, is fed an artificial head.
        self._hides_head = False
        self._unread = b""
        self._rejection: Problem | None = None
        self._discarded: int | None = None

    def __repr__(self) -> str:
        return f"GuardedHttp({self._reading.value}, head={self._head_bytes} bytes, unread={len(self._unread)} bytes)"

    # Calls by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        # Writing is paused while any byte is buffered, so `pause_writing` sees each response that waits for its client.
        # With high=0, TLS would pause without a byte.
        transport.set_write_buffer_limits(high=1, low=0)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Parse the bytes that may be parsed now, and buffer the rest. After a rejection, discard them."""
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > DISCARDED_BYTES_MAX:
                self.transport.abort()
        elif self._unread:
            self._unread += data
        else:
            self._read_segments(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and drop the unparsed bytes."""
        self._stop_waiting()
        self._stop_write_timer()
        self._unread = b""
        # The rest of a body cannot arrive any more, so uvicorn may stop the keep-alive timer.
        self._reading = Reading.START
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Expect the client to read the rest: asyncio now closes the connection, but waits for the client.

        With TLS, `pause_writing` and `resume_writing` do not see the bytes that asyncio buffers below TLS.
        """
        if self._write_timer is None:
            self._expect_reads()

    def pause_writing(self) -> None:
        """Expect the client to read."""
        super().pause_writing()
        if self._write_timer is None:
            self._expect_reads()

    def resume_writing(self) -> None:
        """The client has read. While the connection closes, only `connection_lost` stops the timer."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_write_timer()

    # Segments

    def _read_segments(self, data: bytes) -> None:
        """Parse data segment by segment, until a request must be answered first."""
        at = 0
        while at < len(data) and self._discarded is None and not self.transport.is_closing():
            if self._is_responding:
                self._unread = data[at:]
                self.flow.has_unparsed = True
                self.flow.pause_reading()
                return
            end = self._segment_end(data, at)
            self._read_segment(data[at:end])
            at = end

    @property
    def _is_responding(self) -> bool:
        """Whether a complete request was read and its response is not complete."""
        return self._reading is Reading.START and self.cycle is not None and not self.cycle.response_complete

    def _segment_end(self, data: bytes, at: int) -> int:
        """Return the end of the segment that begins at `at`."""
        if self._reading is Reading.BODY and self._body_left is not None:
            return min(len(data), at + max(1, self._body_left))
        # An empty line may have begun in the last segment.
        overlapping = (self._last_bytes + data[at : at + OVERLAP]).find(HEAD_END)
        if overlapping >= 0:
            return at + overlapping + len(HEAD_END) - len(self._last_bytes)
        start = data.find(HEAD_END, at)
        return len(data) if start < 0 else start + len(HEAD_END)

    def _read_segment(self, segment: bytes) -> None:
        if self._reading is Reading.BODY:
            self._read_body(segment)
            return
        if self._head_bytes + len(segment) > self.max_head_bytes:
            self._reject_request(self._too_large(segment), segment)
            return
        if self._head_timer is None:
            self._expect_head()
        self._head_bytes += len(segment)
        self._last_bytes = (self._last_bytes + segment)[-OVERLAP:]
        super().data_received(segment)
        if self._reading is Reading.HEAD:
            self._in_request_line = self._in_request_line and b"\n" not in segment
        else:
            # The segment completed a head, or had only empty lines before one.
            self._head_bytes = 0
            self._last_bytes = b""
            self._in_request_line = True

    def _read_body(self, segment: bytes) -> None:
        if self._body_left is None:
            self._bytes_beside_data += len(segment)
            self._last_bytes = (self._last_bytes + segment)[-OVERLAP:]
        else:
            self._body_left -= len(segment)
        super().data_received(segment)
        if self._bytes_beside_data > self.max_head_bytes:
            self._reject_request(Problem(HEAD_TOO_LARGE, f"trailers and chunk extensions are {self._too_long_message}"))

    # Calls by the parser

    def on_message_begin(self) -> None:
        """A request line begins."""
        self._reading = Reading.HEAD
        self._header_count = 0
        self._has_host = False
        self._body_left = None
        if not self._hides_head:
            self._body_header = b""
            super().on_message_begin()
            self.scope["extensions"] = {CONNECTION: {"abort": self.transport.abort}}

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        if not self._hides_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer."""
        self._header_count += 1
        if self._header_count > HEADERS_MAX:
            self._reject_head(Problem(HEAD_TOO_LARGE, f"the request has more than {HEADERS_MAX} header fields"))
        if self._reading is Reading.BODY:
            return
        # The parser does not remove the whitespace after a value (RFC 9112, section 5.1).
        value = value.rstrip(b" \t")
        lower_name = name.lower()
        if lower_name == b"host":
            # RFC 9112, section 3.2
            if self._has_host or HOST.fullmatch(value) is None:
                self._reject_head(Problem(MALFORMED, "the request has two Host fields, or one that is not host[:port]"))
            self._has_host = True
        elif lower_name == b"transfer-encoding" and value.lower() != b"chunked":
            # RFC 9112, section 6.1. The parser would ignore a coding before `chunked`.
            self._reject_head(Problem(UNKNOWN_CODING, "the only supported transfer coding is chunked"))
        if lower_name in (b"content-length", b"transfer-encoding"):
            self._body_header = name + b": " + value
            self._body_left = int(value) if value.isdigit() else None
        if not self._hides_head:
            super().on_header(name, value)

    def _reject_head(self, problem: Problem) -> NoReturn:
        self._rejection = problem
        # The parser stops at this error. Then uvicorn calls `send_400_response`.
        raise ValueError(problem.detail)

    def on_headers_complete(self) -> None:
        """A request is handed to the app, unless the server has too many connections or requests."""
        if not self._hides_head and self._is_server_busy:
            self._reject_head(Problem(TOO_BUSY, f"more than {self.concurrent_max} connections or requests at a time"))
        self._reading = Reading.BODY
        self._bytes_beside_data = 0
        if not self._hides_head:
            self._stop_waiting()
            super().on_headers_complete()

    @property
    def _is_server_busy(self) -> bool:
        """Whether this request is one too many. uvicorn has such a limit too, but answers with plain text.

        A request whose client has disconnected is still a task.
        """
        return len(self.connections) > self.concurrent_max or len(self.tasks) >= self.concurrent_max

    def on_body(self, body: bytes) -> None:
        """Data of a body."""
        self._bytes_beside_data = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request. For a request with `Upgrade`, the parser calls this at the end of the head already."""
        if self.parser.should_upgrade() and self._body_header:
            self._hides_head = True
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + self._body_header + HEAD_END)
            return
        super().on_message_complete()
        self._reading = Reading.START
        self._hides_head = False
        self._last_bytes = b""

    def on_response_complete(self) -> None:
        """Continue with the bytes that were buffered meanwhile."""
        data = self._unread
        self._unread = b""
        self.flow.has_unparsed = False
        super().on_response_complete()
        if data:
            self._unset_keepalive_if_required()
            self._read_segments(data)

    def _unset_keepalive_if_required(self) -> None:
        """Stop the keep-alive timer, but not for the rest of a body. Called by uvicorn for any received bytes.

        The timer runs during a body only if the response is already complete. A later request stops it.
        """
        if self._reading is not Reading.BODY:
            super()._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Answer an error of the parser. Called by uvicorn."""
        self._reject_request(self._rejection or Problem(MALFORMED, "the request is not HTTP/1.1"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing. uvicorn would advise to install a WebSocket library."""

    # Rejections

    def _too_large(self, segment: bytes) -> Problem:
        """Return 414 if the request line alone is too long, else 431."""
        if self._reading is Reading.START:
            # The parser skips empty lines before a request line.
            segment = segment.lstrip(b"\r\n")
        line_end = segment.find(b"\n")
        line_bytes = self._head_bytes + (len(segment) if line_end < 0 else line_end)
        if self._in_request_line and line_bytes > self.max_head_bytes:
            return Problem(REQUEST_LINE_TOO_LONG, f"the request line is {self._too_long_message}")
        return Problem(HEAD_TOO_LARGE, f"the request line and the header fields are {self._too_long_message}")

    @property
    def _too_long_message(self) -> str:
        return f"longer than {self.max_head_bytes} bytes (http.max_head_bytes; in Connect rest.max.head.bytes)"

    def _received_path(self, segment: bytes) -> str:
        """Return the request's path as far as it was received. The path determines the format of an error response."""
        not_parsed = segment.partition(b" ")[2].partition(b" ")[0]
        url = not_parsed if self._reading is Reading.START else self.url
        return url.partition(b"?")[0].decode("latin-1")

    def _received_method(self, segment: bytes) -> bytes:
        """Return the request's method, empty if it is unknown. The response to HEAD has no body."""
        if self._reading is Reading.START:
            return segment.lstrip(b"\r\n").partition(b" ")[0]
        # Before the path, the parser has the method of the previous request.
        return self.parser.get_method() if self.url else b""

    def _reject_request(self, problem: Problem, segment: bytes = b"") -> None:
        """Send the problem as the response, unless another response has begun, and close the connection.

        If the app already handles the request, it sees a disconnect. It may have stored events of the body by then.
        """
        log.warning("request rejected", client=self.client, status=problem.kind.status, reason=problem.detail)
        self._stop_waiting()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        response = problem.response_for(self._received_path(segment))
        headers = [*self.server_state.default_headers, *response.raw_headers, *SECURITY_HEADERS, CLOSE_HEADER]
        lines = [STATUS_LINE[problem.kind.status], *(name + b": " + value + b"\r\n" for name, value in headers)]
        body = b"" if self._received_method(segment) == b"HEAD" else bytes(response.body)
        self.transport.write(b"".join(lines) + b"\r\n" + body)
        # It only waits for its end, so it does not count towards `concurrent_max` any more.
        self.connections.discard(self)
        self._discarded = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._head_timer = self.loop.call_later(LINGER_MS / 1000, self.transport.abort)
        else:
            # asyncio cannot close one direction of a TLS connection.
            self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_ms / 1000, self._close_slow_connection)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_reads(self) -> None:
        buffered = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_MS / 1000, self._abort_if_unread, buffered)

    def _abort_if_unread(self, buffered: int) -> None:
        """Abort the connection if it still buffers as many bytes: the socket accepted none in the time.

        Nothing is written while bytes are buffered.
        """
        if self.transport.get_write_buffer_size() < buffered:
            self._expect_reads()
        else:
            self._write_timer = None
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _close_slow_connection(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def guarded_http(max_head_bytes: int) -> type[GuardedHttp]:
    """Return a protocol class with the limit `max_head_bytes`. uvicorn expects a class."""
    return type("GuardedHttp", (GuardedHttp,), {"max_head_bytes": max_head_bytes})
