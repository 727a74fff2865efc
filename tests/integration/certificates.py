"""A certificate authority for tests, the certificates that it signs, and a server with one of them.

All are generated when a test needs them.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.api.http.server import HttpServer
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.settings import HttpSettings


class Authority:
    """A certificate authority with a new key."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(name, self._key, authority=True)
        self.cafile = folder / f"{name}.pem"
        self.cafile.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, name: str, password: str | None = None) -> Path:
        """Write a certificate for 127.0.0.1 and its key into one PEM file, and return its path."""
        key = ec.generate_private_key(ec.SECP256R1())
        sealed = (
            serialization.NoEncryption()
            if password is None
            else serialization.BestAvailableEncryption(password.encode())
        )
        file = self._folder / f"{name}.pem"
        file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealed)
            + self._sign(name, key).public_bytes(serialization.Encoding.PEM)
        )
        return file


@asynccontextmanager
async def serving_with_trust(app: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpServer]:
    """Serve an app over TLS. SSL_CERT_FILE names the authority of its certificate, so that HTTP clients trust it."""
    authority = Authority(folder, "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.cafile))
    client_tls.cache_clear()
    server = HttpServer(app, HttpSettings(ssl_certfile=authority.issue("server")))
    await server.start()
    try:
        yield server
    finally:
        client_tls.cache_clear()
        await server.stop(1_000)
