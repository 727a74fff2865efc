"""Faults that a test injects: what connections see over real sockets, and the responses of each API."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker import (
    Action,
    Api,
    Close,
    Delay,
    Drop,
    ErrorCode,
    Fail,
    FakeCluster,
    Message,
    Request,
    Respond,
)
from penstock.shared.testing.fake_broker.faults import (
    Control,
    failed_response,
    merge_failures,
    without_partitions,
)
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS
from tests.shared.testing.fake_broker.frames import decode_response, encode_request
from tests.shared.testing.fake_broker.test_partition_logs import built

PATIENCE_S = 10
SOON_S = 0.05
"""How long a test waits for a response that must not arrive."""


class Wire:
    """A connection that sends frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def write(self, frame: bytes) -> None:
        self.writer.write(struct.pack(">i", len(frame)) + frame)

    def send(self, api: Api, correlation_id: int = 1, version: int | None = None, **body: Any) -> None:
        supported = SUPPORTED_APIS[api]
        version = supported.max_version if version is None else version
        self.write(encode_request(supported, version, correlation_id, "wire", Message(**body)))

    async def read(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            size = struct.unpack(">i", await self.reader.readexactly(4))[0]
            return await self.reader.readexactly(size)

    async def request(self, api: Api, version: int | None = None, **body: Any) -> Any:
        version = SUPPORTED_APIS[api].max_version if version is None else version
        self.send(api, version=version, **body)
        return decode_response(SUPPORTED_APIS[api], version, await self.read())[1]

    async def produce(self, *partitions: int, acks: int = -1) -> dict[int, str]:
        """Send one record to each partition and return the error names by partition."""
        self.send_records(*partitions, acks=acks)
        response = decode_response(SUPPORTED_APIS[Api.PRODUCE], 11, await self.read())[1]
        return {row.partition: ErrorCode(row.error_code).name for row in response.topics[0].partitions}

    def send_records(self, *partitions: int, acks: int = -1) -> None:
        rows = [Message(partition=partition, records=built(b"v")) for partition in partitions or (0,)]
        self.send(Api.PRODUCE, acks=acks, timeout_ms=1_000, topics=[Message(name="t", partitions=rows)])

    async def is_silent(self) -> bool:
        """Whether nothing arrives for a while."""
        try:
            async with asyncio.timeout(SOON_S):
                await self.reader.readexactly(1)
        except TimeoutError:
            return True
        return False

    async def is_closed(self) -> bool:
        """Whether the other side has closed the connection."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read(1) == b""
            return True


@contextlib.asynccontextmanager
async def connected(cluster: FakeCluster, node: int = 1) -> AsyncIterator[Wire]:
    host, port = cluster.bootstrap_servers.split(",")[node - 1].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as one:
        one.create_topic("t", 2)
        yield one


@pytest.fixture
async def wire(cluster: FakeCluster) -> AsyncIterator[Wire]:
    async with connected(cluster) as one:
        yield one


async def test_requests_are_answered_in_their_order(cluster: FakeCluster, wire: Wire) -> None:
    """Requests are answered in order, also after one that is delayed."""
    cluster.control(Api.METADATA, Delay(20), times=1)
    for number, api in enumerate((Api.METADATA, Api.API_VERSIONS, Api.LIST_GROUPS)):
        wire.send(api, correlation_id=number, client_software_name="a", client_software_version="1")
    found = [struct.unpack_from(">i", await wire.read())[0] for _ in range(3)]
    assert found == [0, 1, 2]


async def test_a_dropped_request_is_never_answered(cluster: FakeCluster, wire: Wire) -> None:
    """A dropped request has no effect, its connection is silent from then on, and other connections are served."""
    dropped = cluster.control(Api.PRODUCE, Drop(), times=1)
    wire.send_records()
    wire.send(Api.METADATA)
    assert await wire.is_silent()
    assert (dropped.acted, cluster.end_offset("t")) == (1, 0)
    async with connected(cluster) as other:
        assert await other.produce() == {0: "NONE"}


async def test_a_response_can_be_lost(cluster: FakeCluster, wire: Wire) -> None:
    """A request whose response is dropped has its effect."""
    cluster.control(Api.PRODUCE, Drop(handled=True), times=1)
    wire.send_records()
    assert await wire.is_silent()
    assert cluster.end_offset("t") == 1


@pytest.mark.parametrize("handled", [False, True])
async def test_a_connection_can_be_closed(cluster: FakeCluster, wire: Wire, handled: bool) -> None:
    """The broker can close a connection before or after it handled the request."""
    cluster.control(Api.PRODUCE, Close(handled=handled), times=1)
    wire.send_records()
    assert await wire.is_closed()
    assert cluster.end_offset("t") == int(handled)


async def test_everything_can_fail(cluster: FakeCluster, wire: Wire) -> None:
    """A failure without partitions applies to all of them, and nothing is written."""
    cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS), times=1)
    assert await wire.produce(0, 1) == {0: "NOT_ENOUGH_REPLICAS", 1: "NOT_ENOUGH_REPLICAS"}
    assert await wire.produce(0, 1) == {0: "NONE", 1: "NONE"}
    assert cluster.end_offset("t") == 1


async def test_one_partition_can_fail(cluster: FakeCluster, wire: Wire) -> None:
    """If one partition fails, the others are served in the same response."""
    with cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS, [TopicPartition("t", 1)])) as control:
        assert await wire.produce(0, 1) == {0: "NONE", 1: "NOT_ENOUGH_REPLICAS"}
        assert await wire.produce(1) == {1: "NOT_ENOUGH_REPLICAS"}
    assert await wire.produce(1) == {1: "NONE"}
    assert (cluster.end_offset("t", 0), cluster.end_offset("t", 1), control.acted) == (1, 1, 2)


@pytest.mark.parametrize("partitions", [None, [TopicPartition("t", 1)]])
async def test_a_handled_request_can_fail(
    cluster: FakeCluster, wire: Wire, partitions: list[TopicPartition] | None
) -> None:
    """The records are written although the response is an error, for all or some partitions."""
    cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_LEADER_OR_FOLLOWER, partitions, handled=True), times=1)
    codes = await wire.produce(0, 1)
    assert codes == {0: "NONE" if partitions else "NOT_LEADER_OR_FOLLOWER", 1: "NOT_LEADER_OR_FOLLOWER"}
    assert (cluster.end_offset("t", 0), cluster.end_offset("t", 1)) == (1, 1)


async def test_a_handled_request_without_partitions_can_fail(cluster: FakeCluster, wire: Wire) -> None:
    """The producer id is assigned although the response is an error."""
    fields = {"transactional_id": "x", "transaction_timeout_ms": 1_000, "producer_id": -1, "producer_epoch": -1}
    cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE, handled=True), times=1)
    rejected = await wire.request(Api.INIT_PRODUCER_ID, **fields)
    assert rejected.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert (await wire.request(Api.INIT_PRODUCER_ID, **fields)).producer_epoch == 1


async def test_a_topic_can_fail_after_it_was_created(cluster: FakeCluster, wire: Wire) -> None:
    """The topic exists although the response is an error."""
    row = Message(name="new", num_partitions=1, replication_factor=1)
    cluster.control(Api.CREATE_TOPICS, Fail(ErrorCode.REQUEST_TIMED_OUT, handled=True), times=1)
    (topic,) = (await wire.request(Api.CREATE_TOPICS, timeout_ms=1_000, topics=[row])).topics
    assert (topic.name, topic.error_code) == ("new", ErrorCode.REQUEST_TIMED_OUT)
    assert cluster.end_offset("new", 0) == 0


@pytest.mark.parametrize(("topics", "failed"), [([Message(name="t")], ["t"]), (None, ["t", "u"]), ([], [])], ids=str)
async def test_topics_of_metadata_can_fail(
    cluster: FakeCluster, wire: Wire, topics: list[Message] | None, failed: list[str]
) -> None:
    """Metadata has an error for each topic, beside the brokers."""
    cluster.create_topic("u")
    cluster.control(Api.METADATA, Fail(ErrorCode.LEADER_NOT_AVAILABLE))
    response = await wire.request(Api.METADATA, topics=topics)
    assert [row.node_id for row in response.brokers] == [1]
    found = [(row.name, row.error_code, row.partitions) for row in response.topics]
    assert found == [(name, ErrorCode.LEADER_NOT_AVAILABLE, []) for name in failed]


@pytest.mark.parametrize("handled", [False, True])
async def test_a_partition_of_metadata_can_fail(cluster: FakeCluster, wire: Wire, handled: bool) -> None:
    """Metadata has an error for the partition that fails, and the other partitions as usual."""
    only = Fail(ErrorCode.LEADER_NOT_AVAILABLE, [TopicPartition("t", 1)], handled=handled)
    cluster.control(Api.METADATA, only)
    for topics in ([Message(name="t")], [Message(name="t"), Message(name="none")], None):
        (topic, *others) = (await wire.request(Api.METADATA, topics=topics)).topics
        assert [row.error_code for row in others] == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * len((topics or [])[1:])
        rows = sorted((row.partition, row.error_code, row.leader_id) for row in topic.partitions)
        assert topic.error_code == ErrorCode.NONE
        assert rows == [(0, ErrorCode.NONE, 1), (1, ErrorCode.LEADER_NOT_AVAILABLE, -1)]


@pytest.mark.parametrize("partitions", [None, [TopicPartition("t", 1)]])
async def test_metadata_of_other_topics_uses_no_hook_up(
    cluster: FakeCluster, wire: Wire, partitions: list[TopicPartition] | None
) -> None:
    """A client first asks for the brokers alone."""
    cluster.create_topic("u")
    failing = cluster.control(Api.METADATA, Fail(ErrorCode.LEADER_NOT_AVAILABLE, partitions), times=1)
    for topics in ([], *([] if partitions is None else [[Message(name="u")]])):
        assert {row.error_code for row in (await wire.request(Api.METADATA, topics=topics)).topics} <= {ErrorCode.NONE}
    assert failing.acted == 0
    (topic,) = (await wire.request(Api.METADATA, topics=[Message(name="t")])).topics
    codes = [topic.error_code, *(row.error_code for row in topic.partitions)]
    assert (ErrorCode.LEADER_NOT_AVAILABLE in codes, failing.acted) == (True, 1)


async def test_a_handled_request_with_acks_zero_can_fail(cluster: FakeCluster, wire: Wire) -> None:
    """A failure of a handled request with acks 0 closes the connection."""
    cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_LEADER_OR_FOLLOWER, handled=True))
    wire.send_records(acks=0)
    assert await wire.is_closed()
    assert cluster.end_offset("t") == 1


async def test_a_duplicate_has_its_offset(cluster: FakeCluster, wire: Wire) -> None:
    """The response for a duplicate has its offset, and that of other errors has none."""
    rows = [Message(partition=0, records=built(b"one"))]
    body = {"acks": -1, "timeout_ms": 1_000, "topics": [Message(name="t", partitions=rows)]}
    await wire.produce(0)
    for code, offset in ((ErrorCode.DUPLICATE_SEQUENCE_NUMBER, 1), (ErrorCode.REQUEST_TIMED_OUT, -1)):
        cluster.control(Api.PRODUCE, Fail(code, handled=True), times=1)
        (topic,) = (await wire.request(Api.PRODUCE, **body)).topics
        assert (topic.partitions[0].error_code, topic.partitions[0].base_offset) == (code, offset)


async def test_one_offset_of_a_whole_group_can_fail(cluster: FakeCluster, wire: Wire) -> None:
    """If a client fetches all offsets of a group, a failure of one partition leaves the others."""
    rows = [Message(partition=p, offset=5, metadata="") for p in (0, 1)]
    member = {"generation_id": -1, "member_id": "", "group_instance_id": None}
    await wire.request(Api.OFFSET_COMMIT, group_id="g", topics=[Message(name="t", partitions=rows)], **member)
    cluster.control(Api.OFFSET_FETCH, Fail(ErrorCode.UNSTABLE_OFFSET_COMMIT, [TopicPartition("t", 1)]))
    (topic,) = (await wire.request(Api.OFFSET_FETCH, group_id="g", topics=None)).topics
    found = {row.partition: (row.offset, row.error_code) for row in topic.partitions}
    assert found == {0: (5, 0), 1: (-1, ErrorCode.UNSTABLE_OFFSET_COMMIT)}


async def test_a_fetch_fails_without_waiting(cluster: FakeCluster, wire: Wire) -> None:
    """A partition's failure is answered immediately, although the others have no data yet."""
    cluster.control(Api.FETCH, Fail(ErrorCode.KAFKA_STORAGE_ERROR, [TopicPartition("t", 0)]))
    rows = [Message(partition=p, fetch_offset=0, partition_max_bytes=1_000) for p in (0, 1)]
    response = await wire.request(
        Api.FETCH, max_wait_ms=60_000, min_bytes=1, topics=[Message(name="t", partitions=rows)]
    )
    codes = {row.partition: row.error_code for row in response.topics[0].partitions}
    assert codes == {0: ErrorCode.KAFKA_STORAGE_ERROR, 1: 0}


async def test_requests_without_the_failing_partition_are_handled_normally(cluster: FakeCluster, wire: Wire) -> None:
    """A Fetch of other partitions waits for records, and requests that name no partitions have no error."""
    cluster.control(None, Fail(ErrorCode.KAFKA_STORAGE_ERROR, [TopicPartition("t", 0)]))
    rows = [Message(partition=1, fetch_offset=0, partition_max_bytes=1_000)]
    wire.send(Api.FETCH, max_wait_ms=60_000, min_bytes=1, topics=[Message(name="t", partitions=rows)])
    assert await wire.is_silent()
    async with connected(cluster) as other:
        assert await other.produce(1) == {1: "NONE"}
    response = decode_response(SUPPORTED_APIS[Api.FETCH], SUPPORTED_APIS[Api.FETCH].max_version, await wire.read())[1]
    (row,) = response.topics[0].partitions
    assert (row.error_code, bool(row.records)) == (0, True)
    new = Message(name="new", num_partitions=1, replication_factor=1, assignments=[], configs=[])
    created = await wire.request(Api.CREATE_TOPICS, topics=[new], timeout_ms=1_000, validate_only=False)
    assert created.topics[0].error_code == 0


async def test_a_request_without_the_failing_partition_uses_no_hook_up(cluster: FakeCluster, wire: Wire) -> None:
    """It counts for no hook, and the next hook acts on it, also if the failure would follow a delay."""
    first = cluster.control(Api.PRODUCE, Delay(1, Fail(ErrorCode.INVALID_RECORD, [TopicPartition("t", 0)])), times=1)
    second = cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS, [TopicPartition("t", 1)]), times=1)
    assert await wire.produce(1) == {1: "NOT_ENOUGH_REPLICAS"}
    assert (first.acted, second.acted) == (0, 1)
    assert await wire.produce(0) == {0: "INVALID_RECORD"}


