"""Dead letters: encoded as records and decoded again, truncated if they are too large, listed and replayed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters import dead_letter_log
from penstock.shared.clients.dead_letters.dead_letter import (
    ATTEMPTS,
    CHANGELOG_ID,
    HEADERS,
    MESSAGE_BYTES_MAX,
    NODE,
    OFFSET,
    SHORTENED_BYTES,
    DeadLetter,
    dead_letter_record,
    parse_dead_letter,
    replay_record,
    shortened,
)
from penstock.shared.clients.dead_letters.dead_letter_log import (
    LARGEST_RECORD_BYTES,
    DeadLetterLog,
    ReplayResult,
    dead_letter_filter,
    replay_group,
)
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import DataError, InvalidRequest
from penstock.shared.common.records import ConsumerRecord, Headers, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster, Request

headers = st.lists(
    st.tuples(st.text(max_size=8) | st.sampled_from((*HEADERS, CHANGELOG_ID, NODE)), st.none() | st.binary(max_size=8)),
    max_size=6,
)
sources = st.builds(
    ConsumerRecord,
    topic=st.text("abc.-", min_size=1, max_size=9),
    partition=st.integers(0, 10_000),
    offset=st.integers(0, 2**62),
    timestamp=st.integers(-1, 2**50),
    key=st.none() | st.binary(max_size=20),
    value=st.none() | st.binary(max_size=20),
    headers=headers.map(tuple),
)
dead_letters = st.builds(
    DeadLetter, sources, st.sampled_from(["deserialize", "process"]), st.text(max_size=30), st.text(max_size=30),
    st.integers(1, 99), st.text("abc", max_size=5),
)  # fmt: skip


def stored(record: ProducerRecord) -> ConsumerRecord:
    return ConsumerRecord(record.topic, 0, 123, 999, record.key, record.value, record.headers)


@given(dead_letters, st.none() | st.text("abc", max_size=3))
def test_a_dead_letter_round_trips(dead_letter: DeadLetter, incarnation: str | None) -> None:
    """Coordinates, bytes, original headers (even with our names) and reason round-trip, with or without an
    incarnation."""
    assert parse_dead_letter(stored(dead_letter_record("any-dlq", dead_letter, incarnation))) == dead_letter


@given(dead_letters)
def test_original_headers_come_first(dead_letter: DeadLetter) -> None:
    """Our headers are appended after the original ones in a fixed order. Numbers are decimal text."""
    written = dead_letter_record("any-dlq", dead_letter).headers
    count = len(dead_letter.record.headers)
    assert written[:count] == dead_letter.record.headers
    assert [name for name, _ in written[count:]] == list(HEADERS)
    assert dict(written[count:])[OFFSET] == str(dead_letter.record.offset).encode()


@given(dead_letters)
def test_a_replay_is_the_record_that_was(dead_letter: DeadLetter) -> None:
    """A replay produces the original key, value, headers and timestamp to the source topic."""
    again = replay_record(dead_letter, 3)
    source = dead_letter.record
    assert (again.topic, again.key, again.value, again.headers) == (
        source.topic,
        source.key,
        source.value,
        source.headers,
    )
    assert again.timestamp == (None if source.timestamp == -1 else source.timestamp)
    assert again.partition == 3


def test_an_exception_is_named_in_full() -> None:
    """An exception class is named with its module, a builtin without."""
    record = ConsumerRecord("t", 0, 0, 0, None, None)
    assert DeadLetter.of(record, "process", DataError("no"), 1, "g").exception == "penstock.errors.DataError"
    assert DeadLetter.of(record, "process", KeyError("no"), 1, "g").exception == "KeyError"


@pytest.mark.parametrize("message", ["é" * MESSAGE_BYTES_MAX, "\ud800", ""])
def test_any_message_can_be_written(message: str) -> None:
    """Long and unencodable error messages become bounded UTF-8."""
    dead_letter = DeadLetter(ConsumerRecord("t", 0, 0, 0, None, None), "process", "E", message, 1, "g")
    text = dict(dead_letter_record("t-dlq", dead_letter).headers)["penstock.dlq.message"]
    assert text is not None
    assert len(text) <= MESSAGE_BYTES_MAX
    text.decode()


def without(name: str, instead: Headers = ()) -> ConsumerRecord:
    dead_letter = DeadLetter(ConsumerRecord("t", 0, 0, 0, None, None), "process", "E", "m", 1, "g")
    written = stored(dead_letter_record("t-dlq", dead_letter))
    kept = tuple(header for header in written.headers if header[0] != name)
    return ConsumerRecord("t-dlq", 0, 5, 0, None, None, kept + instead)


@pytest.mark.parametrize("name", HEADERS)
def test_a_missing_header_is_named(name: str) -> None:
    """A record that is not a dead letter is rejected, and the error names the missing header."""
    with pytest.raises(DataError, match=f"t-dlq-0@5.*{name}"):
        parse_dead_letter(without(name))


@pytest.mark.parametrize("value", [b"", b"one", None, b"\xff"])
def test_an_invalid_number_header_is_rejected(value: bytes | None) -> None:
    """A number header that is not a number is rejected."""
    with pytest.raises(DataError, match=f"{ATTEMPTS} .*number"):
        parse_dead_letter(without(ATTEMPTS, ((ATTEMPTS, value),)))


def dead_letter_of(record: ConsumerRecord, incarnation: str | None = None) -> ProducerRecord:
    return dead_letter_record("t-dlq", DeadLetter(record, "process", "ValueError", "no", 1, "g"), incarnation)


def size_of(record: ProducerRecord) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def test_an_oversized_dead_letter_is_truncated_and_marked() -> None:
    """The end of the value is truncated first, and its original size is recorded. Key, original headers and coordinates
    are kept."""
    source = ConsumerRecord("t", 2, 17, 5, b"ann", b"v" * 3_000_000, (("trace", b"1"),))
    first = shortened(dead_letter_of(source))
    assert first is not None
    assert 500_000 < size_of(first) < SHORTENED_BYTES[0] + 100
    dead_letter = parse_dead_letter(stored(first))
    assert (dead_letter.cut, dead_letter.record.key, dead_letter.record.headers) == (
        "value=3000000",
        b"ann",
        (("trace", b"1"),),
    )
    assert (dead_letter.record.offset, dead_letter.message, set(dead_letter.record.value or b"")) == (
        17,
        "no",
        {ord("v")},
    )
    marked = shortened(dead_letter_of(source, "life"))
    assert marked is not None
    assert marked.headers == (*first.headers[:-1], (CHANGELOG_ID, b"life"), first.headers[-1])
    assert parse_dead_letter(stored(marked)).record.headers == dead_letter.record.headers
    second = shortened(first)
    assert second is not None
    assert size_of(second) < SHORTENED_BYTES[1] + 100
    assert parse_dead_letter(stored(second)).cut == "value=3000000"
    assert shortened(second) is None


def test_headers_and_keys_are_truncated_if_too_large() -> None:
    """Headers and keys are truncated if they take up the room, so that every dead letter fits."""
    source = ConsumerRecord("t", 2, 17, 5, b"k" * 900_000, None, (("trace", b"1" * 900_000),))
    first = shortened(dead_letter_of(source))
    assert first is not None
    dead_letter = parse_dead_letter(stored(first))
    assert (dead_letter.cut, dead_letter.record.headers, dead_letter.record.value) == ("headers=1,key=900000", (), None)
    assert size_of(first) < SHORTENED_BYTES[0]


def test_other_records_are_not_truncated() -> None:
    """A handler's oversized output is rejected, not truncated."""
    assert shortened(ProducerRecord("out", b"v" * 3_000_000)) is None
    assert shortened(ProducerRecord("out", b"v" * 3_000_000, None, (("a", b"1"),) * 20)) is None


