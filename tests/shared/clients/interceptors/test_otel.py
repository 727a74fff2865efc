"""Spans are started with the record, found by its headers, and ended with its result."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from penstock.shared.clients.interceptors import otel
from penstock.shared.clients.interceptors.otel import OpenTelemetryInterceptor
from penstock.shared.common.errors import DeliveryTimeout, SendCancelled
from penstock.shared.common.records import ProducerRecord, RecordMetadata

TRACEPARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """An interceptor and its ended spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.interceptor = OpenTelemetryInterceptor(self.provider, client_id="c-1")

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def traced() -> Traced:
    return Traced()


def written(span: ReadableSpan) -> bytes:
    """A span's context in W3C format."""
    assert span.context is not None
    return b"00-%032x-%016x-%02x" % (span.context.trace_id, span.context.span_id, span.context.trace_flags)


def test_a_record_that_is_acknowledged(traced: Traced) -> None:
    """The span has the record's attributes, partition and offset. Its context is in the headers beside the record's
    own."""
    record = traced.interceptor.on_send(ProducerRecord("clicks", b"value", b"ann", headers=(("own", b"1"),)))
    assert traced.ended == ()
    assert repr(traced.interceptor) == "<OpenTelemetryInterceptor 1 spans open>"
    traced.interceptor.on_acknowledgement(RecordMetadata("clicks", 2, 41, 0, 3, 5), None, record.headers)
    (span,) = traced.ended
    assert record == ProducerRecord("clicks", b"value", b"ann", (("own", b"1"), ("traceparent", written(span))))
    assert (span.name, span.kind, span.parent, span.status.status_code) == (
        "send clicks",
        SpanKind.PRODUCER,
        None,
        StatusCode.UNSET,
    )
    assert dict(span.attributes or {}) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.client.id": "c-1",
        "messaging.destination.name": "clicks",
        "messaging.kafka.message.key": "ann",
        "messaging.destination.partition.id": "2",
        "messaging.kafka.offset": 41,
        "messaging.message.body.size": 5,
    }
    assert repr(traced.interceptor) == "<OpenTelemetryInterceptor 0 spans open>"


def test_a_record_that_fails(traced: Traced) -> None:
    """The span has the error's name and an exception event. A cancelled record has no stack trace."""
    for error in (DeliveryTimeout("clicks-0: too late"), SendCancelled("clicks-0: taken back")):
        record = traced.interceptor.on_send(ProducerRecord("clicks", None))
        traced.interceptor.on_acknowledgement(None, error, record.headers)
    late, cancelled = traced.ended
    assert late.attributes is not None
    assert (late.attributes["error.type"], late.attributes["messaging.kafka.message.tombstone"]) == (
        "DeliveryTimeout",
        True,
    )
    assert (late.status.status_code, late.status.description) == (StatusCode.ERROR, "clicks-0: too late")
    assert [event.name for event in late.events] == ["exception"]
    assert (cancelled.status.status_code, list(cancelled.events)) == (StatusCode.ERROR, [])


def test_results_in_another_order(traced: Traced) -> None:
    """Records of one topic are distinguished in any order of acknowledgement."""
    records = [traced.interceptor.on_send(ProducerRecord("t", b"%d" % i)) for i in range(3)]
    for i in (2, 0, 1):
        traced.interceptor.on_acknowledgement(RecordMetadata("t", 0, i, 0), None, records[i].headers)
    offsets = {written(span): (span.attributes or {})["messaging.kafka.offset"] for span in traced.ended}
    assert [offsets[record.headers[0][1] or b""] for record in records] == [0, 1, 2]