async def test_acks_zero_is_not_answered(cluster: FakeCluster, wire: Wire) -> None:
    """With acks 0 there is no response, and a failure closes the connection."""
    wire.send_records(acks=0)
    assert (await wire.request(Api.METADATA)).brokers
    assert cluster.end_offset("t") == 1
    cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS))
    wire.send_records(acks=0)
    assert await wire.is_closed()


async def test_an_error_with_acks_zero_closes_the_connection(wire: Wire) -> None:
    """With acks 0 an error closes the connection."""
    wire.send_records(7, acks=0)
    assert await wire.is_closed()


async def test_a_failed_partition_with_acks_zero_closes_the_connection(cluster: FakeCluster, wire: Wire) -> None:
    """With acks 0 a failure of a partition of the request closes the connection; that of another partition does not."""
    cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS, [TopicPartition("t", 0)]))
    wire.send_records(1, acks=0)
    assert (await wire.request(Api.METADATA)).brokers
    assert cluster.end_offset("t", 1) == 1
    wire.send_records(0, acks=0)
    assert await wire.is_closed()


async def test_a_response_can_be_replaced(cluster: FakeCluster, wire: Wire) -> None:
    """A test's own body is sent as the response, with defaults."""
    cluster.control(Api.METADATA, Respond(Message(cluster_id="mine", controller_id=9)), times=1)
    response = await wire.request(Api.METADATA)
    assert (response.cluster_id, response.controller_id, response.brokers) == ("mine", 9, [])