def test_a_dead_letter_of_a_truncated_one_is_complete() -> None:
    """A dead letter of a truncated dead letter is not marked as truncated itself."""
    inner = shortened(dead_letter_of(ConsumerRecord("t", 0, 1, 5, b"ann", b"v" * 900_000)))
    assert inner is not None
    outer = parse_dead_letter(stored(dead_letter_of(stored(inner))))
    assert (outer.cut, outer.record.value) == ("", inner.value)


TOPIC = "clicks-dlq"
AT = TopicPartition(TOPIC, 0)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        for topic in ("clicks", TOPIC):
            cluster.create_topic(topic, partitions=1)
        yield cluster


@pytest.fixture
def kafka(cluster: FakeCluster) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)


async def write(
    kafka: KafkaSettings,
    dead_letters: int,
    others: int = 0,
    value: bytes = b"v",
    source: str = "clicks",
    timestamps: Mapping[int, int] = MappingProxyType({}),
) -> None:
    sources = [
        ConsumerRecord(source, 0, offset, timestamps.get(offset, 1), b"k", value) for offset in range(dead_letters)
    ]
    records = [dead_letter_record(TOPIC, DeadLetter(of, "process", "E", "", 1, "g")) for of in sources]
    async with Producer(kafka) as producer:
        sent = await producer.send_many([*records, *[ProducerRecord(TOPIC, b"v")] * others])
        assert await sent.first_error() is None


