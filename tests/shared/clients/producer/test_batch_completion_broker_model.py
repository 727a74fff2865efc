"""The producer's core against a small model of a broker, with every fault of the model in any order.

Two nodes share the partitions' logs. A node processes its requests in order. It may reject a batch with or without
having written it, also with NOT_LEADER. It may answer a repeated batch as a success or as a duplicate. It may lose the
connection at any point: requests processed so far are written, but have no response.
"""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.clients.producer.transaction_manager import EPOCH_MAX
from penstock.shared.clients.protocol.record_batches import read_batches
from penstock.shared.common.errors import RecordTooLarge, SendCancelled
from penstock.shared.common.records import RecordMetadata, TopicPartition
from tests.property_tests import examples
from tests.shared.clients.producer.harness import (
    DUPLICATE,
    NOT_LEADER,
    OLD_EPOCH,
    OUT_OF_ORDER,
    TOO_LARGE,
    A,
    B,
    Harness,
    Sent,
)

REMEMBERED = 5
FAILED_BEFORE_WRITING = (NOT_LEADER, 19, 56)
FAILED_AFTER_WRITING = (7, 20, 3, 5, 56, -1, NOT_LEADER)
FATAL = (32, 87)
KINDS = (
    *[("written", 0)] * 4,
    *[("before", code) for code in (TOO_LARGE, *FAILED_BEFORE_WRITING, *FATAL)],
    *[("after", code) for code in FAILED_AFTER_WRITING],
)


