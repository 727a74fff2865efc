"""The transactions of ingest: the settings of their producers, and a topic of keys that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from penstock.api.http.problem import failed_outcome, kind_of_record_error
from penstock.api.http.status_codes import SERVICE_UNAVAILABLE
from penstock.api.ingest.atomic import IdempotencyKey, StoredResponse
from penstock.api.settings import IngestSettings
from penstock.services.producer.ingest_transactions import (
    TURN_MS,
    KafkaTransactor,
    KeyedTransactions,
    send_in_transaction,
)
from penstock.services.producer.settings import DEFAULT_KAFKA
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import (
    AuthorizationFailed,
    InvalidRequest,
    KafkaTimeout,
    PenstockError,
    RecordTooLarge,
)
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from penstock.shared.testing.fake_broker import Api, Close, Delay, ErrorCode, Fail, FakeCluster, Request
from tests.shared.clients.producer.clusters import producing, values
from tests.virtual_time import let_pass, run

ACKS_ALL = -1
KEY = IdempotencyKey(b"k" * 32, b"f" * 32)
RECORDS = [ProducerRecord("clicks", b"{}")]


@asynccontextmanager
async def transacting() -> AsyncIterator[tuple[FakeCluster, KafkaTransactor]]:
    """A cluster with the topic `clicks`, and a transactor whose topic of keys has one partition."""
    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, ProducerSettings(), IngestSettings(idempotency_partitions=1), admin)
            yield cluster, transactor
            await transactor.close(20_000)


async def send_keyed(transactor: KafkaTransactor) -> tuple[StoredResponse, bool]:
    return await transactor.send_keyed(KEY, RECORDS, lambda _: StoredResponse(200, b""))


@pytest.mark.parametrize(
    "settings",
    [
        ProducerSettings(acks=1),
        ProducerSettings(enable_idempotence=False),
        ProducerSettings(retries=0),
        ProducerSettings(max_in_flight_requests_per_connection=9),
    ],
    ids=["acks", "enable_idempotence", "retries", "max_in_flight"],
)
async def test_atomic_requests_are_idempotent_under_any_settings(settings: ProducerSettings) -> None:
    """Settings that switch idempotence off for other requests do not apply to transactions, which need it."""
    acks: list[int] = []

    def note(request: Request) -> None:
        acks.append(request.body.acks)

    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        cluster.control(Api.PRODUCE, note)
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, settings, IngestSettings(), admin)
            outcomes = await transactor.send_atomic([ProducerRecord("clicks", b"{}")])
            await transactor.close(20_000)
    assert [type(outcome) for outcome in outcomes] == [RecordMetadata]
    assert acks == [ACKS_ALL]


@pytest.mark.parametrize("is_keyed", [False, True], ids=["atomic", "keyed"])
async def test_a_transaction_after_a_long_pause_is_stored(is_keyed: bool) -> None:
    """The coordinator forgets a transactional id after seven days without a transaction. The next request is stored."""
    async with transacting() as (cluster, transactor):

        async def send(value: bytes) -> None:
            records = [ProducerRecord("clicks", value)]
            if is_keyed:
                key = IdempotencyKey(value * 32, b"f" * 32)
                await transactor.send_keyed(key, records, lambda _: StoredResponse(200, b""))
            else:
                await transactor.send_atomic(records)

        await send(b"1")
        cluster._state.transactions.known.clear()
        await send(b"2")
        assert [record.value for record in cluster.records("clicks")] == [b"1", b"2"]


@pytest.mark.parametrize(("fenced", "is_committed"), [(2, False), (1, True)])
async def test_a_keyed_transaction_that_is_fenced_is_stored_once(fenced: int, is_committed: bool) -> None:
    """A request is repeated after other services acquired its partition of keys, also if its commit was fenced."""
    async with transacting() as (cluster, transactor):
        cluster.control(Api.END_TXN, Fail(ErrorCode.PRODUCER_FENCED, handled=is_committed), times=fenced)
        assert await send_keyed(transactor) == (StoredResponse(200, b""), False)
        assert len(cluster.records("clicks")) == 1


async def test_two_services_with_concurrent_requests_do_not_fence_each_other_for_ever() -> None:
    """A service that is fenced leaves the other one time to commit, before it acquires the partition of keys again."""
    async with transacting() as (cluster, one), Admin(one._kafka) as admin:
        other = KafkaTransactor(one._kafka, ProducerSettings(), one._settings, admin)
        acquired: list[Request] = []

        def acquire(request: Request) -> Delay:
            acquired.append(request)
            return Delay(30)

        cluster.control(Api.INIT_PRODUCER_ID, acquire)
        for api in (Api.ADD_PARTITIONS_TO_TXN, Api.LIST_OFFSETS, Api.PRODUCE, Api.END_TXN):
            cluster.control(api, Delay(30))

        async def send(transactor: KafkaTransactor, number: int) -> None:
            key = IdempotencyKey(bytes([number]) * 32, b"f" * 32)
            await transactor.send_keyed(key, RECORDS, lambda _: StoredResponse(200, b""))

        await asyncio.gather(*(send(transactor, number) for number, transactor in enumerate([one, other] * 2)))
        assert len(cluster.records("clicks")) == 4
        assert len(acquired) < 15
        await other.close(20_000)


async def test_a_fenced_commit_stays_unknown_if_the_key_cannot_be_looked_up() -> None:
    """If the request cannot be repeated after its commit was fenced, the error says that it may be stored."""
    async with transacting() as (cluster, transactor):

        def fence(_: Request) -> Fail:
            cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))
            return Fail(ErrorCode.PRODUCER_FENCED, handled=True)

        cluster.control(Api.END_TXN, fence)
        with pytest.raises(AuthorizationFailed) as failed:
            await send_keyed(transactor)
        assert failed.value.maybe_written


async def test_a_transaction_that_cannot_begin_stores_nothing() -> None:
    """After a commit whose first response was lost, the next transaction begins with a request for a new epoch."""
    async with producing(transactional_id="x", max_block_ms=200) as (cluster, producer):
        await producer.init_transactions()
        cluster.control(Api.END_TXN, Close(handled=True), times=1)
        await send_in_transaction(producer, [ProducerRecord("t", b"1")])
        cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), times=1_000)
        with pytest.raises(KafkaTimeout) as failed:
            await send_in_transaction(producer, [ProducerRecord("t", b"2")])
        assert not failed.value.maybe_written
        assert values(cluster) == [b"1"]


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_a_producer_that_cannot_be_opened_stores_nothing(is_keyed: bool) -> None:
    """Then the same request may be sent again."""
    api, code = (
        (Api.CREATE_TOPICS, ErrorCode.NOT_CONTROLLER)
        if is_keyed
        else (Api.INIT_PRODUCER_ID, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    )
    async with FakeCluster() as cluster:
        cluster.create_topic("clicks")
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka, timeout_ms=200) as admin:
            transactor = KafkaTransactor(kafka, ProducerSettings(max_block_ms=200), IngestSettings(), admin)
            cluster.control(api, Fail(code))
            with pytest.raises(KafkaTimeout) as failed:
                await (send_keyed(transactor) if is_keyed else transactor.send_atomic(RECORDS))
            assert not failed.value.maybe_written
            await transactor.close(1_000)


async def test_the_error_of_a_repeated_request_is_not_unknown() -> None:
    """Its key was looked up, and is not stored."""
    async with transacting() as (cluster, transactor):

        def fence(_: Request) -> Fail:
            cluster.control(Api.PRODUCE, Fail(ErrorCode.INVALID_RECORD))
            return Fail(ErrorCode.PRODUCER_FENCED)

        cluster.control(Api.END_TXN, fence, times=1)
        with pytest.raises(InvalidRequest) as failed:
            await send_keyed(transactor)
        assert not failed.value.maybe_written


@pytest.mark.parametrize(("held_ms", "kept_ms"), [(1_000, 2_000), (3_000, 3_000), (-1, -1)])
async def test_an_existing_topic_of_keys_keeps_them_for_their_ttl(held_ms: int, kept_ms: int) -> None:
    """If the topic's retention is shorter than `idempotency_ttl_ms`, it is raised. A longer one remains."""
    settings = IngestSettings(idempotency_ttl_ms=2_000)
    topic = settings.idempotency_topic
    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        cluster.create_topic(topic, configs={"retention.ms": str(held_ms)})
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, ProducerSettings(), settings, admin)
            key = IdempotencyKey(b"k" * 32, b"f" * 32)
            await transactor.send_keyed(key, [ProducerRecord("clicks", b"{}")], lambda _: StoredResponse(200, b""))
            await transactor.close(20_000)
            assert (await admin.describe_configs(topic))["retention.ms"] == str(kept_ms)