async def test_damaged_progress_of_replays(kafka: KafkaSettings) -> None:
    """The dead letters can be listed. A replay raises DataError, unless it sends all of them again."""
    await write(kafka, 3)
    async with Consumer(kafka, ConsumerSettings(group_id=replay_group(TOPIC))) as consumer:
        consumer.assign([AT])
        await consumer.commit({AT: OffsetAndMetadata(1, "p1r:!")})
    async with DeadLetterLog(kafka, TOPIC) as log:
        assert [entry.replayed async for entry in log.entries()] == [True, False, False]
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        with pytest.raises(DataError, match=r"clicks-dlq-0.*include_replayed"):
            await log.replay(producer, lambda _: True, limit=9)
        assert (await log.replay(producer, lambda _: True, limit=9, include_replayed=True)).sent == 3
        assert (await log.replay(producer, lambda _: True, limit=9)).sent == 0


async def test_a_replay_of_all_replaces_damaged_progress(kafka: KafkaSettings) -> None:
    """A replay without `include_replayed` works afterwards, although the committed offset was the end."""
    await write(kafka, 3)
    async with Consumer(kafka, ConsumerSettings(group_id=replay_group(TOPIC))) as consumer:
        consumer.assign([AT])
        await consumer.commit({AT: OffsetAndMetadata(3, "p1r:!")})
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        assert (await log.replay(producer, lambda _: True, limit=9, include_replayed=True)).sent == 3
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        assert (await log.replay(producer, lambda _: True, limit=9)).sent == 0


@pytest.mark.parametrize(("dead_letters", "others"), [(5, 0), (0, 5)])
async def test_too_many_records_are_left_out(
    kafka: KafkaSettings, dead_letters: int, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the limit, and does not claim that all of the records are dead letters."""
    monkeypatch.setattr(dead_letter_log, "LEFT_OUT_MAX", 4)
    await write(kafka, dead_letters, others)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        with pytest.raises(InvalidRequest, match=r"clicks-dlq-0: 4 records"):
            await log.replay(producer, lambda _: False, limit=9)


async def test_too_many_records_of_unusable_topics_are_left_out(
    kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the topics that could not be used."""
    monkeypatch.setattr(dead_letter_log, "LEFT_OUT_MAX", 4)
    await write(kafka, 5, source="gone")
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka, ProducerSettings(max_block_ms=50)) as producer:
        with pytest.raises(InvalidRequest, match=r"gone \(UnknownTopicOrPartition\)"):
            await log.replay(producer, lambda _: True, limit=9)


