"""Programs that both type checkers accept, with the types that they infer."""

# pyright: strict
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

import msgspec

from penstock import (
    Consumer,
    ConsumerRecord,
    ConsumerSettings,
    KafkaSettings,
    Producer,
    ProducerRecord,
    ProducerSettings,
    StreamsSettings,
)
from penstock.clients import Columns, json_deserializer, string_deserializer, struct_deserializer
from penstock.shared.common.settings import ServiceSettings


class Click(msgspec.Struct):
    """A value with fields."""

    ms: float


class Nested(ServiceSettings):
    """Settings of a service, with a table of its own defaults."""

    kafka: KafkaSettings = KafkaSettings(client_id="nested")


def settings() -> None:
    """Every field has its default, those that are declared with a description too."""
    assert_type(KafkaSettings().client_id, str | None)
    assert_type(KafkaSettings(bootstrap_servers="a:1", security_protocol="SSL").request_timeout_ms, int)
    assert_type(Nested().kafka, KafkaSettings)
    assert_type(ConsumerSettings().group_id, str | None)
    assert_type(ProducerSettings().linger_ms, int)
    assert_type(StreamsSettings().application_id, str)


async def without_deserializers(kafka: KafkaSettings) -> None:
    """Keys and values are bytes, or None."""
    async with Consumer(kafka, ConsumerSettings(group_id="g")) as consumer:
        assert_type(consumer, Consumer[bytes | None, bytes | None])
        assert_type(consumer, Consumer)
        async for record in consumer:
            assert_type(record, ConsumerRecord[bytes | None, bytes | None])
            assert_type(record.value, bytes | None)
        for columns in (await consumer.poll(1_000)).values():
            assert_type(columns, Columns[bytes | None, bytes | None])
            assert_type(columns, Columns)


async def with_deserializers(kafka: KafkaSettings) -> None:
    """Each deserializer's result is the type of its half of the record; bootstrap servers may be given as text."""
    assert_type(Consumer("localhost:9092", key_deserializer=string_deserializer), Consumer[str | None, bytes | None])
    assert_type(Consumer(kafka, key_deserializer=string_deserializer), Consumer[str | None, bytes | None])
    assert_type(Consumer(kafka, value_deserializer=json_deserializer), Consumer[bytes | None, Any])
    both = Consumer(kafka, key_deserializer=string_deserializer, value_deserializer=struct_deserializer(Click))
    assert_type(both, Consumer[str | None, Click | None])
    async for record in both:
        assert_type(record.key, str | None)
        if record.value is not None:
            assert_type(record.value.ms, float)
    for columns in (await both.poll(1_000)).values():
        assert_type(columns, Columns[str | None, Click | None])
        assert_type(columns.values, Sequence[Click | None])
        assert_type(columns.record(0), ConsumerRecord[str | None, Click | None])
        assert_type([record.key for record in columns.records()], list[str | None])


async def produced(producer: Producer, plain: ProducerRecord) -> None:
    """A record to be sent holds what it is made of; without types it holds bytes."""
    assert_type(plain.key, bytes | None)
    typed: ProducerRecord[str, Click] = ProducerRecord("clicks", Click(1.0), "ann")
    assert_type(typed.value, Click)
    await producer.send_many([typed])
    await producer.send(typed)
    await producer.send_and_wait(typed)
    delivery = await producer.send("clicks", b"1")
    await delivery