def test_the_parent(traced: Traced) -> None:
    """The parent is the current span, else the context in the record's headers with its baggage, else none."""
    forwarded = ProducerRecord("t", b"", headers=(("traceparent", TRACEPARENT), ("baggage", b"who=ann")))
    with traced.provider.get_tracer("test").start_as_current_span("handler") as handler:
        inside = traced.interceptor.on_send(forwarded)
    outside = traced.interceptor.on_send(forwarded)
    for record in (inside, outside):
        traced.interceptor.on_acknowledgement(None, None, record.headers)
    _, first, second = traced.ended
    assert first.parent == handler.get_span_context()
    assert second.parent is not None
    assert f"{second.parent.span_id:016x}" == "b7ad6b7169203331"
    assert dict(outside.headers) == {"traceparent": written(second), "baggage": b"who=ann"}
    assert len(outside.headers) == 2


def test_baggage_goes_along(traced: Traced) -> None:
    """The current context's baggage is in the headers, and the span is still found."""
    token = context.attach(baggage.set_baggage("tenant", "a1"))
    record = traced.interceptor.on_send(ProducerRecord("t", b""))
    context.detach(token)
    assert dict(record.headers)["baggage"] == b"tenant=a1"
    traced.interceptor.on_acknowledgement(None, None, record.headers)
    assert len(traced.ended) == 1


@pytest.mark.parametrize("propagator", [CompositePropagator([]), W3CBaggagePropagator()])
def test_a_propagator_that_writes_no_span_context(traced: Traced, propagator: TextMapPropagator) -> None:
    """Without the span's context in the headers a result cannot be matched with its span. The span ends when its record
    is handed over."""
    token = context.attach(baggage.set_baggage("tenant", "a1"))
    interceptor = OpenTelemetryInterceptor(traced.provider, propagator)
    records = [interceptor.on_send(ProducerRecord("t", b"", b"%d" % i)) for i in range(3)]
    context.detach(token)
    for offset, record in reversed(list(enumerate(records))):
        interceptor.on_acknowledgement(RecordMetadata("t", 0, offset, 0, 1, 0), None, record.headers)
    attributes = [span.attributes or {} for span in traced.ended]
    assert [each["messaging.kafka.message.key"] for each in attributes] == ["0", "1", "2"]
    assert not any("messaging.kafka.offset" in each for each in attributes)


def test_a_key_that_is_not_text(traced: Traced) -> None:
    """A key of bytes that are not UTF-8 is left out. An unserialized key is recorded as text."""
    for key in (b"\xff", 17):
        record = traced.interceptor.on_send(ProducerRecord("t", b"", key))
        traced.interceptor.on_acknowledgement(None, None, record.headers)
    keys = [(span.attributes or {}).get("messaging.kafka.message.key") for span in traced.ended]
    assert keys == [None, "17"]


def test_an_unsampled_span(traced: Traced) -> None:
    """The headers have the context of an unsampled span, and no state is kept for it."""
    interceptor = OpenTelemetryInterceptor(TracerProvider(sampler=ALWAYS_OFF))
    record = interceptor.on_send(ProducerRecord("t", b""))
    ((name, value),) = record.headers
    assert name == "traceparent"
    assert not int((value or b"")[-2:], 16) & trace.TraceFlags.SAMPLED
    assert repr(interceptor) == "<OpenTelemetryInterceptor 0 spans open>"
    interceptor.on_acknowledgement(None, None, record.headers)


def test_without_a_provider() -> None:
    """Without a tracer provider the record is sent unchanged."""
    interceptor = OpenTelemetryInterceptor(trace.NoOpTracerProvider())
    record = ProducerRecord("t", b"")
    assert interceptor.on_send(record) is record
    interceptor.on_acknowledgement(None, None, record.headers)


def test_spans_without_an_acknowledgement(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the headers get lost, the oldest spans are ended without a result."""
    monkeypatch.setattr(otel, "OPEN_SPANS_MAX", 2)
    for i in range(3):
        record = traced.interceptor.on_send(ProducerRecord("t", b"", b"%d" % i))
        traced.interceptor.on_acknowledgement(None, None, msgspec.structs.replace(record, headers=()).headers)
    assert [(span.attributes or {})["messaging.kafka.message.key"] for span in traced.ended] == ["0"]
    assert repr(traced.interceptor) == "<OpenTelemetryInterceptor 2 spans open>"
