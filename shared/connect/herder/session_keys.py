"""Signed requests between the workers of a group, with a key that they share through the config topic.

The leader creates the key, and replaces it every `inter.worker.key.ttl.ms`. A worker signs the body of a request to the
leader with the key (HMAC). The leader computes the signature itself and compares. The names of the headers are Kafka
Connect's.

>>> key = SessionKey(b"k" * 32, "HmacSHA256", 0)
>>> headers = sign(key, b"[]", "HmacSHA256")
>>> verify(key, b"[]", headers, ("HmacSHA256",)), verify(key, b"[1]", headers, ("HmacSHA256",))
(True, False)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence

from penstock.shared.connect.storage.config_records import SessionKey

SIGNATURE_HEADER = "X-Connect-Authorization"
ALGORITHM_HEADER = "X-Connect-Request-Signature-Algorithm"

KEY_BYTES = 32
HASHES = {"HmacSHA256": hashlib.sha256, "HmacSHA1": hashlib.sha1, "HmacSHA384": hashlib.sha384,
          "HmacSHA512": hashlib.sha512}  # fmt: skip
"""Python's hash functions by Java's names of the algorithms."""


def new_key(algorithm: str, now_ms: int) -> SessionKey:
    """Return a random key."""
    return SessionKey(secrets.token_bytes(KEY_BYTES), algorithm, now_ms)


def expires_in_ms(key: SessionKey | None, ttl_ms: int, now_ms: int) -> int:
    """Return the ms until a key expires; 0 if it has expired or there is none."""
    return 0 if key is None else max(0, key.created_ms + ttl_ms - now_ms)


def sign(key: SessionKey, body: bytes, algorithm: str) -> dict[str, str]:
    """Return the headers for a body."""
    signature = hmac.new(key.key, body, HASHES[algorithm]).digest()
    return {SIGNATURE_HEADER: base64.b64encode(signature).decode(), ALGORITHM_HEADER: algorithm}


def verify(key: SessionKey, body: bytes, headers: Mapping[str, str], allowed: Sequence[str]) -> bool:
    """Return whether a worker with the key has signed the body.

    Raises ValueError if the signature is missing or not base64, or if its algorithm is unknown or not `allowed`.
    """
    given = {name.lower(): value for name, value in headers.items()}
    algorithm = given.get(ALGORITHM_HEADER.lower())
    signature = given.get(SIGNATURE_HEADER.lower())
    if algorithm is None or signature is None:
        raise ValueError("the request is not signed")
    if algorithm not in allowed or algorithm not in HASHES:
        raise ValueError(f"the signature algorithm {algorithm!r} is not one of {', '.join(allowed)}")
    try:
        signed = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the signature is not base64") from None
    return hmac.compare_digest(signed, hmac.new(key.key, body, HASHES[algorithm]).digest())