class Log:
    """One partition: its records, and the last batches of each producer, newest last."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.producers: dict[int, tuple[int, deque[tuple[int, int, int]]]] = {}

    def write(self, data: bytes) -> tuple[int, int]:
        """Return error code and base offset."""
        (batch,) = read_batches(data)
        values = [record.value for record in batch]
        if batch.producer_id >= 0:
            first, count = batch.base_sequence, len(values)
            known = self.producers.get(batch.producer_id)
            if known is not None:
                epoch, last = known
                if batch.producer_epoch < epoch:
                    return OLD_EPOCH, -1
                if batch.producer_epoch > epoch:
                    if first:
                        return OUT_OF_ORDER, -1
                    known = None
                else:
                    for one, size, offset in last:
                        if (one, size) == (first, count):
                            return 0, offset
                    if first != (last[-1][0] + last[-1][1]) % 2**31:
                        return OUT_OF_ORDER, -1
            if known is None:  # a broker accepts any sequence number of an unknown producer
                known = self.producers[batch.producer_id] = batch.producer_epoch, deque(maxlen=REMEMBERED)
            known[1].append((first, count, len(self.values)))
        self.values += values
        return 0, len(self.values) - len(values)


class World:
    """The harness, two nodes, and the requests in transit."""

    def __init__(self, data: st.DataObject, **options: object) -> None:
        self.data = data
        self.producer = Harness(batch_size=150, delivery_timeout_ms=3_000, retry_backoff_max_ms=400, **options)
        self.logs = {A: Log(), B: Log()}
        self.leaders: dict[TopicPartition, int] = {A: 1, B: 1}
        self.producer.leaders = {**self.leaders}
        self.on_the_way: dict[int, deque[list[tuple[ProducerBatch, bytes]]]] = {1: deque(), 2: deque()}
        self.sent: dict[TopicPartition, list[Sent]] = {A: [], B: []}
        self.ids = 100

    def send(self) -> None:
        tp = self.data.draw(st.sampled_from((A, B)), "partition")
        value = b"%s-%d-" % (b"ab"[tp.partition : tp.partition + 1], len(self.sent[tp]))
        value += b"x" * self.data.draw(st.sampled_from((1, 60)), "size")
        if self.producer.memory.available >= 200:
            self.sent[tp].append(self.producer.send(tp, value))

    def turn(self) -> None:
        producer = self.producer
        if producer.settings.enable_idempotence and not producer.ledger.ready:
            self.ids += 1
            producer.ledger.adopt(self.ids, 0)
        most = producer.settings.max_in_flight_requests_per_connection
        producer.down = {node for node, requests in self.on_the_way.items() if len(requests) >= most}
        producer.turn()
        for node, batches in producer.requests:
            self.on_the_way[node].append([(batch, producer.bytes[batch]) for batch in batches])
        delay_ms = producer.delay_ms()
        assert delay_ms is None or delay_ms > 0, "time alone never makes something due at once, again and again"

    def serve(self, *, faults: bool = True) -> None:
        """A node responds to its oldest request."""
        node = self.data.draw(st.sampled_from((1, 2)), "node") if faults else 1 if self.on_the_way[1] else 2
        if not self.on_the_way[node]:
            return
        for batch, data in self.on_the_way[node].popleft():
            code, offset = self._work_off(node, batch, data, faults=faults)
            self.producer.respond(batch, code, offset)

    def _work_off(self, node: int, batch: ProducerBatch, data: bytes, *, faults: bool) -> tuple[int, int]:
        if self.leaders[batch.tp] != node:
            return NOT_LEADER, -1
        if faults:
            kind, code = self.data.draw(st.sampled_from(KINDS), "kind, code")
            if kind == "after":
                written, _ = self.logs[batch.tp].write(data)
                return written or code, -1
            if kind == "before" and (code != TOO_LARGE or batch.attempts == 1):
                return code, -1
        end = len(self.logs[batch.tp].values)
        code, offset = self.logs[batch.tp].write(data)
        if faults and code == 0 and offset < end and self.data.draw(st.booleans(), "duplicate"):
            return DUPLICATE, offset
        return code, offset

    def lose_connection(self) -> None:
        """Some requests in transit are processed, and none gets a response."""
        node = self.data.draw(st.sampled_from((1, 2)), "node")
        requests = list(self.on_the_way[node])
        self.on_the_way[node].clear()
        worked_off = self.data.draw(st.integers(0, len(requests)), "worked off")
        for request in requests[:worked_off]:
            for batch, data in request:
                if self.leaders[batch.tp] == node:
                    self.logs[batch.tp].write(data)
        for request in requests:
            for batch, _ in request:
                self.producer.lose(batch)

    def pass_time(self) -> None:
        self.producer.now_ms += self.data.draw(st.sampled_from((1, 150, 600, 2_000)), "ms")

    def move_leader(self) -> None:
        tp = self.data.draw(st.sampled_from((A, B)), "moved")
        self.leaders[tp] = 3 - self.leaders[tp]

    def metadata(self) -> None:
        self.producer.leaders = {**self.leaders}

    def cancel(self) -> None:
        sent = [one for of in self.sent.values() for one in of if not one.fates]
        if sent:
            self.data.draw(st.sampled_from(sent), "cancelled").cancel()

    def abort_pending(self) -> None:
        self.producer.completion.fail_all(SendCancelled("aborted"), out=False)

    def finish(self) -> None:
        """Without further faults all batches complete, and new records succeed."""
        self.metadata()
        self._go_on(until_ms=self.producer.now_ms + 3_500)
        assert not self.producer.accumulator.incomplete
        assert repr(self.producer.accumulator) == "<RecordAccumulator 0 batches queued, 0 out>"
        last = [self.producer.send(tp, b"last") for tp in self.sent]
        self._go_on(until_ms=self.producer.now_ms + 1)
        assert all(isinstance(one.fate, RecordMetadata) for one in last), "at once, whatever was before"

    def _go_on(self, *, until_ms: int) -> None:
        while self.producer.now_ms < until_ms:
            self.turn()
            self.turn()  # the first may have found that a new producer id is needed
            while any(self.on_the_way.values()):
                self.serve(faults=False)
                self.turn()
            self.producer.now_ms += 450

    def check(self, *, once: bool) -> None:
        """Checks the delivery guarantees."""
        assert self.producer.all_memory_is_back
        for tp, sent in self.sent.items():
            log = self.logs[tp].values
            assert all(len(one.fates) == 1 for one in sent), "every record ends once"
            acknowledged = [one for one in sent if isinstance(one.fate, RecordMetadata)]
            for one in acknowledged:
                assert log[one.offset] == one.value, "an acknowledged record is where its metadata says"
            if once:
                assert len(set(log)) == len(log), "nothing is doubled"
                offsets_in_log = [log.index(one.value) for one in acknowledged]
                assert offsets_in_log == sorted(offsets_in_log), "acknowledged records are in the order they were sent"
            for one in sent:
                if isinstance(one.fate, RecordTooLarge) or "was not written" in str(one.fate):
                    assert one.value not in log, "what was surely refused is not in the log"
                if isinstance(one.fate, SendCancelled) and "cancelled before" in str(one.fate):
                    assert one.value not in log, "a cancelled record was never sent"


STEPS = {
    "send": 6,
    "turn": 5,
    "serve": 4,
    "pass_time": 2,
    "lose_connection": 1,
    "move_leader": 1,
    "metadata": 1,
    "cancel": 1,
    "abort_pending": 1,
}
steps = st.lists(
    st.sampled_from([name for name, weight in STEPS.items() for _ in range(weight)]), min_size=20, max_size=120
)
model = settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def run(data: st.DataObject, names: list[str], *, once: bool = True, epoch: int = 0, **options: object) -> None:
    world = World(data, **options)
    if world.producer.settings.enable_idempotence:
        world.producer.ledger.adopt(7, epoch)
    for name in names:
        getattr(world, name)()
    world.finish()
    world.check(once=once)


@model
@given(st.data(), steps, st.sampled_from((0, EPOCH_MAX)), st.sampled_from((1, 2, 5)))
def test_idempotence(data: st.DataObject, names: list[str], epoch: int, in_flight: int) -> None:
    """Under any faults, no acknowledged record is missing or duplicated, order is kept, and every record completes
    once."""
    run(data, names, epoch=epoch, max_in_flight_requests_per_connection=in_flight)


@model
@given(st.data(), steps)
def test_few_retries(data: st.DataObject, names: list[str]) -> None:
    """The guarantees hold if batches fail after one retry and leave sequence gaps."""
    run(data, names, retries=1)


@model
@given(st.data(), steps)
def test_compressed(data: st.DataObject, names: list[str]) -> None:
    """The guarantees hold for compressed batches that are encoded again after removal or splitting."""
    run(data, names, compression_type="gzip")


@model
@given(st.data(), steps)
def test_without_idempotence(data: st.DataObject, names: list[str]) -> None:
    """At least once: no acknowledged record is missing and every record completes once. Duplicates are possible."""
    run(data, names, once=False, enable_idempotence=False)
