"""The fetcher without a broker: its requests, its handling of responses, and the records it returns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.consumer.fetcher import (
    LEFT_OUT_WAIT_MS,
    TAKEN_BYTES,
    Fetch,
    Fetcher,
    NextRequests,
    OffsetLookup,
)
from penstock.shared.clients.consumer.settings import ReadingSettings
from penstock.shared.clients.consumer.subscription_state import Move, ResetPolicy
from penstock.shared.clients.protocol.fetch import FetchedPartition, FetchResponse
from penstock.shared.clients.protocol.record_batches import crc32c, new_batch_builder, seal_batch
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerNotAvailable,
    CorruptRecord,
    IllegalState,
    LogTruncation,
    NoOffsetForPartition,
    OffsetOutOfRange,
    PenstockError,
)
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
NOT_LEADER, OUT_OF_RANGE, UNAUTHORIZED, CORRUPT, UNKNOWN = 6, 1, 29, 2, -1
SIZE = 1_000


def batch(first: int, count: int, size: int = 1, epoch: int = -1, producer_id: int = -1) -> bytes:
    """A batch, of a transaction if it has a producer id."""
    builder = new_batch_builder(1 << 20, producer_id >= 0)
    for i in range(count):
        builder.append(i, 5, None, b"x" * size, [])
    data = bytearray(seal_batch(builder, (producer_id, -1, -1)))
    data[0:8] = first.to_bytes(8, "big")
    data[12:16] = epoch.to_bytes(4, "big", signed=True)
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    return bytes(data)


def batch_of(size: int, first: int = 0) -> bytes:
    """A batch of one record, with exactly `size` bytes."""
    rest = len(batch(first, 1, size - 100)) - (size - 100)
    data = batch(first, 1, size - rest)
    assert len(data) == size
    return data


class Scene:
    """A fetcher with leaders and a clock."""

    def __init__(self, policy: str = "earliest", *, has_group: bool = False, committed: bool = False, **limits: int):
        limits = {"max_partition_fetch_bytes": SIZE, "fetch_buffer_bytes": 100 * SIZE, **limits}
        level = "read_committed" if committed else "read_uncommitted"
        # Without validation: the limits are smaller than allowed.
        settings = ReadingSettings.model_construct(auto_offset_reset=policy, isolation_level=level, **limits)
        self.fetcher = Fetcher(settings, 100, has_group=has_group)
        self.leaders: dict[TopicPartition, int | None] = {A0: 1, A1: 1, B0: 2}
        self.now = 0.0

    def at(self, **offsets: int) -> Scene:
        """Assigns partitions and sets their positions (a0=7)."""
        tps = {TopicPartition(name[0], int(name[1])): offset for name, offset in offsets.items()}
        self.fetcher.assign(tps)
        for tp, offset in tps.items():
            self.fetcher.seek(tp, offset)
        return self

    def next_requests(self) -> NextRequests:
        return self.fetcher.next_requests(self.leaders.get, self.now)

    def fetches(self) -> dict[int, Fetch]:
        return {fetch.node: fetch for fetch in self.next_requests().fetches}

    def respond(self, fetch: Fetch, **responses: Any) -> None:
        """Responds with bytes, an error code or a whole response for each partition (a0=...). Other partitions are
        empty."""
        made = {}
        for tp in fetch.wanted:
            got = responses.get(f"{tp.topic}{tp.partition}", b"")
            if isinstance(got, int):
                got = FetchedPartition(got)
            elif isinstance(got, bytes):
                got = FetchedPartition(0, 100, 90, (), got)
            made[tp] = got
        self.fetcher.received(fetch, FetchResponse(made), self.now)

    def respond_to_all(self, **responses: Any) -> None:
        """Responds to the current requests."""
        for fetch in self.next_requests().fetches:
            self.respond(fetch, **responses)

    def take(self, limit: int | None = None) -> dict[TopicPartition, list[int]]:
        return {tp: columns.offsets.tolist() for tp, columns in self.fetcher.take(limit).items()}


def test_one_request_a_node() -> None:
    """All partitions of a node share one request with their offsets. The next one is sent after its response."""
    scene = Scene().at(a0=5, a1=0, b0=7)
    fetches = scene.fetches()
    assert {node: fetch.wanted for node, fetch in fetches.items()} == {1: {A0: 5, A1: 0}, 2: {B0: 7}}
    assert fetches[1].max_wait_ms == ReadingSettings().fetch_max_wait_ms
    assert scene.fetches() == {}
    scene.respond(fetches[1])
    assert list(scene.fetches()) == [1]


def test_the_next_records_are_fetched_ahead() -> None:
    """The position follows the returned records, and the fetch offset follows the received ones."""
    scene = Scene().at(a0=0)
    scene.respond_to_all(a0=batch(0, 10))
    assert scene.fetcher.position(A0) == 0
    assert scene.fetches()[1].wanted == {A0: 10}
    assert scene.take(4) == {A0: [0, 1, 2, 3]}
    assert (scene.fetcher.position(A0), scene.fetcher.lag(A0, 0)) == (4, 100)
    assert scene.take() == {A0: [4, 5, 6, 7, 8, 9]}
    assert (scene.fetcher.position(A0), scene.fetcher.buffered_bytes, scene.take()) == (10, 0, {})


def test_the_end_under_read_committed() -> None:
    """Under read_committed, the end is the last stable offset. It is unknown before the first response."""
    scene = Scene(committed=True).at(a0=0)
    assert scene.fetcher.lag(A0, 0) is None
    scene.respond_to_all()
    assert [scene.fetcher.lag(A0, position) for position in (80, 90, 91)] == [10, 0, 0]


@pytest.mark.parametrize(("committed", "taken", "moves"), [(True, {}, {A0: Move(2, 4)}), (False, {A0: [0, 1]}, {})])
def test_records_of_an_aborted_transaction(committed: bool, taken: dict[Any, Any], moves: dict[Any, Any]) -> None:
    """Only under read_committed they are left out. The position moves past them, which is reported once with their
    leader epoch."""
    scene = Scene(committed=committed).at(a0=0)
    scene.respond_to_all(a0=FetchedPartition(0, 100, 90, ((7, 0),), batch(0, 2, epoch=4, producer_id=7)))
    assert scene.take() == taken
    assert (scene.fetcher.position(A0), scene.fetcher.moves(), scene.fetcher.moves()) == (2, moves, {})


def test_partitions_take_turns() -> None:
    """The partition served last comes last in the next limited poll and in the next request."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 6), a1=batch(0, 6))
    assert [list(scene.take(2)) for _ in range(4)] == [[A0], [A1], [A0], [A1]]
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 6))
    assert list(scene.fetches()[1].wanted) == [A1, A0]


