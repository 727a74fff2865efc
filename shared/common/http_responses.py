"""Responses of other HTTP servers, read with a limit on their size.

httpx decompresses each chunk that it receives at once, as many times as Content-Encoding says. So a limit on what it
returns comes too late: a response of 5 KB may need gigabytes of memory.
"""

from __future__ import annotations

import httpx

from penstock.shared.common.errors import PenstockError
from penstock.shared.common.inflating import STREAMS, CorruptBody, Inflater, encodings_of

ACCEPTED_ENCODING = {"Accept-Encoding": "gzip"}
"""The header of a request whose response `read_response` reads."""


class UnreadableResponse(PenstockError):
    """The body of a response is too large, or its Content-Encoding is not supported."""


async def read_response(response: httpx.Response, bytes_max: int) -> httpx.Response:
    """Return a response of `AsyncClient.stream` with its decompressed body.

    Raises UnreadableResponse, if the body has more than `bytes_max` bytes or an unsupported encoding, and HTTPError.
    """
    encodings = encodings_of(response.headers.get_list("content-encoding"))
    if len(encodings) > 1 or not STREAMS.keys() >= set(encodings):
        raise UnreadableResponse(f"the response has the Content-Encoding {', '.join(encodings)[:60]}, not gzip")
    inflater = Inflater(encodings[0]) if encodings else None
    body = bytearray()

    def append(data: bytes) -> None:
        body.extend(data)
        if len(body) > bytes_max:
            raise UnreadableResponse(f"the response has more than {bytes_max} bytes")

    received = False
    try:
        async for chunk in response.aiter_raw():
            received = True
            if inflater is None:
                append(chunk)
                continue
            inflater.feed(chunk)
            while inflater.pending:
                append(inflater.step())
        # A response without a body, such as 304, may name an encoding too.
        if inflater is not None and received:
            inflater.close()
    except CorruptBody as e:
        raise httpx.DecodingError(str(e), request=response.request) from None
    return with_body(response, bytes(body))


def with_body(response: httpx.Response, body: bytes) -> httpx.Response:
    """Return a response with another body, which is not compressed."""
    headers = {name: value for name, value in response.headers.items() if name.lower() != "content-encoding"}
    return httpx.Response(response.status_code, headers=headers, content=body)