async def test_each_call_reads_the_topic_again(kafka: KafkaSettings) -> None:
    """The entries can be listed before and between replays. Each replay continues after the dead letters that an
    earlier one has sent, also if that one left out some."""
    await write(kafka, 5)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        assert [entry.replayed async for entry in log.entries()] == [False] * 5
        assert (await log.replay(producer, lambda letter: letter.record.offset != 1, limit=2)).sent == 2
        assert [entry.replayed async for entry in log.entries()] == [True, False, True, False, False]
        assert (await log.replay(producer, lambda _: True, limit=2)).sent == 2
        assert (await log.replay(producer, lambda _: True, limit=10)).sent == 1
        assert (await log.replay(producer, lambda _: True, limit=10)).sent == 0
        assert [entry.replayed async for entry in log.entries()] == [True] * 5
        assert (await log.replay(producer, lambda _: True, limit=10, include_replayed=True)).sent == 5
    async with DeadLetterLog(kafka, TOPIC) as log:
        assert [entry.replayed async for entry in log.entries()] == [True] * 5


@pytest.mark.parametrize(("limit", "left_out"), [(1, 5), (1, 1), (3, 1), (6, 4)])
async def test_a_replay_of_all_forgets_no_earlier_replay(kafka: KafkaSettings, limit: int, left_out: int) -> None:
    """A replay with `include_replayed` and a limit adds to the progress, and none is sent twice without it."""
    await write(kafka, 6)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        assert (await log.replay(producer, lambda letter: letter.record.offset != left_out, limit=10)).sent == 5
        before = [entry.replayed async for entry in log.entries()]
        assert (await log.replay(producer, lambda _: True, limit=limit, include_replayed=True)).sent == limit
        after = [entry.replayed async for entry in log.entries()]
        assert all(new >= old for old, new in zip(before, after, strict=True))
        assert (await log.replay(producer, lambda _: True, limit=10)).sent == after.count(False)
        assert (await log.replay(producer, lambda _: True, limit=10)).sent == 0