def test_a_poll_is_filled_from_several_partitions() -> None:
    """A limit applies to the poll, not to each partition."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 3), a1=batch(0, 6))
    assert scene.take(7) == {A0: [0, 1, 2], A1: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("size", "polled"), [(TAKEN_BYTES - 1, [A0, A1]), (TAKEN_BYTES, [A0]), (TAKEN_BYTES + 1, [A0])]
)
def test_a_poll_without_a_limit_ends_after_enough_bytes(size: int, polled: list[TopicPartition]) -> None:
    """After TAKEN_BYTES, the records of other partitions are left for the next poll."""
    scene = Scene(fetch_buffer_bytes=100 * TAKEN_BYTES).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch_of(size), a1=batch_of(size))
    assert list(scene.take()) == polled


def test_only_the_bytes_of_taken_records_fill_a_poll() -> None:
    """A completed fetch that stays in the buffer does not count, so the poll continues with the next partition."""
    scene = Scene(max_partition_fetch_bytes=TAKEN_BYTES, fetch_buffer_bytes=100 * TAKEN_BYTES).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch_of(TAKEN_BYTES - 1))
    scene.respond_to_all(a0=batch_of(TAKEN_BYTES - 1, first=1), a1=batch_of(SIZE))
    assert scene.take() == {A0: [0], A1: [0]}
    assert scene.take() == {A0: [1]}


def test_a_partition_with_enough_buffered_is_not_fetched() -> None:
    """At most twice the partition's limit is fetched. Other partitions of the node wait only briefly meanwhile."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 1, 1_100))
    fetch = scene.fetches()[1]
    assert fetch.wanted == {A1: 0, A0: 1}
    scene.respond(fetch, a0=batch(1, 1, 1_100))
    fetch = scene.fetches()[1]
    assert (fetch.wanted, fetch.max_wait_ms) == ({A1: 0}, LEFT_OUT_WAIT_MS)
    scene.respond(fetch)
    assert scene.take(1) == {A0: [0]}
    assert scene.fetches()[1].wanted == {A1: 0, A0: 2}


@pytest.mark.parametrize(("size", "wanted"), [(2 * SIZE - 1, {A1: 0, A0: 1}), (2 * SIZE, {A1: 0})])
def test_twice_the_limit_of_a_partition_is_enough(size: int, wanted: dict[TopicPartition, int]) -> None:
    """A partition is fetched until it has buffered twice `max_partition_fetch_bytes`."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch_of(size))
    assert scene.fetches()[1].wanted == wanted


def test_a_slow_application_takes_all_that_has_arrived() -> None:
    """A partition with two completed fetches is not fetched. So the next fetch has all records that arrive meanwhile,
    and not one record each."""
    scene = Scene().at(a0=0)
    scene.respond_to_all(a0=batch(0, 1))
    scene.respond_to_all(a0=batch(1, 1))
    assert scene.fetches() == {}
    assert scene.take() == {A0: [0]}
    scene.respond_to_all(a0=batch(2, 40))
    assert (scene.take(), scene.take()) == ({A0: [1]}, {A0: list(range(2, 42))})


def test_a_left_out_partition_never_makes_a_fetch_wait_longer() -> None:
    """A fetch waits at most `fetch_max_wait_ms`, also if a partition of its node is left out."""
    scene = Scene(fetch_max_wait_ms=LEFT_OUT_WAIT_MS - 1).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch_of(2 * SIZE))
    fetch = scene.fetches()[1]
    assert (fetch.wanted, fetch.max_wait_ms) == ({A1: 0}, LEFT_OUT_WAIT_MS - 1)


def test_an_application_that_takes_nothing_causes_few_requests() -> None:
    """While a partition is left out, each fetch of the node waits twice as long as the last one, until a take."""
    scene = Scene(fetch_max_wait_ms=100).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch_of(2 * SIZE))
    waits = []
    for _ in range(4):
        fetch = scene.fetches()[1]
        waits.append(fetch.max_wait_ms)
        scene.respond(fetch)
    assert waits == [20, 40, 80, 100]
    scene.take()
    scene.respond_to_all(a0=batch_of(2 * SIZE, first=1))
    assert scene.fetches()[1].max_wait_ms == 20


def test_a_batch_larger_than_every_limit_is_delivered() -> None:
    """A broker returns at least one batch. It is delivered, whatever its size."""
    scene = Scene(fetch_buffer_bytes=SIZE, fetch_max_bytes=SIZE).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 2, 5 * SIZE))
    assert scene.fetches() == {}
    assert scene.take() == {A0: [0, 1]}
    assert scene.fetches()[1].wanted == {A1: 0, A0: 2}


def test_the_smallest_buffer() -> None:
    """With room for a single byte, a partition is still fetched."""
    scene = Scene(fetch_buffer_bytes=1).at(a0=0)
    assert scene.fetches()[1].max_bytes == 1


def test_back_pressure() -> None:
    """Buffered and requested bytes stay within the limit, which nodes share. Freed room is used at once."""
    scene = Scene(fetch_buffer_bytes=6 * SIZE).at(a0=0, b0=0)
    fetches = scene.fetches()
    assert [fetch.max_bytes for fetch in fetches.values()] == [2 * SIZE, 2 * SIZE]
    scene.respond(fetches[1], a0=batch(0, 1, 1_800))
    assert [fetch.max_bytes for fetch in scene.fetches().values()] == [2 * SIZE]
    scene.respond(fetches[2], b0=batch(0, 1, 1_800))
    assert scene.fetches() == {}  # 3,600 are here and 2,000 may still come
    assert len(scene.take()) == 2
    assert [fetch.max_bytes for fetch in scene.fetches().values()] == [2 * SIZE]


def test_free_bytes_are_divided_into_whole_numbers() -> None:
    """The nodes share the free bytes equally. An odd byte is left over."""
    scene = Scene(fetch_buffer_bytes=9 * SIZE + 1).at(a0=0, b0=0)
    scene.respond_to_all(a0=batch(0, 1, 1_800), b0=batch(0, 1, 1_800))
    free = 9 * SIZE + 1 - scene.fetcher.buffered_bytes
    assert free % 2 == 1
    assert [fetch.max_bytes for fetch in scene.fetches().values()] == [(free - 1) // 2] * 2


def test_an_unresponsive_node_leaves_room_for_others() -> None:
    """A request to an unresponsive node reserves only its share, so another node can be fetched from."""
    scene = Scene(fetch_buffer_bytes=4 * SIZE).at(a0=0, a1=0)
    assert scene.fetches()[1].max_bytes == 2 * SIZE
    scene.fetcher.seek(A1, 0)
    scene.leaders[A1] = 2
    assert scene.fetches()[2].wanted == {A1: 0}


def test_a_paused_partition() -> None:
    """A paused partition keeps its buffer, is not fetched, and does not block others."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 3))
    scene.fetcher.pause(A0)
    assert (scene.fetcher.has_data, scene.take(), scene.fetcher.paused) == (False, {}, {A0})
    assert scene.fetches()[1].wanted == {A1: 0}
    scene.fetcher.resume(A0)
    assert scene.take() == {A0: [0, 1, 2]}


