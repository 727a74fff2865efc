"""OpenTelemetry spans for the producer's records; needs the extra `penstock[otel]`."""

from penstock.shared.clients.producer.otel import OpenTelemetryInterceptor

__all__ = ["OpenTelemetryInterceptor"]
