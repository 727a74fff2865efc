"""The Content-Encoding of a request's body."""

from __future__ import annotations

from starlette.datastructures import Headers

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import UNSUPPORTED_MEDIA_TYPE
from penstock.shared.common.inflating import STREAMS, Inflater, encodings_of


def inflater_of(headers: Headers) -> Inflater | None:
    """Return the inflater for a request's body; None for a plain body.

    Raises Problem (415) for an unsupported encoding, or for several encodings.
    """
    encodings = encodings_of(headers.getlist("content-encoding"))
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
