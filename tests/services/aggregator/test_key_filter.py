"""Keys that match a filter text."""

from __future__ import annotations

import pytest

from penstock.services.aggregator.key_filter import KeyFilter


@pytest.mark.parametrize(
    ("typed", "found", "passed_over"),
    [
        ("", ["ann", b"\xff"], []),
        ("nn", ["ann", b"ann"], ["bob", b"NN"]),
        ("\\xff", [b"a\xff"], [b"a\xfe"]),
        ('{"user": 5}', ['{"user": 5}', b'{"user":5}', '{ "user" :5.0}'], ['{"user": 6}', '{"user": 5, "a": 1}']),
        ("[1, 2]", [b"[1,2]"], [b"[2,1]", b"[" * 100_000]),
        ("[" * 100_000, [b"[" * 100_000], [b"[1,2]"]),
        ('{"user"', ['{"user": 5}'], ["user"]),
        ("12", ["12", "a12", bytes(3) + b"\x0c", bytes(7) + b"\x0c"], [b"\x0c", "1", bytes(8)]),
        ("-2", [b"\xff\xff\xff\xfe", b"\xff" * 7 + b"\xfe"], [b"\xff" * 8]),
        ("9" * 30, ["9" * 31], [b"9"]),
    ],
)
def test_matching_keys(typed: str, found: list[str | bytes], passed_over: list[str | bytes]) -> None:
    """Text matches a part of a key, JSON matches its value in any notation, and a number also matches 4 or 8 bytes."""
    key_filter = KeyFilter(typed)
    assert [key for key in (*found, *passed_over) if key_filter.has(key)] == found


def test_whole_keys() -> None:
    """A filter has the exact keys to look up: the text in the store's key type, and a number
    as serializers write it.
    """
    assert KeyFilter("").exact("string") == []
    assert KeyFilter("7").exact("string") == ["7"]
    assert KeyFilter("7").exact("bytes") == [b"7", bytes(3) + b"\x07", bytes(7) + b"\x07"]
