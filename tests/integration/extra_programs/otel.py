"""`penstock[otel]` with an application's SDK: sending a record creates a span, and the record carries its context."""

import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import Consumer, ConsumerSettings, Producer
from penstock.otel import OpenTelemetryInterceptor
from penstock.testing import FakeCluster


async def main() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with FakeCluster() as cluster:
        cluster.create_topic("orders", partitions=1)
        chain = [OpenTelemetryInterceptor(provider)]
        async with Producer(cluster.bootstrap_servers, interceptors=chain) as producer:
            await producer.send_and_wait("orders", b"tea")
        settings = ConsumerSettings(group_id="shop", auto_offset_reset="earliest")
        async with Consumer(cluster.bootstrap_servers, settings) as consumer:
            consumer.subscribe(["orders"])
            record = await anext(aiter(consumer))
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert span.attributes is not None
    carried = dict(record.headers)["traceparent"] or b""
    print(span.name, span.attributes["messaging.kafka.offset"], f"{span.context.trace_id:032x}" in carried.decode())


if __name__ == "__main__":
    asyncio.run(main())
