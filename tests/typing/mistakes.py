"""Mistakes in programs, each with the rules by which mypy and pyright find it; a dash: not before it runs."""

from __future__ import annotations

import msgspec

from penstock import (
    Consumer,
    ConsumerRecord,
    ConsumerSettings,
    KafkaSettings,
    Producer,
    ProducerSettings,
    StreamsSettings,
)
from penstock.clients import string_deserializer, struct_deserializer


class Click(msgspec.Struct):
    """A value with fields."""

    ms: float


def a_misspelled_setting() -> None:
    """No such field."""
    KafkaSettings(client_di="x")  # mypy call-arg, pyright reportCallIssue


def a_wrong_literal() -> None:
    """None of the choices."""
    ProducerSettings(compression_type="zip")  # mypy arg-type, pyright reportArgumentType


def a_setting_of_the_wrong_type() -> None:
    """Text where a number belongs."""
    ConsumerSettings(max_poll_records="many")  # mypy arg-type, pyright reportArgumentType


def a_streams_setting_that_is_none() -> None:
    """A choice of the streams' settings."""
    StreamsSettings(processing_guarantee="at_most_once")  # mypy arg-type, pyright reportArgumentType


async def a_forgotten_await(producer: Producer) -> None:
    """The record is never sent."""
    producer.send("clicks", b"1")  # mypy unused-coroutine, pyright reportUnusedCoroutine


async def bytes_used_as_text(consumer: Consumer) -> None:
    """Without a deserializer the value is bytes."""
    async for record in consumer:
        print(record.value.decode())  # mypy union-attr, pyright reportOptionalMemberAccess


async def a_wrong_field(kafka: KafkaSettings) -> None:
    """The deserializer's struct lacks the field."""
    async for record in Consumer(kafka, value_deserializer=struct_deserializer(Click)):
        if record.value is not None:
            print(record.value.msec)  # mypy attr-defined, pyright reportAttributeAccessIssue


async def a_wrong_result(kafka: KafkaSettings) -> None:
    """A key that was decoded to text, taken for bytes."""
    async for record in Consumer(kafka, key_deserializer=string_deserializer):
        taken: bytes | None = record.key  # mypy assignment, pyright reportAssignmentType
        print(taken)


def a_deserializer_of_the_wrong_signature(kafka: KafkaSettings) -> Consumer[bytes | None, str]:
    """It lacks the topic."""

    def decode(data: bytes | None) -> str:
        return str(data)

    return Consumer(kafka, value_deserializer=decode)  # mypy arg-type, pyright reportArgumentType


def a_changed_record(record: ConsumerRecord) -> None:
    """Records are frozen."""
    record.value = b"2"  # mypy misc, pyright reportAttributeAccessIssue