def test_buffers_of_paused_partitions_are_released() -> None:
    """If other partitions need room, the buffer of a paused partition is dropped and fetched again later."""
    scene = Scene(fetch_buffer_bytes=2 * SIZE).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 2, 900, epoch=4))
    assert scene.take(1) == {A0: [0]}
    scene.fetcher.pause(A0)
    assert scene.fetches()[1].wanted == {A1: 0}
    assert (scene.fetcher.buffered_bytes, scene.fetcher.position(A0)) == (0, 1)
    scene.fetcher.resume(A0)
    assert (scene.fetcher.has_data, scene.take()) == (False, {})
    scene.leaders[A0] = 3
    fetch = scene.fetches()[3]
    assert (fetch.wanted, fetch.epochs) == ({A0: 1}, {A0: 4})


@pytest.mark.parametrize(("free", "kept"), [(SIZE - 1, False), (SIZE, True)])
def test_a_buffer_is_kept_while_there_is_room_for_a_fetch(free: int, kept: bool) -> None:
    """The buffer of a paused partition is dropped only if less than a partition's limit is free for a node."""
    scene = Scene(fetch_buffer_bytes=2 * SIZE + free).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch_of(2 * SIZE))
    scene.fetcher.pause(A0)
    assert scene.fetches()[1].wanted == {A1: 0}
    assert (scene.fetcher.buffered_bytes > 0) == kept


def test_a_buffer_is_released_if_the_nodes_have_too_little_room_each() -> None:
    """The free bytes are divided by the number of nodes before they are compared with a partition's limit."""
    scene = Scene(fetch_buffer_bytes=3 * SIZE).at(a0=0, a1=0, b0=0)
    fetches = scene.fetches()
    scene.respond(fetches[1], a0=batch_of(2 * SIZE - 100))
    scene.respond(fetches[2])
    scene.fetcher.pause(A0)
    assert [fetch.max_bytes for fetch in scene.fetches().values()] == [SIZE, SIZE]
    assert scene.fetcher.buffered_bytes == 0


def test_no_buffer_is_released_while_there_are_records_to_return() -> None:
    """The next poll returns those records and makes room. So the paused partition is not fetched again."""
    scene = Scene(fetch_buffer_bytes=4 * SIZE).at(a0=0, a1=0)
    scene.respond_to_all(a0=batch_of(2 * SIZE), a1=batch_of(2 * SIZE - 1))
    scene.fetcher.pause(A0)
    assert scene.fetches() == {}
    assert scene.take() == {A1: [0]}
    assert scene.fetches()[1].wanted == {A1: 1}
    scene.fetcher.resume(A0)
    assert scene.take() == {A0: [0]}


def test_a_release_keeps_the_fetch_of_a_paused_partition() -> None:
    """A paused partition without a buffer keeps its open fetch, whose records are returned after a resume."""
    scene = Scene(fetch_buffer_bytes=3 * SIZE).at(a0=0, a1=0, b0=0)
    scene.leaders |= {A1: 3, B0: None}
    fetches = scene.fetches()
    scene.respond(fetches[3], a1=batch_of(2 * SIZE))
    scene.fetcher.pause(A0)
    scene.fetcher.pause(A1)
    scene.leaders[B0] = 2
    assert scene.fetches()[2].wanted == {B0: 0}
    assert scene.fetcher.buffered_bytes == 0
    scene.respond(fetches[1], a0=batch(0, 3))
    scene.fetcher.resume(A0)
    assert scene.take() == {A0: [0, 1, 2]}


