"""Compressed bodies: gzip and zstd, inflated in steps of bounded size.

Sans-IO. `feed` adds received bytes, and `step` returns at most `STEP_BYTES` of the inflated data. So code that enforces
a limit on the data exceeds it by at most one step. A body may consist of several gzip members or zstd frames.

>>> import gzip
>>> inflater = Inflater("gzip")
>>> inflater.feed(gzip.compress(b"a") + gzip.compress(b"b"))
>>> inflater.step(), inflater.step(), inflater.pending
(b'a', b'b', False)
>>> inflater.close()
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.datastructures import Headers

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import UNSUPPORTED_MEDIA_TYPE
from penstock.shared.common.errors import PenstockError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP_BYTES = 65_536
"""The most data that one step returns."""

ZSTD_WINDOW_LOG_MAX = 23
"""The largest window of a frame: 8 MiB, the limit of the content coding for HTTP (RFC 9659)."""


class CorruptBody(PenstockError):
    """The body does not match its Content-Encoding, or ends too early."""


class _Stream(Protocol):
    """One gzip member or zstd frame, with the interface of `compression.zstd`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipMember:
    """Decompresses one gzip member, with the interface of a `ZstdDecompressor`."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        inflated = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self.needs_input = not self._zlib.unconsumed_tail and len(inflated) < max_length
        return inflated


def _zstd_frame() -> zstd.ZstdDecompressor:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX})


STREAMS: Mapping[str, Callable[[], _Stream]] = {"gzip": _GzipMember, "zstd": _zstd_frame}
ALIASES = {"x-gzip": "gzip"}
"""Equivalent names (RFC 9110, section 8.4.1.3)."""


class Inflater:
    """Inflates one compressed body."""

    def __init__(self, encoding: str) -> None:
        """`encoding` is a key of STREAMS."""
        self._encoding = encoding
        self._new_stream = STREAMS[encoding]
        self._stream: _Stream | None = self._new_stream()
        self._input = b""

    def __repr__(self) -> str:
        return f"Inflater({self._encoding}, pending={self.pending})"

    @property
    def pending(self) -> bool:
        """Whether `step` can return data without another `feed`."""
        return bool(self._input) or (self._stream is not None and not self._stream.needs_input)

    def feed(self, data: bytes) -> None:
        """Add received data. All earlier data must have been returned by `step` (`pending` is false)."""
        self._input += data

    def step(self) -> bytes:
        """Return at most STEP_BYTES of inflated data; possibly none, if a member ends or more input is needed.

        Raises CorruptBody if the received data does not match the encoding.
        """
        if self._stream is None:
            self._stream = self._new_stream()
        data = self._input
        self._input = b""
        try:
            inflated = self._stream.decompress(data, STEP_BYTES)
        except (zlib.error, zstd.ZstdError) as e:
            raise CorruptBody(f"the body is not {self._encoding}, as Content-Encoding says: {e}") from None
        if self._stream.eof:
            self._input = self._stream.unused_data
            self._stream = None
        return inflated

    def close(self) -> None:
        """End the body. Raises CorruptBody if the last member is incomplete, or if no data was fed."""
        if self._stream is not None:
            raise CorruptBody(f"the body ends in the middle of its {self._encoding} data (Content-Encoding)")


def inflater_of(headers: Headers) -> Inflater | None:
    """Return the inflater for a request's body; None for a plain body.

    Raises Problem (415) for an unsupported encoding, or for several encodings.
    """
    names = [name.strip() for name in ",".join(headers.getlist("content-encoding")).lower().split(",")]
    encodings = [ALIASES.get(name, name) for name in names if name not in ("", "identity")]
    if not encodings:
        return None
    if len(encodings) == 1 and encodings[0] in STREAMS:
        return Inflater(encodings[0])
    supported = ", ".join(STREAMS)
    shown = ", ".join(encodings)[:60]
    reason = "is not supported" if len(encodings) == 1 else "names several encodings"
    raise Problem(
        ErrorKind(UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_CONTENT_ENCODING", "Unsupported body"),
        f"Content-Encoding {shown!r} {reason}; send the body uncompressed, or in one of: {supported}",
        headers={"Accept-Encoding": supported},
    )
