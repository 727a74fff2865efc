"""Whether a web page of another origin had a browser send a request.

Sans-IO. A browser sends some requests of any page without asking the server first: a form, or a script's POST of a
"simple" content type. The page does not see the answer, but what was asked for is done, with the credentials that the
browser keeps. Browsers say whose page it was: `Sec-Fetch-Site`, which a page cannot set, and `Origin`. What is no
browser sends neither, and is let through.

>>> foreign_page({"host": "localhost:8080", "origin": "http://localhost:8080"}, ())
''
>>> foreign_page({"host": "localhost:8080", "origin": "https://evil.example"}, ())
'https://evil.example'
>>> foreign_page({"host": "localhost:8080", "origin": "https://shop.example"}, ["https://shop.example"])
''
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

SIMPLE_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""What a browser lets any page send without asking first (the Fetch standard's safelist)."""
OWN_SITES = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site: this origin's own page, and what the user typed."""
ORIGIN_CHARACTERS_MAX = 100


def foreign_page(headers: Mapping[str, str], allowed: Collection[str]) -> str:
    """The origin of the page that sent a request, or what is known of it; empty for our own, an allowed one, or none.

    `headers` are by lower-case name; `allowed` are origins as browsers write them, or `*`.
    """
    origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "").lower()
    if site in OWN_SITES or not (origin or site):
        return ""
    if "*" in allowed or (origin and origin in allowed):
        return ""
    if not site and origin != "null" and origin.partition("://")[2].lower() == headers.get("host", "").lower():
        return ""
    return (origin or f"another origin ({site[:20]})")[:ORIGIN_CHARACTERS_MAX]


def is_simple(content_type: str) -> bool:
    """Whether any page could have sent a body of this type; one without a type is none.

    >>> is_simple("text/plain;charset=UTF-8"), is_simple("application/json"), is_simple("")
    (True, False, False)
    """
    return content_type.partition(";")[0].strip().lower() in SIMPLE_TYPES