async def test_a_transaction_with_a_rejected_record_is_not_repeated() -> None:
    """The error of a rejected record is raised, although an earlier record failed with the transaction."""
    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, ProducerSettings(max_request_size=1_000), IngestSettings(), admin)
            records = [ProducerRecord("clicks", b"{}"), ProducerRecord("clicks", bytes(2_000))]
            with capture_logs() as logs, pytest.raises(RecordTooLarge):
                await transactor.send_atomic(records)
            await transactor.close(20_000)
        assert not [entry for entry in logs if entry["event"] == "the transaction is repeated"]
        assert cluster.records("clicks") == []


async def test_a_foreign_record_among_the_keys_is_the_services_fault() -> None:
    """If a record in the topic of keys is not Penstock's, the response to a request with a key of this partition is
    503, and nothing is stored. The error and the log have its offset.
    """
    settings = IngestSettings(idempotency_partitions=1)
    topic = settings.idempotency_topic
    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        cluster.create_topic(topic)
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Producer(kafka) as producer:
            await (await producer.send(topic, b"hello", key=b"k"))
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, ProducerSettings(), settings, admin)
            key = IdempotencyKey(b"k" * 32, b"f" * 32)
            with capture_logs() as logs, pytest.raises(PenstockError, match=f"{topic}-0 at offset 0") as failed:
                await transactor.send_keyed(key, [ProducerRecord("clicks", b"{}")], lambda _: StoredResponse(200, b""))
            await transactor.close(20_000)
    kind = kind_of_record_error(failed.value)
    assert (kind.status, failed_outcome(kind)) == (SERVICE_UNAVAILABLE, "not_stored")
    assert [entry["reason"] for entry in logs if entry["log_level"] == "error"] == [str(failed.value)]


