"""OpenTelemetry: a span for each record, from `send` to its acknowledgement. The record's headers carry the span's
context.

    producer = Producer(kafka, interceptors=[OpenTelemetryInterceptor()])

The names follow OpenTelemetry's semantic conventions for messaging. A consumer finds the span's context in the headers
(`traceparent` in W3C format, unless another propagator is set up) and can continue the trace. The parent of the span is
the current span where `send` is called. If there is none, the parent is the context in the record's own headers, so
that a forwarded record stays in its trace.

The headers also match a record's result with its span. If the propagator does not write the span's context
(`OTEL_PROPAGATORS=none`), a span ends when its record is handed to the producer, without a partition and an offset.

The interceptor needs the extra `penstock[otel]`. It does nothing until the application sets up a tracer provider.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, Setter, TextMapPropagator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

from penstock.shared.clients.interceptors.interceptors import ProducerInterceptor
from penstock.shared.common.errors import SendCancelled
from penstock.shared.common.records import Headers, ProducerRecord, RecordMetadata

INSTRUMENTATION = "penstock"
OPEN_SPANS_MAX = 500_000
"""The maximum number of open spans: more than the records that fit into the default `buffer_memory`. At the limit the
oldest span ends without its record's fate. Without a limit, spans would accumulate if a later interceptor removes the
headers."""


class _HeaderSetter(Setter[dict[str, bytes]]):
    def set(self, carrier: dict[str, bytes], key: str, value: str) -> None:
        carrier[key] = value.encode()


class _HeaderGetter(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        return [
            value.decode("utf-8", "replace") for name, value in carrier if name == key and value is not None
        ] or None

    def keys(self, carrier: Headers) -> list[str]:
        return [name for name, _ in carrier]


class OpenTelemetryInterceptor(ProducerInterceptor):
    """Traces each record, by default with the global tracer provider and propagator; spans get `client_id` if given."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        propagator: TextMapPropagator | None = None,
        client_id: str | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(INSTRUMENTATION, tracer_provider=tracer_provider)
        self._propagator = propagator
        self._attributes = {
            "messaging.system": "kafka",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
        }
        if client_id is not None:
            self._attributes["messaging.client.id"] = client_id
        self._open: dict[Headers, Span] = {}

    def __repr__(self) -> str:
        return f"<OpenTelemetryInterceptor {len(self._open)} spans open>"

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Start the record's span and put its context into the headers; it replaces a context that is there."""
        propagator = self._propagator or propagate.get_global_textmap()
        attributes: dict[str, str | bool] = {**self._attributes, "messaging.destination.name": record.topic}
        if (key := _decode_record_key(record.key)) is not None:
            attributes["messaging.kafka.message.key"] = key
        if record.value is None:
            attributes["messaging.kafka.message.tombstone"] = True
        parent = _extract_parent_context(propagator, record.headers)
        span = self._tracer.start_span(f"send {record.topic}", parent, SpanKind.PRODUCER, attributes)
        carrier: dict[str, bytes] = {}
        propagator.inject(carrier, trace.set_span_in_context(span, parent), _HeaderSetter())
        kept = tuple(header for header in record.headers if header[0] not in carrier)
        headers: Headers = (*kept, *carrier.items())
        if span.is_recording() and not _is_in_headers(span, propagator, headers):
            span.end()
        elif span.is_recording():
            if len(self._open) >= OPEN_SPANS_MAX:
                self._open.pop(next(iter(self._open))).end()
            self._open[_propagated_headers(headers, propagator.fields)] = span
        return msgspec.structs.replace(record, headers=headers) if carrier else record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        """End the record's span with the record's partition and offset, or with its error."""
        span = self._open.pop(
            _propagated_headers(headers, (self._propagator or propagate.get_global_textmap()).fields), None
        )
        if span is None:
            return
        if metadata is not None:
            span.set_attribute("messaging.destination.partition.id", str(metadata.partition))
            if metadata.offset >= 0:
                span.set_attribute("messaging.kafka.offset", metadata.offset)
            if metadata.serialized_value_size >= 0:
                span.set_attribute("messaging.message.body.size", metadata.serialized_value_size)
        if error is not None:
            span.set_attribute("error.type", type(error).__qualname__)
            if not isinstance(error, SendCancelled):
                span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()


def _extract_parent_context(propagator: TextMapPropagator, headers: Headers) -> Context | None:
    """Return the context in the headers as the parent. None means the current context: a span is current, or there are
    no headers."""
    if not headers or trace.get_current_span().get_span_context().is_valid:
        return None
    return propagator.extract(headers, getter=_HeaderGetter())


def _is_in_headers(span: Span, propagator: TextMapPropagator, headers: Headers) -> bool:
    """Return whether the propagator finds the span in the headers."""
    found = trace.get_current_span(propagator.extract(headers, Context(), _HeaderGetter()))
    return found.get_span_context().span_id == span.get_span_context().span_id


def _propagated_headers(headers: Headers, fields: Collection[str]) -> Headers:
    """Return the headers with a propagator's fields. Those of an open span contain its id, so each record's differ."""
    return tuple(header for header in headers if header[0] in fields)


def _decode_record_key(key: object) -> str | None:
    if isinstance(key, bytes):
        try:
            return key.decode()
        except UnicodeDecodeError:
            return None
    return None if key is None else str(key)