async def test_a_delay_can_end_in_another_fault(cluster: FakeCluster, wire: Wire) -> None:
    """A delayed request can fail after the delay."""
    cluster.control(Api.PRODUCE, Delay(5, Fail(ErrorCode.REQUEST_TIMED_OUT)))
    before = asyncio.get_running_loop().time()
    assert await wire.produce() == {0: "REQUEST_TIMED_OUT"}
    assert asyncio.get_running_loop().time() - before >= 0.005


async def test_a_held_request_has_the_time_of_its_handling(cluster: FakeCluster, wire: Wire) -> None:
    """The broker handles a request that a hook has held as if it arrived at that time."""
    cluster.delete_topic("t")
    cluster.create_topic("t", configs={"message.timestamp.type": "LogAppendTime"})
    released_ms: list[int] = []

    async def hold(request: Request) -> Action | None:
        while cluster.now_ms() == request.now_ms:  # noqa: ASYNC110 - a clock is polled
            await asyncio.sleep(0)
        released_ms.append(cluster.now_ms())
        return None

    cluster.control(Api.PRODUCE, hold)
    await wire.produce()
    assert cluster.records("t")[0].timestamp >= released_ms[0]


async def test_hooks_are_called_in_order(cluster: FakeCluster, wire: Wire) -> None:
    """Hooks are called in order until one acts, and one that lets the request pass has not acted."""
    seen: list[str] = []

    def look(request: Request) -> Action | None:
        seen.append(f"{request.client_id} {request.node} {[str(tp) for tp in request.partitions()]}")
        return None

    async def fail(_: Request) -> Action | None:
        await asyncio.sleep(0)
        return Fail(ErrorCode.LEADER_NOT_AVAILABLE)

    looking = cluster.control(Api.PRODUCE, look)
    cluster.control(Api.PRODUCE, fail, times=1)
    after = cluster.control(Api.PRODUCE, Fail(ErrorCode.UNKNOWN_SERVER_ERROR))
    assert await wire.produce(0, 1) == {0: "LEADER_NOT_AVAILABLE", 1: "LEADER_NOT_AVAILABLE"}
    assert await wire.produce() == {0: "UNKNOWN_SERVER_ERROR"}
    assert seen == ["wire 1 ['t-0', 't-1']", "wire 1 ['t-0']"]
    assert (looking.acted, after.acted) == (0, 1)


