"""Detects requests that a web page of another origin made a browser send.

Sans-IO. A browser sends some cross-origin requests without a preflight: a form, or a script's POST with a "simple"
content type. The page cannot read the response, but the request takes effect, with the credentials that the browser
stores. Browsers describe the page in `Sec-Fetch-Site` and `Origin`, which a page cannot set. Clients that are not
browsers send neither header and are allowed.

>>> foreign_page({"host": "localhost:8080", "origin": "http://localhost:8080"}, ())
''
>>> foreign_page({"host": "localhost:8080", "origin": "https://evil.example"}, ())
'https://evil.example'
>>> foreign_page({"host": "localhost:8080", "origin": "https://shop.example"}, ["https://shop.example"])
''
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

OWN_SITES = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site for a page of this origin and for an address that the user typed."""
ORIGIN_CHARACTERS_MAX = 100
"""The most characters of an origin in an error message."""


def foreign_page(headers: Mapping[str, str], allowed: Collection[str]) -> str:
    """Return the origin of the foreign web page that sent a request, or a description if the origin is unknown.

    Returns "" for a page of this origin, for a page of an origin in `allowed` (`*` is all), and for a client that is
    not a browser. Names in `headers` are lower-case.
    """
    origin = headers.get("origin", "")
    site = headers.get("sec-fetch-site", "").lower()
    if site in OWN_SITES or not (origin or site):
        return ""
    if "*" in allowed or (origin and origin in allowed):
        return ""
    # Browsers before Sec-Fetch-Site send only the origin. "null" is a sandboxed page.
    if not site and origin != "null" and origin.partition("://")[2].lower() == headers.get("host", "").lower():
        return ""
    return (origin or f"another origin ({site[:20]})")[:ORIGIN_CHARACTERS_MAX]