def test_a_paused_partition_does_not_hide_others() -> None:
    """A poll skips the records and errors of paused partitions, and returns or raises those of the others."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 1), a1=batch(0, 2))
    scene.fetcher.pause(A0)
    assert scene.take() == {A1: [0, 1]}
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=UNAUTHORIZED, a1=UNAUTHORIZED)
    scene.fetcher.pause(A0)
    with pytest.raises(AuthorizationFailed, match="a-1"):
        scene.take()
    assert scene.take() == {}
    scene.fetcher.resume(A0)
    with pytest.raises(AuthorizationFailed, match="a-0"):
        scene.take()


def test_a_seek_discards_earlier_fetches() -> None:
    """After a seek neither buffered records nor the response in flight is returned. The response to a new fetch is."""
    scene = Scene().at(a0=0)
    scene.respond_to_all(a0=batch(0, 3))
    old = scene.fetches()[1]
    scene.fetcher.seek(A0, 50)
    assert (scene.fetcher.has_data, scene.take()) == (False, {})
    scene.respond(old, a0=batch(3, 3))
    assert scene.take() == {}
    assert scene.fetcher.position(A0) == 50
    scene.respond_to_all(a0=batch(50, 1))
    assert scene.take() == {A0: [50]}


def test_a_stale_response_leaves_a_newer_request_in_flight() -> None:
    """After a seek and a leader change, the old node's response does not affect the request to the new leader."""
    scene = Scene().at(a0=0)
    old = scene.fetches()[1]
    scene.fetcher.seek(A0, 0)
    scene.leaders[A0] = 2
    new = scene.fetches()[2]
    scene.respond(old, a0=batch(0, 3))
    assert scene.fetches() == {}
    scene.respond(new, a0=batch(0, 3))
    assert scene.take() == {A0: [0, 1, 2]}


def test_a_partition_has_one_open_request() -> None:
    """If the leader changes during a fetch, the new leader is asked only after that fetch has ended."""
    scene = Scene().at(a0=0)
    (fetch,) = scene.fetches().values()
    scene.leaders[A0] = 2
    assert scene.fetches() == {}
    scene.respond(fetch, a0=batch(0, 3))
    assert scene.fetches()[2].wanted == {A0: 3}


def test_an_assignment_forgets_or_keeps() -> None:
    """A new assignment starts fresh. Kept partitions keep their buffer, pause and request."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 3), a1=batch(0, 3))
    under_way = scene.fetches()[1]
    scene.fetcher.pause(A0)
    scene.fetcher.assign([A0, B0], kept=[A0, A1, B0])
    assert (scene.fetcher.assignment, scene.fetcher.paused) == ({A0, B0}, {A0})
    assert (scene.fetcher.position(A0), scene.fetcher.position(B0)) == (0, None)
    scene.fetcher.resume(A0)
    scene.respond(under_way, a0=batch(3, 1), a1=batch(3, 1))
    assert [scene.take(), scene.take()] == [{A0: [0, 1, 2]}, {A0: [3]}]
    scene.fetcher.assign([A0])
    assert scene.fetcher.position(A0) is None
    with pytest.raises(IllegalState, match="a-1: not assigned"):
        scene.fetcher.seek(A1, 0)


def test_a_new_assignment_has_no_data() -> None:
    """A partition that is assigned again without being kept has no records to return."""
    scene = Scene().at(a0=0)
    scene.respond_to_all(a0=batch(0, 3))
    assert scene.fetcher.has_data
    scene.fetcher.assign([A0])
    assert (scene.fetcher.has_data, scene.take()) == (False, {})


def test_a_leader_that_moved() -> None:
    """Metadata is refreshed, the partition backs off longer each time, and the same offset is fetched from the new
    leader."""
    scene = Scene().at(a0=5)
    waits = []
    for _ in range(6):
        scene.respond_to_all(a0=NOT_LEADER)
        requests = scene.next_requests()
        assert (requests.stale_metadata, requests.fetches) == (True, [])
        assert requests.next_ms is not None
        waits.append(requests.next_ms - scene.now)
        scene.now = requests.next_ms
    assert waits == [100, 200, 400, 800, 1_000, 1_000]
    scene.leaders[A0] = 2
    assert scene.fetches()[2].wanted == {A0: 5}


def test_no_leader() -> None:
    """A partition without a leader is not fetched, and a metadata refresh is requested."""
    scene = Scene().at(a0=5, b0=0)
    scene.leaders[A0] = None
    requests = scene.next_requests()
    assert ([fetch.node for fetch in requests.fetches], requests.stale_metadata) == ([2], True)


def test_metadata_is_stale_once_for_each_reason() -> None:
    """Metadata is not refreshed at the start, and once after a failed request."""
    scene = Scene().at(a0=5)
    requests = scene.next_requests()
    assert not requests.stale_metadata
    scene.fetcher.failed(requests.fetches[0], BrokerNotAvailable("gone"), scene.now)
    assert [scene.next_requests().stale_metadata for _ in range(2)] == [True, False]


def test_a_paused_partition_needs_no_retry_time() -> None:
    """The backoff of a paused partition sets no time for the next requests."""
    scene = Scene().at(a0=5)
    scene.respond_to_all(a0=NOT_LEADER)
    scene.fetcher.pause(A0)
    assert scene.next_requests().next_ms is None
    scene.fetcher.resume(A0)
    assert scene.next_requests().next_ms == 100


def test_a_broker_that_does_not_respond() -> None:
    """Its partitions back off and a metadata refresh is requested. No error is raised."""
    scene = Scene().at(a0=5, b0=0)
    fetches = scene.fetches()
    scene.fetcher.failed(fetches[1], BrokerNotAvailable("gone"), scene.now)
    requests = scene.next_requests()
    assert (requests.fetches, requests.stale_metadata, requests.next_ms) == ([], True, 100)
    assert scene.take() == {}
    scene.now = 100
    requests = scene.next_requests()
    assert ([fetch.wanted for fetch in requests.fetches], requests.next_ms) == ([{A0: 5}], None)


def test_when_the_last_answered_fetch_was_sent() -> None:
    """A fetch without an answer, or with an error, does not count: a high watermark of a broker that hangs is old."""
    scene = Scene().at(a0=100, b0=5)
    scene.now = 50
    fetches = scene.fetches()
    scene.now = 80
    scene.respond(fetches[1])
    unanswered = scene.fetches()[1]
    scene.now = 900
    assert [scene.fetcher.answered_ms(tp) for tp in (A0, B0)] == [50, 0]
    scene.respond(unanswered, a0=NOT_LEADER)
    assert scene.fetcher.answered_ms(A0) == 50
    scene.now = 2_000
    scene.respond_to_all()
    assert scene.fetcher.answered_ms(A0) == 2_000


def test_the_high_watermark_is_unknown_while_fetches_fail() -> None:
    """After a failed fetch the high watermark is unknown until a fetch succeeds, because records may have come."""
    scene = Scene().at(a0=100)
    scene.respond_to_all()
    assert scene.fetcher.high_watermark(A0) == 100
    scene.fetcher.failed(scene.fetches()[1], BrokerNotAvailable("gone"), scene.now)
    assert scene.fetcher.high_watermark(A0) is None
    scene.now = 100
    scene.respond_to_all(a0=NOT_LEADER)
    assert scene.fetcher.high_watermark(A0) is None
    scene.now = 1_000
    scene.respond_to_all()
    assert scene.fetcher.high_watermark(A0) == 100


def test_a_top_level_error_or_a_missing_partition() -> None:
    """A response with a top-level error, or without a requested partition, is retried later."""
    scene = Scene().at(a0=5)
    scene.fetcher.received(scene.fetches()[1], FetchResponse({}, error_code=UNKNOWN), scene.now)
    assert scene.fetches() == {}
    scene.now = 100
    scene.fetcher.received(scene.fetches()[1], FetchResponse({}), scene.now)
    assert (scene.fetches(), scene.take()) == ({}, {})


def test_the_outcomes_of_a_response() -> None:
    """They are the errors that are retried, and None for fetched partitions. A partition with another error, with a
    truncated log, or that was moved by a seek meanwhile, has no outcome."""
    offsets = {TopicPartition("a", number): number for number in range(6)}
    scene = Scene()
    scene.leaders = dict.fromkeys(offsets, 1)
    scene.at(**{f"a{tp.partition}": offset for tp, offset in offsets.items()})
    fetch = scene.fetches()[1]
    scene.fetcher.seek(TopicPartition("a", 4), 0)
    codes = (0, NOT_LEADER, UNKNOWN, UNAUTHORIZED, NOT_LEADER)
    fetched = [*map(FetchedPartition, codes), diverged(3)]
    response = FetchResponse(dict(zip(offsets, fetched, strict=True)))
    outcomes = scene.fetcher.received(fetch, response, scene.now)
    assert {tp.partition: error and type(error).__name__ for tp, error in outcomes.items()} == {
        0: None,
        1: "NotLeaderOrFollower",
        2: "BrokerError",
    }


def test_an_authorization_error_is_raised_once() -> None:
    """An authorization error is raised once, at the partition's turn. Then the fetch is retried."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=UNAUTHORIZED, a1=batch(0, 1))
    with pytest.raises(AuthorizationFailed, match="a-0: TOPIC_AUTHORIZATION_FAILED"):
        scene.take()
    assert scene.take() == {A1: [0]}
    assert scene.fetcher.moves() == {}
    assert (scene.fetcher.has_data, scene.take()) == (False, {})
    scene.now = 100
    assert A0 in scene.fetches()[1].wanted