async def test_a_hook_acts_at_most_its_number_of_times(cluster: FakeCluster) -> None:
    """A hook that waits acts once, although two requests wait in it."""
    gate, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def fail(_: Request) -> Action | None:
        waiting.release()
        await gate.wait()
        return Fail(ErrorCode.LEADER_NOT_AVAILABLE)

    cluster.control(Api.PRODUCE, fail, times=1)
    async with connected(cluster) as one, connected(cluster) as two:
        requests = [asyncio.create_task(wire.produce()) for wire in (one, two)]
        await waiting.acquire()
        await waiting.acquire()
        gate.set()
        assert sorted(row[0] for row in await asyncio.gather(*requests)) == ["LEADER_NOT_AVAILABLE", "NONE"]


@pytest.mark.parametrize("error", [AssertionError, pytest.fail.Exception])
async def test_an_exception_of_a_hook_is_raised(error: type[BaseException]) -> None:
    """An exception in a hook closes the connection, and is raised when the cluster is closed. So is that of
    `pytest.fail`, which is no `Exception`.
    """

    def wrong(request: Request) -> Action | None:
        raise error(f"not this: {request.api.name}")

    async def run() -> None:
        async with FakeCluster() as cluster, connected(cluster) as wire:
            cluster.control(Api.METADATA, wrong)
            wire.send(Api.METADATA)
            assert await wire.is_closed()

    with pytest.raises(error, match="not this: METADATA"):
        await run()


