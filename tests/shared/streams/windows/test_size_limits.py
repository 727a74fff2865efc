"""The limit of a key's size, and the fast check that agrees with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import RecordTooLarge
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_json, encode_updates
from penstock.shared.streams.window_result import WindowKey, WindowResult
from penstock.shared.streams.windows.size_limits import check_key, key_bytes
from penstock.shared.streams.windows.window_descriptions import describe_window

KEYS = st.text(st.characters(exclude_categories=["Cs"])) | st.binary()
ENVELOPE = len(b'{"key":,"start":0,"end":0}')


@given(key=KEYS, limit=st.integers(0, 200))
def test_a_key_is_refused_by_what_it_takes(key: Any, limit: int) -> None:
    """The limit applies to the measured bytes, and the fast check agrees with it."""
    if key_bytes(key) <= limit:
        check_key(key, "s", limit)
    else:
        with pytest.raises(RecordTooLarge, match=f"takes {key_bytes(key)} bytes"):
            check_key(key, "s", limit)


@given(key=KEYS)
def test_no_result_holds_more_of_a_key(key: Any) -> None:
    """The measured size of a key bounds its size in results of both encoders and in changelog entries."""
    record = Record(WindowKey(key, 0, 0), WindowResult(key, 0, 0, {}), 0)
    for encode, envelopes in ((encode_json, 1), (encode_updates, 2)):
        written = sum(len(part or b"") for part in encode(record))
        assert written <= key_bytes(key) + envelopes * ENVELOPE
    assert msgspec.json.decode(record.value.to_json(), type=dict[str, Any])["start"] == 0


def test_a_windows_name_is_short() -> None:
    """A long key is shown by its beginning and its length, a value that is no key by a part of its text."""
    assert describe_window("s", "k" * 200, 1, 2) == f"store 's', key '{'k' * 100}'... (200 characters), window 1 to 2"
    assert describe_window(None, b"\xff", 1, 2) == "key b'\\xff', window 1 to 2"
    assert len(describe_window("s", ["k" * 10_000], 1, 2)) < 1_100