@pytest.mark.parametrize("largest", [LARGEST_RECORD_BYTES, 1_500])
async def test_a_cancelled_replay_commits_what_it_has_sent(
    kafka: KafkaSettings, cluster: FakeCluster, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records in flight count as replayed. Those that are in no request are not sent, also not by the close.

    The producer's buffer holds two of the largest records, and fewer than all dead letters.
    """
    monkeypatch.setattr(dead_letter_log, "LARGEST_RECORD_BYTES", largest)
    await write(kafka, 6, value=b"v" * 1_000)
    settings = ProducerSettings(
        batch_size=1, max_in_flight_requests_per_connection=1, max_request_size=3_000, buffer_memory=3 * largest
    )
    in_flight, respond = asyncio.Event(), asyncio.Event()

    async def hold(_: Request) -> None:
        in_flight.set()
        await respond.wait()

    async with DeadLetterLog(kafka, TOPIC) as log:
        async with Producer(kafka, settings) as producer:
            with cluster.control(Api.PRODUCE, hold):
                replaying = asyncio.create_task(log.replay(producer, lambda _: True, limit=10))
                await in_flight.wait()
                replaying.cancel()
                await asyncio.sleep(0)
                respond.set()
                with pytest.raises(asyncio.CancelledError):
                    await replaying
        assert [entry.replayed async for entry in log.entries()] == [True] + [False] * 5
    assert len(cluster.records("clicks")) == 1


async def test_a_failed_replay_of_all_forgets_no_earlier_replay(kafka: KafkaSettings) -> None:
    """A record that cannot be sent again still counts as replayed."""
    await write(kafka, 1)
    await write(kafka, 2, value=b"v" * 1_000)
    small = ProducerSettings(max_request_size=500)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer, Producer(kafka, small) as failing:
        assert (await log.replay(producer, lambda _: True, limit=2)).sent == 2
        result = await log.replay(failing, lambda _: True, limit=10, include_replayed=True)
        assert (result.sent, result.failed) == (1, 2)
        assert (await log.replay(producer, lambda _: True, limit=10)).sent == 1


async def test_every_replay_renews_the_progress_of_all_partitions() -> None:
    """Kafka deletes the offsets of a partition some time after its last commit, also if the group commits others."""
    commits: list[dict[int, int]] = []

    def note(request: Request) -> None:
        commits.append({row.partition: row.offset for row in request.body.topics[0].partitions})

    async with FakeCluster() as cluster:
        cluster.create_topic("clicks", partitions=1)
        cluster.create_topic(TOPIC, partitions=2)
        cluster.control(Api.OFFSET_COMMIT, note)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka) as producer:
            for number, new in enumerate([(0, 1), (0,), ()]):
                source = ConsumerRecord("clicks", 0, number, 1, b"k", b"v")
                record = dead_letter_record(TOPIC, DeadLetter(source, "process", "E", "", 1, "g"))
                for partition in new:
                    await producer.send_and_wait(replace(record, partition=partition))
                async with DeadLetterLog(kafka, TOPIC) as log:
                    assert log.has_progress is (number > 0)
                    assert (await log.replay(producer, lambda _: True, limit=9)).sent == len(new)
    assert commits == [{0: 1, 1: 1}, {0: 2, 1: 1}, {0: 2, 1: 1}]


async def test_a_replay_keeps_the_progress_that_another_one_commits_meanwhile() -> None:
    """It renews the other partitions with their newest offsets, not with those from before it began."""

    def dead_letter(number: int, partition: int) -> ProducerRecord:
        source = ConsumerRecord("clicks", partition, number, 1, b"k", b"v")
        record = dead_letter_record(TOPIC, DeadLetter(source, "process", "E", "", 1, "g"))
        return replace(record, partition=partition)

    async with FakeCluster() as cluster:
        cluster.create_topic("clicks", partitions=2)
        cluster.create_topic(TOPIC, partitions=2)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka) as producer:
            await (await producer.send_many([dead_letter(0, 0), dead_letter(0, 1)]))
            async with DeadLetterLog(kafka, TOPIC) as log:
                assert (await log.replay(producer, lambda _: True, limit=9)).sent == 2
            await (await producer.send_many([dead_letter(1, 0), dead_letter(1, 1)]))
            async with DeadLetterLog(kafka, TOPIC) as first, DeadLetterLog(kafka, TOPIC) as second:
                for log, partitions in ((first, {0}), (second, {1})):
                    wanted = dead_letter_filter(None, None, partitions)
                    assert (await log.replay(producer, wanted, limit=9)).sent == 1
            async with DeadLetterLog(kafka, TOPIC) as log:
                assert (await log.replay(producer, lambda _: True, limit=9)).sent == 0


async def test_a_source_topic_that_was_deleted(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dead letters fail, and all others are sent, also those after them. Each topic is waited for once."""
    monkeypatch.setattr(dead_letter_log, "IN_FLIGHT_MAX", 2)
    await write(kafka, 1)
    await write(kafka, 3, source="gone")
    await write(kafka, 2)
    quick = ProducerSettings(max_block_ms=50)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka, quick) as producer:
        result = await log.replay(producer, lambda _: True, limit=10)
        assert (result.sent, result.failed) == (3, 3)
        assert len(result.errors) == 3
        assert all("topic gone" in error for error in result.errors)
        assert [entry.replayed async for entry in log.entries()] == [True, False, False, False, True, True]


async def test_a_deleted_source_topic_does_not_use_up_the_limit(kafka: KafkaSettings) -> None:
    """A small replay sends the dead letters of other topics, although those of the deleted topic come first."""
    await write(kafka, 3, source="gone")
    await write(kafka, 3)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka, ProducerSettings(max_block_ms=50)) as producer:
        for limit, sent in [(1, 1), (2, 2), (1, 0)]:
            result = await log.replay(producer, lambda _: True, limit=limit)
            assert (result.sent, result.failed) == (sent, 3)