def test_records_of_other_partitions_do_not_hide_an_error() -> None:
    """A partition's error is raised although each poll finds records of another partition."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 2), a1=UNAUTHORIZED)
    scene.respond_to_all(a0=batch(2, 2))
    assert scene.take(1) == {A0: [0]}
    with pytest.raises(AuthorizationFailed, match="a-1"):
        scene.take(1)
    assert scene.take() == {A0: [1]}


def test_an_error_ends_a_poll_that_has_records() -> None:
    """A poll that reaches a partition with an error returns the records that it has, and the next poll raises."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 1), a1=UNAUTHORIZED)
    scene.respond_to_all(a0=batch(1, 1))
    assert scene.take() == {A0: [0]}
    with pytest.raises(AuthorizationFailed, match="a-1"):
        scene.take()
    assert scene.take() == {A0: [1]}


def test_a_dropped_buffer_takes_its_error_along() -> None:
    """If the buffer of a paused partition is dropped, its error is found again by the next fetch."""
    scene = Scene(fetch_buffer_bytes=5 * SIZE).at(a0=0, a1=0, b0=0)
    scene.respond_to_all(a0=batch(0, 2, 900))
    scene.respond_to_all(a0=UNAUTHORIZED, a1=batch(0, 2, 1_100))
    assert isinstance(scene.fetcher.error_of(A0), AuthorizationFailed)
    scene.fetcher.pause(A0)
    scene.fetcher.pause(A1)
    assert list(scene.fetches()) == [2]
    assert scene.fetcher.buffered_bytes == 0
    scene.fetcher.resume(A0)
    scene.now = 10_000
    assert scene.fetches()[1].wanted == {A0: 0}


