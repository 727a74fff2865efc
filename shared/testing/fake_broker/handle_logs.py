"""Produce, Fetch, ListOffsets and DeleteRecords: the responses of a partition's leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.broker_batches import BrokerBatch, InvalidBatch, parse, records
from penstock.shared.testing.fake_broker.cluster_state import ClusterState
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.handler_responses import CloseConnection, DelayedResponse, Response
from penstock.shared.testing.fake_broker.partition_log import TimedOffset
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from penstock.shared.testing.fake_broker.request import Request
from penstock.shared.testing.fake_broker.topics import BrokerTopic, Partition

ACKS_NONE = 0
ACKS_ALL = -1
EARLIEST = -2
LATEST = -1
MAX_TIMESTAMP = -3
READ_COMMITTED = 1
DELETE_TO_END = -1
ABORTABLE_REPORTED_SINCE = 11
"""From this version on, a Produce response has the error that a transaction can only be aborted."""
CURRENT_LEADER_SINCE = 10
"""From this version on, the Produce response of a node that is not the leader names the leader (KIP-951)."""


def respond_for_partitions(request: Request, response: Callable[[TopicPartition, Any], Message]) -> list[Message]:
    """The topics of a response, with one response for each partition of the request."""
    return [
        Message(
            name=topic.name, partitions=[response(TopicPartition(topic.name, p.partition), p) for p in topic.partitions]
        )
        for topic in request.body.topics
    ]


def _current_leader(state: ClusterState, request: Request, tp: TopicPartition) -> Message | None:
    partition = state.partition(tp)
    if partition is None or request.version < CURRENT_LEADER_SINCE:
        return None
    return Message(leader_id=partition.leader, leader_epoch=partition.leader_epoch)


def _node_endpoints(state: ClusterState, topics: list[Message]) -> list[Message]:
    named = {p.current_leader.leader_id for t in topics for p in t.partitions if getattr(p, "current_leader", None)}
    nodes = [state.nodes[node] for node in sorted(named) if node in state.nodes]
    return [Message(node_id=node.node_id, host=node.host, port=node.port, rack=None) for node in nodes]


def produce(state: ClusterState, request: Request) -> Response:
    """Handle Produce: append the batch of each partition, and return base offsets and errors.

    With acks=0 there is no response; an error closes the connection.
    """
    acks = request.body.acks

    def append_batch(tp: TopicPartition, row: Message) -> Message:
        if acks not in (ACKS_ALL, ACKS_NONE, 1):
            return Message(partition=tp.partition, error_code=ErrorCode.INVALID_REQUIRED_ACKS)
        partition = state.led(request.node, tp)
        if isinstance(partition, ErrorCode):
            leader = _current_leader(state, request, tp)
            return Message(partition=tp.partition, error_code=partition, current_leader=leader)
        return _append_to_log(state, partition, row.records, request)

    topics = respond_for_partitions(request, append_batch)
    if acks == ACKS_NONE:
        failed = any(partition.error_code for topic in topics for partition in topic.partitions)
        return CloseConnection() if failed else None
    return Message(topics=topics, node_endpoints=_node_endpoints(state, topics))


def _append_to_log(state: ClusterState, partition: Partition, data: bytes | None, request: Request) -> Message:
    tp = partition.topic_partition
    now_ms = request.now_ms
    topic = state.topics[tp.topic]
    try:
        batch = parse(data)
        _check_batch(partition, topic, batch, request)
        if batch.is_transactional:
            _check_transaction(state, partition, batch, request)
    except InvalidBatch as e:
        errors = [Message(batch_index=index, batch_index_error_message=why) for index, why in e.records.items()]
        return Message(partition=tp.partition, error_code=e.code, error_message=str(e), record_errors=errors)
    stamp_ms = now_ms if topic.config("message.timestamp.type") == "LogAppendTime" else -1
    appended = partition.log.append(batch, partition.leader_epoch, stamp_ms)
    if isinstance(appended, ErrorCode):
        return Message(partition=tp.partition, error_code=appended)
    if (retention_bytes := int(topic.config("retention.bytes"))) >= 0:
        partition.log.retain(retention_bytes)
    partition.wake_fetches()
    return Message(
        partition=tp.partition,
        error_code=ErrorCode.NONE,
        base_offset=appended.base_offset,
        log_append_time_ms=appended.append_time_ms,
        log_start_offset=partition.log.start_offset,
    )


def _check_batch(partition: Partition, topic: BrokerTopic, batch: BrokerBatch, request: Request) -> None:
    """Raise InvalidBatch if the topic of a Produce request does not accept the batch."""
    acks = request.body.acks
    now_ms = request.now_ms
    # Since Kafka 4, min.insync.replicas never exceeds the number of replicas.
    if acks == ACKS_ALL and len(partition.isr) < min(int(topic.config("min.insync.replicas")), len(partition.replicas)):
        raise InvalidBatch(ErrorCode.NOT_ENOUGH_REPLICAS, f"in sync are {partition.isr} alone")
    limit = int(topic.config("max.message.bytes"))
    if len(batch.data) > limit:
        raise InvalidBatch(ErrorCode.MESSAGE_TOO_LARGE, f"the batch has {len(batch.data)} bytes, {limit} at most")
    tp = partition.topic_partition
    if "compact" in topic.config("cleanup.policy"):
        error = f"Compacted topic cannot accept message without key in topic partition {tp}"
        errors = {index: error for index, record in enumerate(records(batch, *tp)) if record.key is None}
        if errors:
            raise InvalidBatch(ErrorCode.INVALID_RECORD, "records of a compacted topic have no key", errors)
    if topic.config("message.timestamp.type") == "CreateTime":
        earliest_ms = now_ms - int(topic.config("message.timestamp.before.max.ms"))
        latest_ms = now_ms + int(topic.config("message.timestamp.after.max.ms"))
        # The header has the highest timestamp. Without a lower limit a valid batch need not be decoded.
        if batch.max_timestamp > latest_ms or earliest_ms > 0:
            errors = {
                index: f"timestamp {record.timestamp} is out of range"
                for index, record in enumerate(records(batch, *tp))
                if not earliest_ms <= record.timestamp <= latest_ms
            }
            if errors:
                raise InvalidBatch(ErrorCode.INVALID_TIMESTAMP, "records have invalid timestamps", errors)


def _check_transaction(state: ClusterState, partition: Partition, batch: BrokerBatch, request: Request) -> None:
    """Raise InvalidBatch if a transactional batch of a Produce request is in no open transaction of its producer."""
    if request.body.transactional_id is None:
        raise InvalidBatch(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "no transactional id")
    if partition.log.in_transaction(batch.producer_id):
        return
    verdict = state.transactions.verify(batch.producer_id, batch.producer_epoch, partition.topic_partition)
    if verdict is ErrorCode.INVALID_TXN_STATE and request.version >= ABORTABLE_REPORTED_SINCE:
        verdict = ErrorCode.TRANSACTION_ABORTABLE
    if verdict is not ErrorCode.NONE:
        raise InvalidBatch(verdict, "the partition is not in the producer's transaction")


def fetch(state: ClusterState, request: Request) -> Response:
    """Handle Fetch: return the available records.

    The response waits for `min_bytes`, an error of a partition, or `max_wait_ms`, whichever comes first.
    """
    body = request.body
    if body.max_wait_ms <= 0 or _has_min_bytes(state, request):
        return _fetch_response(state, request)
    later = DelayedResponse()
    watched = [p for p in (state.partition(tp) for tp in request.partitions()) if p is not None]

    def finish_fetch(_: int) -> None:
        for partition in watched:
            partition.unwatch(finish_fetch_if_enough)
        timer.cancel()
        later.complete(_fetch_response(state, request))

    def finish_fetch_if_enough() -> None:
        if _has_min_bytes(state, request):
            finish_fetch(0)

    timer = state.timers.at(request.now_ms + body.max_wait_ms, finish_fetch)
    for partition in watched:
        partition.watch(finish_fetch_if_enough)
    return later


def _has_min_bytes(state: ClusterState, request: Request) -> bool:
    wanted: int = max(request.body.min_bytes, 0)
    committed = request.body.isolation_level == READ_COMMITTED
    found = 0
    for topic, row in request.rows():
        partition = state.led(request.node, TopicPartition(topic.name, row.partition), row.current_leader_epoch)
        if isinstance(partition, ErrorCode) or not row.fetch_offset <= partition.log.end_offset:
            return True
        if row.fetch_offset < partition.log.start_offset:
            return True
        if _diverging_epoch_response(partition, row) is not None:
            return True
        found += partition.log.bytes_from(row.fetch_offset, wanted - found, committed=committed)
        if found >= wanted:
            return True
    return wanted == 0


def _fetch_response(state: ClusterState, request: Request) -> Message:
    left = request.body.max_bytes
    committed = request.body.isolation_level == READ_COMMITTED
    any_taken = False

    def fetch_partition(tp: TopicPartition, row: Message) -> Message:
        nonlocal left, any_taken
        partition = state.led(request.node, tp, row.current_leader_epoch)
        if isinstance(partition, ErrorCode):
            return Message(partition=tp.partition, error_code=partition)
        log = partition.log
        if (gone := _diverging_epoch_response(partition, row)) is not None:
            return gone
        limit = max(min(row.partition_max_bytes, left), 0)
        found = log.fetch(row.fetch_offset, limit, committed=committed, at_least_one=not any_taken)
        left -= len(found.data)
        any_taken = any_taken or bool(found.data)
        if found.code is not ErrorCode.NONE:
            return Message(partition=tp.partition, error_code=found.code)
        aborted = [Message(producer_id=one.producer_id, first_offset=one.first_offset) for one in found.aborted]
        return Message(
            partition=tp.partition,
            error_code=ErrorCode.NONE,
            high_watermark=log.high_watermark,
            last_stable_offset=log.last_stable_offset,
            log_start_offset=log.start_offset,
            aborted_transactions=aborted if committed else None,
            records=found.data,
        )

    return Message(topics=respond_for_partitions(request, fetch_partition))


def _diverging_epoch_response(partition: Partition, row: Message) -> Message | None:
    """The partition's part of a Fetch response to a client that has read records which this log lacks, or None."""
    if row.last_fetched_epoch < 0:
        return None
    log = partition.log
    index = partition.topic_partition.partition
    end = log.end_of_epoch(row.last_fetched_epoch, partition.leader_epoch)
    if end is None:
        return Message(partition=index, error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
    if end.epoch >= row.last_fetched_epoch and end.end_offset >= row.fetch_offset:
        return None
    return Message(
        partition=index,
        error_code=ErrorCode.NONE,
        high_watermark=log.high_watermark,
        last_stable_offset=log.last_stable_offset,
        log_start_offset=log.start_offset,
        diverging_epoch=Message(epoch=end.epoch, end_offset=end.end_offset),
    )


def list_offsets(state: ClusterState, request: Request) -> Response:
    """Handle ListOffsets: return an offset of each partition.

    It is the start offset, the end offset under the isolation level, the first offset at or after a timestamp, or the
    first offset with the highest timestamp.
    """
    committed = request.body.isolation_level == READ_COMMITTED

    def find_offset(tp: TopicPartition, row: Message) -> Message:
        partition = state.led(request.node, tp, row.current_leader_epoch)
        if isinstance(partition, ErrorCode):
            return Message(partition=tp.partition, error_code=partition)
        log = partition.log
        if row.timestamp == EARLIEST:
            found = TimedOffset(log.start_offset, -1)
        elif row.timestamp == LATEST:
            found = TimedOffset(log.last_stable_offset if committed else log.high_watermark, -1)
        elif row.timestamp == MAX_TIMESTAMP:
            found = log.latest_in_time(committed=committed)
        else:
            found = log.offset_for_time(row.timestamp, committed=committed)
        epoch = partition.leader_epoch if found.offset >= 0 else -1
        return Message(
            partition=tp.partition, error_code=0, timestamp=found.timestamp, offset=found.offset, leader_epoch=epoch
        )

    return Message(topics=respond_for_partitions(request, find_offset))


def delete_records(state: ClusterState, request: Request) -> Response:
    """Handle DeleteRecords: move the start offsets of logs forward; -1 stands for the high watermark."""

    def delete_records_of_partition(tp: TopicPartition, row: Message) -> Message:
        partition = state.led(request.node, tp)
        if isinstance(partition, ErrorCode):
            return Message(partition=tp.partition, error_code=partition)
        log = partition.log
        if "delete" not in state.topics[tp.topic].config("cleanup.policy"):
            return Message(partition=tp.partition, error_code=ErrorCode.POLICY_VIOLATION)
        if not DELETE_TO_END <= row.offset <= log.high_watermark:
            return Message(partition=tp.partition, error_code=ErrorCode.OFFSET_OUT_OF_RANGE)
        log.delete_records(log.high_watermark if row.offset == DELETE_TO_END else row.offset)
        return Message(partition=tp.partition, error_code=ErrorCode.NONE, low_watermark=log.start_offset)

    return Message(topics=respond_for_partitions(request, delete_records_of_partition))
