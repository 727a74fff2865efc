"""The TLS context that HTTP clients share."""

from __future__ import annotations

import ssl
from functools import cache


@cache
def client_tls() -> ssl.SSLContext:
    """Return the TLS context of HTTP clients. It trusts the system's CA certificates.

    OpenSSL reads SSL_CERT_FILE and SSL_CERT_DIR in place of the system's files. The context is made once: reading the
    certificates takes 20 ms of CPU.
    """
    return ssl.create_default_context()