@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_request_that_waits_too_long_for_its_turn_is_not_stored_later(is_keyed: bool, is_cancelled: bool) -> None:
    """A request whose time is over before its transaction has begun is dropped, and the error says that nothing is
    stored. The same holds for a request that is cancelled."""

    async def never_open(_: str) -> Producer:
        pytest.fail("the transaction has begun")

    async def wait() -> None:
        settings = IngestSettings(atomic_producers=1)
        admin = Admin(DEFAULT_KAFKA)
        transactor = KafkaTransactor(DEFAULT_KAFKA, ProducerSettings(), settings, admin)
        partition = KeyedTransactions(DEFAULT_KAFKA, admin, settings, 0, never_open)
        transactor._partitions = [partition]
        records = [ProducerRecord("clicks", b"{}")]
        async with partition._lock, transactor._slots:
            if is_keyed:
                key = IdempotencyKey(bytes(32), bytes(32))
                work = asyncio.ensure_future(transactor.send_keyed(key, records, lambda _: StoredResponse(200, b"")))
            else:
                work = asyncio.ensure_future(transactor.send_atomic(records))
            if is_cancelled:
                await let_pass(1)
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
            else:
                with pytest.raises(KafkaTimeout) as failed:
                    await work
                assert not failed.value.maybe_written
            await let_pass(1)
            assert not transactor._running

    run(wait())


def test_a_request_that_waits_too_long_for_another_service_is_not_stored_later() -> None:
    """The same holds if it waits until the service that has fenced this one has had its turn."""

    async def never_open(_: str) -> Producer:
        pytest.fail("the transaction has begun")

    async def wait() -> None:
        settings = IngestSettings(ack_timeout_ms=TURN_MS // 2)
        admin = Admin(DEFAULT_KAFKA)
        transactor = KafkaTransactor(DEFAULT_KAFKA, ProducerSettings(), settings, admin)
        partition = KeyedTransactions(DEFAULT_KAFKA, admin, settings, 0, never_open)
        partition._owned_at = asyncio.get_running_loop().time()
        transactor._partitions = [partition]
        with pytest.raises(KafkaTimeout) as failed:
            await send_keyed(transactor)
        assert not failed.value.maybe_written
        await let_pass(1)
        assert not transactor._running

    run(wait())
