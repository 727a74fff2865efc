"""`penstock[otel]` without an SDK: records are sent, and nothing is traced."""

import asyncio

from penstock import Producer
from penstock.otel import OpenTelemetryInterceptor
from penstock.testing import FakeCluster


async def main() -> None:
    async with FakeCluster() as cluster:
        cluster.create_topic("orders", partitions=1)
        async with Producer(cluster.bootstrap_servers, interceptors=[OpenTelemetryInterceptor()]) as producer:
            print((await producer.send_and_wait("orders", b"tea")).offset)


if __name__ == "__main__":
    asyncio.run(main())
