"""Spans of a producer's records on a real broker: every record has a span, and every span ends."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.otel import OpenTelemetryInterceptor
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.interceptors import ProducerInterceptor
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import InvalidTimestamp, RecordTooLarge
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker


async def test_spans_of_every_outcome(kafka: Broker, topic_name: str) -> None:
    """The span of an acknowledged, rejected or cancelled record ends with its outcome, and stored records carry their
    span's context.
    """
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    interceptor = OpenTelemetryInterceptor(provider)
    chain: list[ProducerInterceptor] = [interceptor]
    async with Admin(settings) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    async with Producer(settings, ProducerSettings(max_request_size=10_000), interceptors=chain) as producer:
        await (await producer.send(topic_name, b"one"))
        await (await producer.send_many([ProducerRecord(topic_name, value) for value in (b"two", b"three")]))
        with pytest.raises(RecordTooLarge):
            await producer.send(topic_name, b"x" * 20_000)
        with pytest.raises(InvalidTimestamp):
            await producer.send(topic_name, b"v", timestamp="now")  # type: ignore[arg-type]
        (await producer.send(topic_name, b"taken back")).cancel()
        waiting = asyncio.ensure_future(producer.send("a-topic-that-is-not-there", b"v"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert repr(interceptor) == "<OpenTelemetryInterceptor 0 spans open>"
    spans = exporter.get_finished_spans()
    fates = [(s.attributes or {}).get("error.type", (s.attributes or {}).get("messaging.kafka.offset")) for s in spans]
    assert fates == [0, 1, 2, "RecordTooLarge", "InvalidTimestamp", "SendCancelled", "SendCancelled"]
    contexts = [b"%032x-%016x" % (s.context.trace_id, s.context.span_id) for s in spans if s.context is not None]
    async with Consumer(settings, ConsumerSettings(auto_offset_reset="earliest")) as consumer:
        consumer.assign([TopicPartition(topic_name, 0)])
        found: list[bytes] = []
        async with asyncio.timeout(20):
            while len(found) < 3:
                for columns in (await consumer.poll(200)).values():
                    found += [dict(record.headers)["traceparent"] or b"" for record in columns.records()]
    assert [context[3:-3] for context in found] == contexts[:3]
