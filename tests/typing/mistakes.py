"""Mistakes in programs, each with the rules by which mypy and pyright find it.

A dash: the checker does not find it. What neither finds is an error when the program runs.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

from penstock import (
    Consumer,
    ConsumerRecord,
    ConsumerSettings,
    KafkaSettings,
    Mean,
    Processor,
    Producer,
    ProducerSettings,
    PunctuationType,
    Record,
    StreamsBuilder,
    StreamsSettings,
)
from penstock.clients import string_deserializer, struct_deserializer
from penstock.streams import GroupedStream, KeyValueStore, ProcessorContext, Stream, Table


class Click(msgspec.Struct):
    """A value with fields."""

    ms: float


def a_misspelled_import() -> None:
    """Public modules import names late, and checkers know them all the same."""
    from penstock import Produser  # mypy attr-defined, pyright reportAttributeAccessIssue
    from penstock.clients import Konsumer  # mypy attr-defined, pyright reportAttributeAccessIssue
    from penstock.connect.connectors import FilesSingConnector  # mypy attr-defined, pyright reportAttributeAccessIssue
    from penstock.connect.converters import JsonKonverter  # mypy attr-defined, pyright reportAttributeAccessIssue
    from penstock.connect.transforms import RegexRuter  # mypy attr-defined, pyright reportAttributeAccessIssue
    from penstock.testing import FakeKluster  # mypy attr-defined, pyright reportAttributeAccessIssue

    print(Konsumer, Produser, FilesSingConnector, JsonKonverter, RegexRuter, FakeKluster)


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


def a_deserializer_of_the_wrong_signature(kafka: KafkaSettings) -> None:
    """It lacks the topic."""

    def decode(data: bytes | None) -> str:
        return str(data)

    Consumer(kafka, value_deserializer=decode)  # mypy arg-type, pyright reportArgumentType


def a_changed_record(record: ConsumerRecord) -> None:
    """Records are frozen."""
    record.value = b"2"  # mypy misc, pyright reportAttributeAccessIssue


async def a_wrong_column(kafka: KafkaSettings) -> None:
    """The values of a poll are decoded too."""
    consumer = Consumer(kafka, value_deserializer=string_deserializer)
    for columns in (await consumer.poll(1_000)).values():
        taken: list[bytes | None] = columns.values  # mypy assignment, pyright reportAssignmentType
        print(taken)


def a_misspelled_field_in_a_lambda(builder: StreamsBuilder) -> None:
    """`value=` says what the records hold."""
    builder.stream("clicks", value=Click).filter(
        lambda record: record.value.msec < 10  # mypy attr-defined, pyright reportAttributeAccessIssue
    )


def a_misspelled_field_further_on(clicks: Stream[str, Click]) -> None:
    """Each step carries the type on."""
    clicks.key_by(lambda record: record.value.ms).map_values(
        lambda click: click.msec  # mypy attr-defined, pyright reportAttributeAccessIssue
    )


def a_misspelled_field_in_a_join(clicks: Stream[str, Click], users: Table[str, Click]) -> None:
    """The row of the other side."""
    clicks.join(users, lambda click, user: user.name)  # mypy attr-defined, pyright reportAttributeAccessIssue


def a_row_that_may_be_missing(clicks: Stream[str, Click], users: Table[str, Click]) -> None:
    """A left join has None where there is no row."""
    clicks.left_join(users, lambda click, user: user.ms)  # mypy union-attr, pyright reportOptionalMemberAccess


def a_join_without_windows(clicks: Stream[str, Click]) -> None:
    """Two streams need them."""
    clicks.join(clicks, lambda one, other: one)  # mypy call-overload, pyright reportArgumentType


def a_duration_as_text(grouped: GroupedStream[str, Click]) -> None:
    """A timedelta, or ms."""
    grouped.session_window(timedelta(minutes=30), grace="5m")  # mypy arg-type, pyright reportArgumentType


def a_size_as_text(grouped: GroupedStream[str, Click]) -> None:
    """As the grace."""
    grouped.tumbling_window(size="1h")  # mypy arg-type, pyright reportArgumentType


def a_window_that_was_left_out(grouped: GroupedStream[str, Click]) -> None:
    """Without windows it is a table by key, which nothing closes."""
    grouped.aggregate("visits", ms=Mean("ms")).on_close()  # mypy attr-defined, pyright reportAttributeAccessIssue


async def _is_short(record: Record[str, Click]) -> bool:
    return record.value.ms < 10


def an_async_predicate(clicks: Stream[str, Click]) -> None:
    """A task awaits nothing."""
    clicks.filter(_is_short)  # mypy arg-type, pyright reportArgumentType


class Counts(Processor[str, Click, str, int]):
    """Forwards numbers."""

    def init(self, context: ProcessorContext[str, int]) -> None:
        """A punctuator takes the time."""
        super().init(context)
        context.schedule(5, PunctuationType.STREAM_TIME, self.tick)  # mypy arg-type, pyright reportArgumentType

    def tick(self) -> None:
        """It lacks the argument."""

    def process(self, record: Record[str, Click]) -> None:
        """A value that is no number."""
        self.context.forward(Record(record.key, "1", 0))  # mypy arg-type, pyright reportArgumentType


def a_processor_of_another_stream(numbers: Stream[str, int]) -> None:
    """It takes clicks."""
    numbers.process(Counts)  # mypy arg-type, pyright reportArgumentType


def a_row_of_another_type(clicks: KeyValueStore[str, Click]) -> None:
    """The store holds clicks."""
    clicks.put("ann", 1)  # mypy arg-type, pyright reportArgumentType


def a_replaced_value_of_another_type(record: Record[str, Click]) -> Record[str, Click]:
    """A record that is replaced keeps its types; pyright does not look at the fields."""
    return record._replace(value=1)  # mypy arg-type, pyright -


def an_aggregation_of_a_field_that_there_is_not() -> None:
    """Fields are named by text: ConfigError when the topology is written."""
    grouped = StreamsBuilder().stream("clicks", value=Click).group_by_key()
    grouped.session_window(5).aggregate("visits", ms=Mean("mss"))  # mypy -, pyright -


def a_handler_that_is_not_async(record: ConsumerRecord) -> None:
    """Handlers are named by text: ConfigError when `penstock consumer --handler` starts."""  # mypy -, pyright -
