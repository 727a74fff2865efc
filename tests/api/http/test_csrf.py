"""Detection of cross-site requests."""

from __future__ import annotations

import pytest

from penstock.api.http.csrf import foreign_page

HOST = {"host": "localhost:8080"}


@pytest.mark.parametrize(
    ("headers", "page"),
    [
        ({}, ""),
        ({"origin": "http://localhost:8080"}, ""),
        ({"origin": "HTTP://LOCALHOST:8080"}, ""),
        ({"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}, ""),
        ({"sec-fetch-site": "none"}, ""),
        ({"origin": "https://evil.example"}, "https://evil.example"),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, "http://localhost:3000"),
        ({"origin": "http://localhost:8080", "sec-fetch-site": "cross-site"}, "http://localhost:8080"),
        ({"origin": "null"}, "null"),
        ({"sec-fetch-site": "cross-site"}, "another origin (cross-site)"),
        ({"origin": "http://localhost:8080.evil.example"}, "http://localhost:8080.evil.example"),
    ],
)
def test_only_same_origin_pages_and_other_clients_pass(headers: dict[str, str], page: str) -> None:
    """Requests of the same origin and of clients without browser headers pass; others return their page."""
    assert foreign_page(HOST | headers, ()) == page


def test_configured_origins_pass() -> None:
    """Configured origins pass, or all with a star."""
    cross = HOST | {"origin": "https://shop.example", "sec-fetch-site": "cross-site"}
    assert foreign_page(cross, ["https://shop.example"]) == ""
    assert foreign_page(cross, ["https://other.example"]) == "https://shop.example"
    assert foreign_page(cross, ["*"]) == ""