async def test_a_paused_node_answers_later(cluster: FakeCluster, wire: Wire) -> None:
    """A paused node accepts connections and requests, and handles them once it is resumed."""
    cluster.pause_node(1)
    wire.send_records()
    async with connected(cluster) as other:
        other.send(Api.METADATA)
        assert await wire.is_silent()
        assert cluster.end_offset("t") == 0
        cluster.resume_node(1)
        await wire.read()
        await other.read()
    assert cluster.end_offset("t") == 1


async def test_a_node_that_is_started_again_is_not_paused(cluster: FakeCluster) -> None:
    """A pause ends with the node, as that of a process."""
    cluster.pause_node(1)
    await cluster.stop_node(1)
    await cluster.start_node(1)
    async with connected(cluster) as wire:
        assert await wire.produce() == {0: "NONE"}


async def test_a_pause_holds_responses_too(cluster: FakeCluster, wire: Wire) -> None:
    """A response that was pending when the node was paused is sent once it is resumed."""
    gate = asyncio.Event()

    async def hold(_: Request) -> Action | None:
        cluster.pause_node(1)
        gate.set()
        return None

    cluster.control(Api.METADATA, hold)
    wire.send(Api.METADATA)
    await gate.wait()
    assert await wire.is_silent()
    cluster.resume_node(1)
    await wire.read()


