"""OpenTelemetry spans for the producer's records; needs the extra `penstock[otel]`."""

from penstock.shared.clients.producer.otel import OpenTelemetryInterceptor
from penstock.shared.common.public_names import publish as _publish

__all__ = [
    "OpenTelemetryInterceptor",
]

_publish(__name__, globals(), __all__)
