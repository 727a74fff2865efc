"""Decompression of bodies, step by step."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from penstock.api.http.content_encoding import STEP_BYTES, CorruptBody, Inflater, inflater_of, zstd
from penstock.api.http.problem import Problem

Compress = Callable[[bytes], bytes]
CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
COMPRESS: dict[str, Compress] = {"gzip": gzip.compress, "zstd": lambda data: zstd.compress(data, options=CHECKED)}
ENCODINGS = list(COMPRESS)


def steps(encoding: str, *chunks: bytes) -> list[bytes]:
    """The result of each step for a whole body."""
    inflater, found = Inflater(encoding), []
    for chunk in chunks:
        inflater.feed(chunk)
        while inflater.pending:
            found.append(inflater.step())
    inflater.close()
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4), cut=st.integers(1, 50))
def test_the_data_is_the_same_however_the_body_is_cut(encoding: str, parts: list[bytes], cut: int) -> None:
    """The data is the same however the body is split, and with several members or frames."""
    body = b"".join(COMPRESS[encoding](part) for part in parts)
    found = steps(encoding, *(body[i : i + cut] for i in range(0, len(body), cut)))
    assert b"".join(found) == b"".join(parts)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("repeats", [1, 4])
def test_no_step_returns_more_than_the_limit(encoding: str, repeats: int) -> None:
    """A small body that decompresses to 64 MB is returned in steps of 64 KiB."""
    body = COMPRESS[encoding](bytes(16 * 1_048_576)) * repeats
    assert len(body) < 100_000
    found = steps(encoding, body)
    assert max(map(len, found)) == STEP_BYTES
    assert sum(map(len, found)) == repeats * 16 * 1_048_576


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_data_that_cannot_be_compressed_is_whole(encoding: str) -> None:
    """Random data over several chunks is returned completely."""
    data = random.Random(7).randbytes(500_000)
    body = COMPRESS[encoding](data)
    assert b"".join(steps(encoding, *(body[i : i + 65_536] for i in range(0, len(body), 65_536)))) == data


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kept", [0, 1, 5, 12, -1])
def test_a_body_that_ends_too_early_is_corrupt(encoding: str, kept: int) -> None:
    """A truncated or empty body is a CorruptBody."""
    body = COMPRESS[encoding](b"some data that is long enough")
    with pytest.raises(CorruptBody, match=encoding):
        steps(encoding, body[:kept])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_that_is_something_else_is_corrupt(encoding: str) -> None:
    """Plain text, a flipped byte and trailing data are a CorruptBody."""
    body = COMPRESS[encoding](random.Random(7).randbytes(1_000))
    flipped = bytes([*body[:500], body[500] ^ 1, *body[501:]])
    for wrong in (b'{"a":1}', flipped, body + b"more"):
        with pytest.raises(CorruptBody, match=encoding):
            steps(encoding, wrong)


def test_a_deflate_stream_is_not_gzip() -> None:
    """A zlib stream is not accepted as gzip."""
    with pytest.raises(CorruptBody):
        steps("gzip", zlib.compress(b"a"))


def test_a_frame_with_a_large_window_is_an_error() -> None:
    """A zstd frame with a window over 8 MiB is a CorruptBody."""
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    frame = zstd.compress(random.Random(7).randbytes(1_000) * 20_000, options=options)
    with pytest.raises(CorruptBody, match="memory"):
        steps("zstd", frame)


@pytest.mark.parametrize("named", [[], [""], ["identity"], ["Identity", ""]])
def test_a_plain_body_needs_no_inflater(named: list[str]) -> None:
    """A body without an encoding or with `identity` is not decompressed."""
    assert inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named])) is None


@pytest.mark.parametrize("named", [["gzip"], ["GZIP"], ["x-gzip"], ["zstd"], ["identity, gzip"]])
def test_a_known_encoding_is_accepted(named: list[str]) -> None:
    """A known encoding is accepted in any case and by its old name."""
    assert inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named])) is not None


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["br"], "'br' is not supported"),
        (["gzip, zstd"], "several"),
        (["gzip", "gzip"], "several"),
        (["b" * 99], "bbb'"),
    ],
)
def test_an_unknown_encoding_is_a_415(named: list[str], message: str) -> None:
    """An unknown encoding or several are a 415 with the supported encodings in the Accept-Encoding header."""
    with pytest.raises(Problem) as e:
        inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named]))
    response = e.value.response()
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, zstd")
    assert message in e.value.detail
    assert len(e.value.detail) < 200