async def test_invalid_requests_close_the_connection(cluster: FakeCluster) -> None:
    """Unknown APIs and versions, and invalid frames, close the connection."""
    nonsense = encode_request(SUPPORTED_APIS[Api.METADATA], 12, 1, "wire", Message())[:-1] + b"\xff"
    for frame in (b"\x03\xe7\0\0\0\0\0\1\xff\xff", b"\0\3\0\x63\0\0\0\1\xff\xff\0", nonsense, b"\0"):
        async with connected(cluster) as wire:
            wire.write(frame)
            assert await wire.is_closed(), frame
    for size in (-1, 0, 2**31 - 1):
        async with connected(cluster) as wire:
            wire.writer.write(struct.pack(">i", size))
            assert await wire.is_closed(), size


async def test_unknown_api_versions_are_answered_in_version_0(wire: Wire) -> None:
    """An ApiVersions request in an unknown version is answered in version 0 with the supported ones."""
    wire.write(b"\0\x12\0\x63\0\0\0\1\xff\xff\0")
    _, response, _ = decode_response(SUPPORTED_APIS[Api.API_VERSIONS], 0, await wire.read())
    assert ErrorCode(response.error_code) is ErrorCode.UNSUPPORTED_VERSION
    assert {row.api_key for row in response.api_keys} == set(SUPPORTED_APIS)