async def test_a_record_that_kafka_rejects_for_good(kafka: KafkaSettings) -> None:
    """It fails in each replay, and all others are sent, also those beside it and those of later fetches."""
    await write(kafka, 3, timestamps={1: 2**50})
    await write(kafka, 2, value=bytes(ConsumerSettings().max_partition_fetch_bytes // 2))
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        result = await log.replay(producer, lambda _: True, limit=10)
        assert (result.sent, result.failed) == (4, 1)
        assert [error.split(": ")[:2] for error in result.errors] == [["clicks-dlq-0@1", "InvalidTimestamp"]]
        assert [entry.replayed async for entry in log.entries()] == [True, False, True, True, True]
        again = await log.replay(producer, lambda _: True, limit=10)
        assert (again.sent, again.failed) == (0, 1)


@pytest.mark.parametrize(
    ("error", "timestamps", "sent"),
    [(ErrorCode.REQUEST_TIMED_OUT, {1: 2**50}, 2), (ErrorCode.RECORD_LIST_TOO_LARGE, {}, 3)],
    ids=["maybe stored", "no record named"],
)
async def test_a_batch_that_is_rejected_as_a_whole_is_replayed(
    error: ErrorCode, timestamps: dict[int, int], sent: int
) -> None:
    """Its records are sent again one by one, so that only the invalid one fails."""
    async with FakeCluster() as cluster:
        for topic in ("clicks", TOPIC):
            cluster.create_topic(topic, partitions=1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=5)
        await write(kafka, 3, timestamps=timestamps)
        cluster.control(Api.PRODUCE, Fail(error), times=1)
        async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
            result = await log.replay(producer, lambda _: True, limit=10)
        assert (result.sent, result.failed) == (sent, 3 - sent)


async def test_a_replay_ends_when_as_many_records_have_failed_as_it_may_send(kafka: KafkaSettings) -> None:
    """If Kafka rejects every record, the replay does not try all records of the topic."""
    await write(kafka, 5, timestamps=dict.fromkeys(range(5), 2**50))
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        result = await log.replay(producer, lambda _: True, limit=2)
        assert (result.sent, result.failed) == (0, 2)


async def test_an_interrupted_replay_keeps_what_it_has_sent() -> None:
    """It commits the dead letters that Kafka has acknowledged, also those that it has sent again one by one."""
    requests: list[Request] = []
    replays: list[asyncio.Task[ReplayResult]] = []

    def interrupt(request: Request) -> None:
        # The batch of all three, the first record, and then the second one.
        requests.append(request)
        if len(requests) == 3:
            replays[0].cancel()

    async with FakeCluster() as cluster:
        for topic in ("clicks", TOPIC):
            cluster.create_topic(topic, partitions=1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        await write(kafka, 3)
        cluster.control(Api.PRODUCE, interrupt)
        cluster.control(Api.PRODUCE, Fail(ErrorCode.RECORD_LIST_TOO_LARGE), times=1)
        async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
            replays.append(asyncio.create_task(log.replay(producer, lambda _: True, limit=10)))
            with pytest.raises(asyncio.CancelledError):
                await replays[0]
        async with DeadLetterLog(kafka, TOPIC) as log:
            assert [entry.replayed async for entry in log.entries()] == [True, False, False]


async def test_entries_that_were_not_read_to_the_end(kafka: KafkaSettings) -> None:
    """A replay after them, or another listing, still begins at the first record."""
    await write(kafka, 3)
    async with DeadLetterLog(kafka, TOPIC) as log, Producer(kafka) as producer:
        async with aclosing(log.entries()) as entries:
            assert (await anext(entries)).offset == 0
        assert [entry.offset async for entry in log.entries()] == [0, 1, 2]
        assert (await log.replay(producer, lambda _: True, limit=10)).sent == 3
