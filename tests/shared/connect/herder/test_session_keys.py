"""Signatures of requests between workers."""

from __future__ import annotations

import base64

import pytest

from penstock.shared.connect.herder.session_keys import (
    ALGORITHM_HEADER,
    HASHES,
    SIGNATURE_HEADER,
    expires_in_ms,
    new_key,
    sign,
    verify,
)
from penstock.shared.connect.storage.config_records import SessionKey


@pytest.mark.parametrize("algorithm", HASHES)
def test_a_signature_holds_for_its_body_and_key_alone(algorithm: str) -> None:
    """A signature is valid only for its body and key, with header names in any case."""
    key = new_key(algorithm, 0)
    headers = {name.lower(): value for name, value in sign(key, b"body").items()}
    assert verify(key, b"body", headers, (algorithm,))
    assert not verify(key, b"other", headers, (algorithm,))
    assert not verify(new_key(algorithm, 0), b"body", headers, (algorithm,))


def test_malformed_signatures_are_errors() -> None:
    """A missing signature, an unaccepted algorithm and invalid base64 are errors with the reason."""
    key = SessionKey(b"k", "HmacSHA256", 0)
    signed = sign(key, b"")
    for headers in (
        {},
        {ALGORITHM_HEADER: "HmacSHA256"},
        {**signed, ALGORITHM_HEADER: "HmacMD5"},
        {**signed, SIGNATURE_HEADER: "*"},
    ):
        with pytest.raises(ValueError, match=r"signed|algorithm|base64"):
            verify(key, b"", headers, ("HmacSHA256",))


def test_signatures_equal_javas() -> None:
    """A signature equals HMAC-SHA256 of RFC 4231's second test case."""
    key = SessionKey(b"Jefe", "HmacSHA256", 0)
    signature = sign(key, b"what do ya want for nothing?")[SIGNATURE_HEADER]
    known = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert base64.b64decode(signature).hex() == known


def test_keys_expire() -> None:
    """A key expires after its time to live; a missing key is expired."""
    key = SessionKey(b"k", "HmacSHA256", 1_000)
    assert [expires_in_ms(key, 500, now) for now in (1_000, 1_400, 1_500, 9_000)] == [500, 100, 0, 0]
    assert expires_in_ms(None, 500, 0) == 0
    assert len(new_key("HmacSHA256", 0).key) == 32