async def test_passwords_are_checked() -> None:
    """With users a connection must authenticate first, and a wrong password is an error."""
    async with FakeCluster(users={"ann": "secret"}) as cluster:
        async with connected(cluster) as wire:
            wire.send(Api.METADATA)
            assert await wire.is_closed()
        async with connected(cluster) as wire:
            rejected = await wire.request(Api.SASL_HANDSHAKE, mechanism="SCRAM-SHA-256")
            assert ErrorCode(rejected.error_code) is ErrorCode.UNSUPPORTED_SASL_MECHANISM
            assert (await wire.request(Api.SASL_HANDSHAKE, mechanism="PLAIN")).mechanisms == ["PLAIN"]
            for auth_bytes in (b"\0ann\0wrong", b"\0\xff\0\xff", b"\0bob\0secret", b"ann secret", b"\0bob\0"):
                rejected = await wire.request(Api.SASL_AUTHENTICATE, auth_bytes=auth_bytes)
                assert ErrorCode(rejected.error_code) is ErrorCode.SASL_AUTHENTICATION_FAILED
            assert (await wire.request(Api.SASL_AUTHENTICATE, auth_bytes=b"\0ann\0secret")).error_code == 0
            assert (await wire.request(Api.METADATA)).brokers


async def test_logins_can_be_delayed_and_dropped() -> None:
    """A hook's actions apply to the requests of a login as to all others."""
    async with FakeCluster(users={"ann": "secret"}) as cluster, connected(cluster) as wire:
        cluster.control(None, Delay(1))
        assert (await wire.request(Api.SASL_HANDSHAKE, mechanism="PLAIN")).mechanisms == ["PLAIN"]
        assert (await wire.request(Api.SASL_AUTHENTICATE, auth_bytes=b"\0ann\0secret")).error_code == 0
        assert (await wire.request(Api.METADATA)).brokers
    async with FakeCluster(users={"ann": "secret"}) as cluster, connected(cluster) as wire:
        cluster.control(Api.SASL_HANDSHAKE, Fail(ErrorCode.ILLEGAL_SASL_STATE, handled=True), times=1)
        rejected = await wire.request(Api.SASL_HANDSHAKE, mechanism="PLAIN")
        assert rejected.error_code == ErrorCode.ILLEGAL_SASL_STATE
        cluster.control(Api.SASL_HANDSHAKE, Close(handled=True))
        wire.send(Api.SASL_HANDSHAKE, mechanism="PLAIN")
        assert await wire.is_closed()


def request(api: Api, node: int = 1, **body: object) -> Request:
    supported = SUPPORTED_APIS[api]
    version = supported.max_version
    decoded, _ = supported.request.decode(supported.request.encode(Message(**body), version), version)
    return Request(api, version, node, "client", "/host", decoded, 0)


def about(api: Api) -> Request:
    """A request for two partitions of a topic and one of another."""
    numbers = api in (Api.OFFSET_FETCH, Api.ADD_PARTITIONS_TO_TXN)
    rows = [0, 1] if numbers else [Message(partition=0), Message(partition=1)]
    return request(api, topics=[Message(name="t", partitions=rows), Message(name="u", partitions=rows[:1])])


def test_a_control_is_for_its_requests() -> None:
    """A control applies to its API and node, or to all."""
    controls: list[Control] = []
    one = Control(controls, Api.FETCH, Close(), None, 2)
    assert one.is_for(request(Api.FETCH, node=2))
    assert not one.is_for(request(Api.FETCH, node=1))
    assert not one.is_for(request(Api.PRODUCE, node=2))
    assert Control(controls, None, Close(), None, None).is_for(request(Api.METADATA))


def test_a_control_ends() -> None:
    """A control ends after its number of times, at the end of its block, or when it is removed."""
    controls: list[Control] = []
    twice = Control(controls, None, Close(), 2, None)
    twice.count()
    assert twice.is_on
    twice.count()
    assert repr(twice) == "<Control of every api, acted 2 of 2 times, removed>"
    with Control(controls, None, Close(), None, None) as block:
        assert block.is_on
    assert not block.is_on
    block.remove()
    assert controls == []


def test_a_control_can_be_for_no_request() -> None:
    """With 0 times a control never acts."""
    assert not Control([], None, Close(), 0, None).is_for(request(Api.METADATA))