def corrupted(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_corrupt_batch() -> None:
    """Other partitions continue. The corrupt partition returns nothing more until a seek, whatever was received."""
    scene = Scene().at(a0=0, a1=0)
    scene.respond_to_all(a0=batch(0, 2) + corrupted(batch(2, 2)))
    scene.respond_to_all(a0=batch(4, 2))
    assert scene.take() == {A0: [0, 1]}
    scene.respond_to_all(a1=batch(0, 1))
    with pytest.raises(CorruptRecord, match=r"a-0.*offset 2.*checksum"):
        scene.take()
    assert scene.take() == {A1: [0]}
    assert scene.fetcher.buffered_bytes == 0
    for _ in range(2):
        with pytest.raises(CorruptRecord, match=r"a-0.*offset 2.*checksum"):
            scene.take()
    assert scene.fetcher.position(A0) == 2
    assert scene.fetches()[1].wanted == {A1: 1}
    scene.fetcher.seek(A0, 4)
    scene.leaders[A0] = 2
    scene.respond_to_all(a0=batch(4, 2))
    assert scene.take() == {A0: [4, 5]}


def test_the_broker_cannot_read_a_batch() -> None:
    """The broker's CORRUPT_MESSAGE error names topic, partition and offset too."""
    scene = Scene().at(a0=3)
    scene.respond_to_all(a0=CORRUPT)
    with pytest.raises(CorruptRecord, match=r"a-0.*offset 3.*broker"):
        scene.take()


def test_a_corrupt_batch_does_not_keep_the_buffers_of_paused_partitions() -> None:
    """While a partition raises CorruptRecord, the buffers of paused partitions are dropped if others need memory."""
    scene = Scene(fetch_buffer_bytes=5 * SIZE).at(a0=0, a1=0, b0=0)
    scene.respond_to_all(a0=CORRUPT, a1=batch(0, 4, 1_100))
    scene.fetcher.pause(A1)
    scene.now = 10_000
    with pytest.raises(CorruptRecord):
        scene.take()
    assert scene.fetches()[2].wanted == {B0: 0}
    assert scene.fetcher.buffered_bytes == 0


@pytest.mark.parametrize(("policy", "first"), [("earliest", 4), ("latest", 9), ("by_duration:1h", 6)])
def test_out_of_range(policy: str, first: int) -> None:
    """Buffered records are returned first, then the reset policy sets the position."""
    scene = Scene(policy).at(a0=0)
    scene.respond_to_all(a0=batch(0, 1))
    scene.respond_to_all(a0=OUT_OF_RANGE)
    assert scene.take() == {A0: [0]}
    scene.now = 100
    scene.respond_to_all(a0=OUT_OF_RANGE)
    (lookup,) = scene.next_requests().lookups
    assert (lookup.wanted, lookup.by_commit) == ({A0: ResetPolicy.parse(policy)}, False)
    assert (scene.fetcher.position(A0), scene.next_requests().lookups) == (None, [])
    scene.fetcher.placed(lookup, {A0: first})
    assert (scene.fetcher.position(A0), scene.fetches()[1].wanted) == (first, {A0: first})


@pytest.mark.parametrize(("policy", "drifts"), [("earliest", False), ("latest", True), ("by_duration:1h", True)])
def test_the_move_of_a_reset(policy: str, drifts: bool) -> None:
    """A reset is reported once, with the position before it and its reason. Only `earliest` finds the same offset
    again."""
    scene = Scene(policy).at(a0=7)
    scene.respond_to_all(a0=OUT_OF_RANGE)
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.placed(lookup, {A0: 4})
    assert scene.fetcher.moves() == {A0: Move(4, replaced=7, reason="out of range", drifts=drifts)}
    assert scene.fetcher.moves() == {}


def test_the_move_of_a_seek_by_policy() -> None:
    """It has neither a replaced position nor a reason, also after a reset that did not complete."""
    scene = Scene().at(a0=7)
    scene.respond_to_all(a0=OUT_OF_RANGE)
    scene.fetcher.seek(A0, ResetPolicy("latest"))
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.placed(lookup, {A0: 9})
    assert scene.fetcher.moves() == {A0: Move(9, drifts=True)}


def test_the_first_offset_of_a_log() -> None:
    """A lookup may find offset 0. The position is then 0."""
    scene = Scene()
    scene.fetcher.assign([A0])
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.placed(lookup, {A0: 0})
    assert (scene.fetcher.position(A0), scene.fetches()[1].wanted) == (0, {A0: 0})
    assert scene.fetcher.moves() == {A0: Move(0, reason="no committed offset")}


def test_a_lookup_without_a_result() -> None:
    """A partition that is missing in the result of a lookup is looked up at the end of the log."""
    scene = Scene()
    scene.fetcher.assign([A0])
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.placed(lookup, {})
    assert scene.fetcher.position(A0) is None
    assert [latest.wanted for latest in scene.next_requests().lookups] == [{A0: ResetPolicy("latest")}]


def test_the_move_of_a_reset_whose_time_no_record_has() -> None:
    """The second lookup, of the log's end, keeps the position before the reset and the reason."""
    scene = Scene("by_duration:1h").at(a0=7)
    scene.respond_to_all(a0=OUT_OF_RANGE)
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.placed(lookup, {A0: -1})
    (latest,) = scene.next_requests().lookups
    scene.fetcher.placed(latest, {A0: 9})
    assert scene.fetcher.moves() == {A0: Move(9, replaced=7, reason="out of range", drifts=True)}


def test_out_of_range_without_a_policy() -> None:
    """With policy `none` every poll raises an error with the offset, until a seek."""
    scene = Scene("none").at(a0=7)
    for _ in range(2):
        scene.respond_to_all(a0=OUT_OF_RANGE)
        with pytest.raises(OffsetOutOfRange, match="a-0: OFFSET_OUT_OF_RANGE: offset 7"):
            scene.take()
        scene.now += 1_000
    scene.fetcher.seek(A0, 9)
    assert scene.fetches()[1].wanted == {A0: 9}


def test_positions_come_from_the_group_then_from_the_policy() -> None:
    """The committed offset is the position. Without one the policy decides, by timestamp if a later record exists."""
    scene = Scene("by_duration:1h", has_group=True)
    scene.fetcher.assign([A0, A1, B0])
    (lookup,) = scene.next_requests().lookups
    assert (list(lookup.wanted), lookup.by_commit) == ([A0, A1, B0], True)
    scene.fetcher.committed(lookup, {A0: OffsetAndMetadata(5)})
    assert scene.fetcher.position(A0) == 5
    by_topic = scene.next_requests().lookups
    assert [list(one.wanted) for one in by_topic] == [[A1], [B0]]
    scene.fetcher.placed(by_topic[0], {A1: 8})
    scene.fetcher.placed(by_topic[1], {B0: -1})
    assert (scene.fetcher.position(A1), scene.fetcher.position(B0)) == (8, None)
    (latest,) = scene.next_requests().lookups
    assert latest.wanted == {B0: ResetPolicy("latest")}


def test_without_a_group_the_policy_decides_at_once() -> None:
    """Without a group the policy applies at once. With `none` an error is raised until a seek."""
    scene = Scene("latest")
    scene.fetcher.assign([A0])
    (lookup,) = scene.next_requests().lookups
    assert lookup.wanted == {A0: ResetPolicy("latest")}
    scene = Scene("none")
    scene.fetcher.assign([A0])
    assert scene.next_requests().lookups == []
    with pytest.raises(NoOffsetForPartition, match="a-0"):
        scene.take()
    scene.fetcher.seek(A0, 0)
    assert scene.fetches()[1].wanted == {A0: 0}


def test_a_partition_without_a_position_does_not_block_the_lookups_of_others() -> None:
    """With policy `none`, the error of one partition does not delay the lookup of another one."""
    scene = Scene("none")
    scene.fetcher.assign([A0, A1])
    scene.fetcher.seek(A1, ResetPolicy("latest"))
    lookups = scene.next_requests().lookups
    assert [lookup.wanted for lookup in lookups] == [{A1: ResetPolicy("latest")}]
    assert isinstance(scene.fetcher.error_of(A0), NoOffsetForPartition)


def test_a_seek_during_a_lookup_wins() -> None:
    """The result of an offset lookup is ignored after a seek."""
    scene = Scene("earliest")
    scene.fetcher.assign([A0])
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.seek(A0, 7)
    scene.fetcher.placed(lookup, {A0: 1})
    assert scene.fetcher.position(A0) == 7


@pytest.mark.parametrize(("error", "raises"), [(BrokerNotAvailable("x"), False), (AuthorizationFailed("x"), True)])
def test_a_lookup_that_fails(error: PenstockError, raises: bool) -> None:
    """A failed lookup is retried after a backoff. A permanent error is raised."""
    scene = Scene("earliest")
    scene.fetcher.assign([A0])
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.failed(lookup, error, scene.now)
    assert scene.next_requests().lookups == []
    if raises:
        with pytest.raises(AuthorizationFailed):
            scene.take()
    scene.now = 100
    assert [list(one.wanted) for one in scene.next_requests().lookups] == [[A0]]


def test_the_lookup_of_a_paused_partition_is_retried() -> None:
    """A position is looked up although the partition is paused. After a failure the next requests have a time."""
    scene = Scene("earliest")
    scene.fetcher.assign([A0])
    scene.fetcher.pause(A0)
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.failed(lookup, BrokerNotAvailable("gone"), scene.now)
    assert scene.next_requests().next_ms == 100
    scene.now = 100
    assert [one.wanted for one in scene.next_requests().lookups] == [{A0: ResetPolicy("earliest")}]


def test_a_leader_that_does_not_respond_blocks_no_lookup_at_others() -> None:
    """Partitions of one topic are looked up at each leader on its own."""
    scene = Scene("earliest")
    scene.leaders[A1] = 2
    scene.fetcher.assign([A0, A1])
    first, second = scene.next_requests().lookups
    scene.fetcher.failed(first, BrokerNotAvailable("gone"), scene.now)
    scene.fetcher.placed(second, {A1: 3})
    assert (scene.fetcher.position(A0), scene.fetcher.position(A1)) == (None, 3)


def test_a_lookup_without_a_leader() -> None:
    """A partition without a leader does not block the lookups of others."""
    scene = Scene("earliest")
    scene.leaders[A0] = None
    scene.fetcher.assign([A0, A1])
    requests = scene.next_requests()
    assert ([list(one.wanted) for one in requests.lookups], requests.stale_metadata) == ([[A1]], True)


FAULTS = st.sampled_from(["ok", "ok", "ok", "empty", "not leader", "lost", "moved", "seek", "take", "pause", "resume"])


@given(steps=st.lists(st.tuples(FAULTS, st.sampled_from([A0, A1, B0]), st.integers(1, 30)), max_size=60))
def test_whatever_happens_records_come_once_and_in_order(steps: list[tuple[str, TopicPartition, int]]) -> None:
    """Under failures, leader changes, pauses, seeks and reordered responses, each partition returns consecutive
    offsets."""
    scene = Scene(fetch_buffer_bytes=3 * SIZE).at(a0=0, a1=0, b0=0)
    expected = dict.fromkeys([A0, A1, B0], 0)
    open_fetches: list[Fetch] = []
    settings = scene.fetcher.settings

    def take(limit: int | None) -> None:
        for tp, offsets in scene.take(limit).items():
            assert offsets == list(range(expected[tp], expected[tp] + len(offsets)))
            assert tp not in scene.fetcher.paused
            expected[tp] += len(offsets)
            assert scene.fetcher.position(tp) == expected[tp]

    for what, tp, n in steps:
        open_fetches += scene.next_requests().fetches
        assert len({fetch.node for fetch in open_fetches}) == len(open_fetches)
        assert scene.fetcher.buffered_bytes + sum(f.max_bytes for f in open_fetches) <= settings.fetch_buffer_bytes
        if what == "seek":
            scene.fetcher.seek(tp, n)
            expected[tp] = n
        elif what == "moved":
            scene.leaders[tp] = 3 - (scene.leaders[tp] or 1)
        elif what == "take":
            take(n)
        elif what in ("pause", "resume"):
            getattr(scene.fetcher, what)(tp)
        elif open_fetches:
            fetch = open_fetches.pop(n % len(open_fetches))
            if what == "lost":
                scene.fetcher.failed(fetch, BrokerNotAvailable("lost"), scene.now)
            elif what == "ok":
                scene.respond(fetch, **{f"{tp.topic}{tp.partition}": batch(at, n) for tp, at in fetch.wanted.items()})
            else:
                scene.respond(fetch, **{f"{tp.topic}{tp.partition}": NOT_LEADER if what != "empty" else b""})
        scene.now += 50
    for tp in expected:
        scene.fetcher.resume(tp)
    before = dict(expected)
    for _ in range(40):
        scene.now += 1_000
        open_fetches += scene.next_requests().fetches
        for fetch in open_fetches:
            scene.respond(fetch, **{f"{tp.topic}{tp.partition}": batch(at, 2) for tp, at in fetch.wanted.items()})
        open_fetches = []
        take(None)
    assert all(expected[tp] > before[tp] for tp in expected)


def test_its_repr_has_positions_and_buffers() -> None:
    """The repr has each partition's position and buffer."""
    scene = Scene("earliest").at(a0=5)
    assert "at 5, 0 completed fetches, 0 bytes to 5" in repr(scene.fetcher)
    scene.fetcher.seek(A0, 0)
    assert "at 0, " in repr(scene.fetcher)
    scene.fetcher.assign([A0])
    assert "to be placed by commit, " in repr(scene.fetcher)
    scene.fetcher.seek(A0, ResetPolicy("latest"))
    assert "to be placed by ResetPolicy(name='latest'" in repr(scene.fetcher)
    assert isinstance(scene.next_requests().lookups[0], OffsetLookup)


def test_a_fetch_has_the_last_fetched_epoch() -> None:
    """A fetch has the leader epoch of the last batch. After a seek it has none."""
    scene = Scene().at(a0=0)
    assert scene.fetches()[1].epochs == {A0: -1}
    scene = Scene().at(a0=0)
    scene.respond_to_all(a0=batch(0, 3, epoch=4) + batch(3, 2, epoch=6))
    assert scene.fetches()[1].epochs == {A0: 6}
    scene = Scene().at(a0=0)
    scene.respond_to_all(a0=batch(0, 3, epoch=4))
    scene.fetcher.seek(A0, 2)
    assert scene.fetches()[1].epochs == {A0: -1}


def diverged(at: int) -> FetchedPartition:
    return FetchedPartition(0, 100, 90, diverged_at=at)


def test_a_truncation_ahead_of_the_position() -> None:
    """Buffered records beyond the truncation are dropped and fetched again from the current log."""
    scene = Scene("none").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    assert scene.take(3) == {A0: [0, 1, 2]}
    scene.respond_to_all(a0=diverged(5))
    assert scene.fetches()[1].wanted == {A0: 3}
    assert scene.fetcher.position(A0) == 3
    assert (scene.fetcher.has_data, scene.take()) == (False, {})


def test_a_truncation_at_the_position() -> None:
    """If the logs differ from the position on, no record that was handed out is gone."""
    scene = Scene("none").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take(3)
    scene.respond_to_all(a0=diverged(3))
    assert scene.take() == {}
    assert scene.fetches()[1].wanted == {A0: 3}


def test_buffered_records_after_a_truncation_are_not_returned() -> None:
    """If records that were handed out are gone, those after them are dropped, with and without a reset policy."""
    scene = Scene("earliest").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take(3)
    scene.respond_to_all(a0=diverged(1))
    assert (scene.fetcher.has_data, scene.take(), scene.fetches()[1].wanted) == (False, {}, {A0: 1})
    scene = Scene("none").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take(3)
    scene.respond_to_all(a0=diverged(1))
    with pytest.raises(LogTruncation, match=r"a-0.*offset 3.*offset 1"):
        scene.take()
    assert (scene.fetcher.buffered_bytes, scene.take()) == (0, {})


def test_a_truncation_below_the_position() -> None:
    """With a reset policy, reading continues at the truncation offset. Without one an error is raised until a seek."""
    scene = Scene("earliest").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take()
    scene.respond_to_all(a0=diverged(7))
    assert scene.fetches()[1].wanted == {A0: 7}
    (move,) = scene.fetcher.moves().values()
    assert (move.position, move.replaced, move.epoch) == (7, 10, -1)
    assert not move.drifts  # the offset is the broker's, and a lookup finds no other
    scene = Scene("earliest").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take()
    scene.respond_to_all(a0=FetchedPartition(0, 10, 10, diverged_at=7))  # not shorter than what was read
    assert scene.fetches()[1].wanted == {A0: 7}
    scene = Scene("earliest").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take()
    scene.respond_to_all(a0=FetchedPartition(0, 9, 9, diverged_at=7))  # shorter than what was read: perhaps another log
    assert [lookup.wanted for lookup in scene.next_requests().lookups] == [{A0: ResetPolicy("earliest")}]
    scene = Scene("none").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take()
    for _ in range(2):
        scene.respond_to_all(a0=diverged(7))
        with pytest.raises(LogTruncation, match=r"a-0.*offset 10.*offset 7"):
            scene.take()
    scene.fetcher.seek(A0, 7)
    assert scene.fetches()[1].epochs == {A0: -1}


def test_latest_skips_no_record_after_a_truncation() -> None:
    """With `latest`, reading continues at the truncation offset, also if the log ends before the position."""
    scene = Scene("latest").at(a0=0)
    scene.respond_to_all(a0=batch(0, 10, epoch=4))
    scene.take()
    scene.respond_to_all(a0=FetchedPartition(0, 9, 9, diverged_at=7))
    assert scene.fetches()[1].wanted == {A0: 7}


def test_a_commit_with_its_leader_epoch() -> None:
    """The first fetch has the committed leader epoch to detect truncation. Dropping the buffer keeps the epoch."""
    scene = Scene("none", has_group=True)
    scene.fetcher.assign([A0])
    (lookup,) = scene.next_requests().lookups
    scene.fetcher.committed(lookup, {A0: OffsetAndMetadata(5, "", 3)})
    (fetch,) = scene.next_requests().fetches
    assert (fetch.wanted, fetch.epochs) == ({A0: 5}, {A0: 3})
    scene.fetcher.received(fetch, FetchResponse({A0: diverged(4)}), 0)
    with pytest.raises(LogTruncation, match=r"a-0.*offset 5.*offset 4"):
        scene.take()
    assert scene.next_requests().fetches[0].epochs == {A0: 3}


def test_columns_have_a_leader_epoch() -> None:
    """Columns have the leader epoch of the last decoded batch, which is that of their records or a later one."""
    scene = Scene().at(a0=0)
    scene.respond_to_all(a0=batch(0, 3, epoch=4) + batch(3, 2, epoch=6))
    (columns,) = scene.fetcher.take(2).values()
    assert (len(columns), columns.leader_epoch) == (2, 6)
