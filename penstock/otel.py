"""OpenTelemetry spans for the producer's records; needs the extra `penstock[otel]`."""

from penstock.shared.common.extras import needs as _needs
from penstock.shared.common.public_names import publish as _publish

with _needs("penstock.otel", "otel"):
    from penstock.shared.clients.interceptors.otel import OpenTelemetryInterceptor

__all__ = [
    "OpenTelemetryInterceptor",
]

_publish(__name__, globals(), __all__)