PARTITIONED = [
    Api.PRODUCE,
    Api.FETCH,
    Api.LIST_OFFSETS,
    Api.OFFSET_COMMIT,
    Api.OFFSET_FETCH,
    Api.DELETE_RECORDS,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.TXN_OFFSET_COMMIT,
]


@pytest.mark.parametrize("api", PARTITIONED, ids=lambda api: api.name.lower())
def test_partitions_fail_alone(api: Api) -> None:
    """Failures of some partitions are merged into the response for the others."""
    sent, wanted = about(api), {TopicPartition("t", 1), TopicPartition("u", 0)}
    rest = without_partitions(sent, wanted)
    assert rest.partitions() == [TopicPartition("t", 0)]
    assert len(sent.partitions()) == 3
    response = merge_failures(
        Message(topics=[Message(name="t", partitions=[Message(partition=0, error_code=0)])]),
        failed_response(sent, 7, wanted),
    )
    codes = {(t.name, p.partition): p.error_code for t in response.topics for p in t.partitions}
    assert codes == {("t", 0): 0, ("t", 1): 7, ("u", 0): 7}
    assert getattr(response, "error_code", 0) == 0


@pytest.mark.parametrize("api", [api for api in Api if api is not Api.METADATA], ids=lambda api: api.name.lower())
def test_every_api_can_fail(api: Api) -> None:
    """A failed response can be encoded in every version of every other API than Metadata, and has the error."""
    bodies: dict[Api, dict[str, object]] = {
        Api.CREATE_TOPICS: {"topics": [Message(name="t")]},
        Api.CREATE_PARTITIONS: {"topics": [Message(name="t")]},
        Api.DELETE_TOPICS: {"topic_names": ["t"]},
        Api.DESCRIBE_GROUPS: {"groups": ["g"]},
        Api.DELETE_GROUPS: {"groups": ["g"]},
        Api.DESCRIBE_CONFIGS: {"resources": [Message(resource_type=2, resource_name="t")]},
        Api.INCREMENTAL_ALTER_CONFIGS: {"resources": [Message(resource_type=2, resource_name="t")]},
    }
    sent = about(api) if api in PARTITIONED else request(api, **bodies.get(api, {}))
    response = failed_response(sent, ErrorCode.BROKER_NOT_AVAILABLE)
    supported = SUPPORTED_APIS[api]
    for version in range(supported.min_version, supported.max_version + 1):
        read, _ = supported.response.decode(supported.response.encode(response, version), version)
        rows = [*(getattr(read, "topics", None) or ()), *(getattr(read, "groups", None) or ())]
        rows += getattr(read, "resources", None) or ()
        rows += [p for t in getattr(read, "topics", None) or () for p in getattr(t, "partitions", None) or ()]
        assert ErrorCode.BROKER_NOT_AVAILABLE in [getattr(row, "error_code", 0) for row in [read, *rows]]


@pytest.mark.parametrize("version", [11, 12])
def test_a_failed_fetch_has_empty_records(version: int) -> None:
    """A fetch that fails has empty records, not null, which librdkafka cannot decode."""
    schema = SUPPORTED_APIS[Api.FETCH].response
    response, _ = schema.decode(schema.encode(failed_response(about(Api.FETCH), 29), version), version)
    assert [row.records for topic in response.topics for row in topic.partitions] == [b""] * 3


@pytest.mark.parametrize("api", [Api.DESCRIBE_CONFIGS, Api.INCREMENTAL_ALTER_CONFIGS], ids=lambda api: api.name.lower())
def test_a_resource_that_fails_has_its_type_and_name(api: Api) -> None:
    """Clients find the error of a resource by its type and name."""
    sent = request(api, resources=[Message(resource_type=2, resource_name="t")])
    (row,) = failed_response(sent, ErrorCode.TOPIC_AUTHORIZATION_FAILED).resources
    assert (row.resource_type, row.resource_name, row.error_code) == (2, "t", ErrorCode.TOPIC_AUTHORIZATION_FAILED)
