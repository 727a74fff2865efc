"""Responses of other HTTP servers, read with a limit."""

from __future__ import annotations

import gzip
import tracemalloc

import httpx
import pytest

from penstock.shared.common.http_responses import UnreadableResponse, read_response

TWICE = gzip.compress(gzip.compress(b"[1]", mtime=0), mtime=0)


async def read(body: bytes, bytes_max: int, encoding: str = "", status: int = 200) -> httpx.Response:
    headers = {"Content-Encoding": encoding, "ETag": '"1"'}
    response = httpx.Response(status, headers=headers, stream=httpx.ByteStream(body), request=httpx.Request("GET", "/"))
    return await read_response(response, bytes_max)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", b"[1]"),
        ("identity", b"[1]"),
        ("gzip", gzip.compress(b"[1]", mtime=0)),
        ("X-GZIP", gzip.compress(b"[1]", mtime=0) + bytes(9)),
    ],
)
async def test_a_body_of_the_limit_is_read(encoding: str, body: bytes) -> None:
    """A plain or compressed body is returned as plain text, with the headers that still apply to it. As in httpx, data
    after the end of the gzip data is ignored."""
    found = await read(body, 3, encoding)
    assert (found.status_code, found.text, found.headers["ETag"]) == (200, "[1]", '"1"')
    assert "Content-Encoding" not in found.headers


async def test_a_response_without_a_body_may_name_an_encoding() -> None:
    """Servers send the headers of the whole resource with a 304."""
    assert (await read(b"", 3, "gzip", 304)).content == b""


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("", b"[10]", "more than 3 bytes"),
        ("gzip", gzip.compress(b"[10]", mtime=0), "more than 3 bytes"),
        ("gzip, gzip", TWICE, "gzip, gzip"),
        ("br", b"[1]", "br"),
    ],
)
async def test_a_larger_body_and_an_unsupported_encoding_are_errors(encoding: str, body: bytes, message: str) -> None:
    """The limit is on the decompressed body. Several encodings of one body are not supported."""
    with pytest.raises(UnreadableResponse, match=message):
        await read(body, 3, encoding)


@pytest.mark.parametrize("body", [b"[1]", gzip.compress(b"[1]", mtime=0)[:-1]])
async def test_a_corrupt_body_is_an_error_of_the_request(body: bytes) -> None:
    """The client treats a truncated body, or one that is not compressed, as any other failed request."""
    with pytest.raises(httpx.DecodingError, match="gzip"):
        await read(body, 3, "gzip")


@pytest.mark.parametrize(
    ("encoding", "body", "reason"),
    [("deflate", b"[1]", "deflate"), ("gzip", b"[1]", "is not gzip"), ("", b"[10]", "more than 3 bytes")],
)
@pytest.mark.parametrize("status", [304, 404, 503])
async def test_an_error_that_cannot_be_read_keeps_its_status(
    status: int, encoding: str, body: bytes, reason: str
) -> None:
    """The status decides whether a request is sent again, so it is returned, with the reason in place of the body."""
    found = await read(body, 3, encoding, status)
    assert found.status_code == status
    assert reason in found.text


async def test_a_small_body_does_not_fill_the_memory() -> None:
    """A body is decompressed only up to the limit."""
    body = gzip.compress(bytes(16 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableResponse):
            await read(body, 1_000, "gzip")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
