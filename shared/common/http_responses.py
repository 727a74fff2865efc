"""Responses of other HTTP servers, read with a limit on their size.

httpx decompresses each chunk that it receives at once, as many times as Content-Encoding says. So a limit on what it
returns comes too late: a response of 5 KB may need gigabytes of memory.
"""

from __future__ import annotations

import zlib

import httpx

from penstock.shared.common.errors import PenstockError

ACCEPTED_ENCODING = {"Accept-Encoding": "gzip"}
"""The header of a request whose response `read_response` reads."""


class UnreadableResponse(PenstockError):
    """The body of a successful response is too large, or its Content-Encoding is not supported."""


async def read_response(response: httpx.Response, bytes_max: int) -> httpx.Response:
    """Return a response of `AsyncClient.stream` with its decompressed body.

    As in httpx, data after the end of the gzip data is ignored. If the body of a response that is no success (2xx)
    cannot be decompressed, or is too large, the reason is returned in its place.

    Raises UnreadableResponse, if the body has more than `bytes_max` bytes or an unsupported encoding, and HTTPError.
    """
    try:
        body = await _read_body(response, bytes_max)
    except (UnreadableResponse, httpx.DecodingError) as e:
        if response.is_success:
            raise
        body = str(e).encode()
    headers = {name: value for name, value in response.headers.items() if name.lower() != "content-encoding"}
    return httpx.Response(response.status_code, headers=headers, content=body)


async def _read_body(response: httpx.Response, bytes_max: int) -> bytes:
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise UnreadableResponse(f"the response has the Content-Encoding {encoding[:60]}, not gzip")
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16) if encoding.endswith("gzip") else None
    body = bytearray()
    received = False
    try:
        async for chunk in response.aiter_raw():
            received = True
            if inflater is None:
                body += chunk
            elif not inflater.eof:
                body += inflater.decompress(chunk, bytes_max + 1 - len(body))
            if len(body) > bytes_max:
                raise UnreadableResponse(f"the response has more than {bytes_max} bytes")
    except zlib.error as e:
        raise httpx.DecodingError(f"the response is not gzip, as Content-Encoding says: {e}") from None
    # A response without a body, such as 304, may name an encoding too.
    if inflater is not None and received and not inflater.eof:
        raise httpx.DecodingError("the response ends in the middle of its gzip data (Content-Encoding)")
    return bytes(body)
