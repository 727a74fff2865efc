"""InitProducerId and the transaction APIs: the responses of a transaction's coordinator."""

from __future__ import annotations

from collections.abc import Callable

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.cluster_state import ClusterState
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.group_coordinator import Committed
from penstock.shared.testing.fake_broker.handle_groups import commit_one
from penstock.shared.testing.fake_broker.handle_logs import respond_for_partitions
from penstock.shared.testing.fake_broker.handler_responses import Response
from penstock.shared.testing.fake_broker.protocol import Api, ErrorCode
from penstock.shared.testing.fake_broker.request import Request
from penstock.shared.testing.fake_broker.transaction_coordinator import BrokerTransaction

FENCED_REPORTED_SINCE = {
    Api.INIT_PRODUCER_ID: 4,
    Api.ADD_PARTITIONS_TO_TXN: 2,
    Api.ADD_OFFSETS_TO_TXN: 2,
    Api.END_TXN: 2,
}
"""By API: from this version on, a fenced producer receives PRODUCER_FENCED, before that INVALID_PRODUCER_EPOCH."""


def _error_code_of_version(request: Request, code: ErrorCode) -> ErrorCode:
    if code is ErrorCode.PRODUCER_FENCED and request.version < FENCED_REPORTED_SINCE[request.api]:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code


def init_producer_id(state: ClusterState, request: Request) -> Response:
    """Handle InitProducerId: return a new producer id, or the next epoch of a transactional id."""
    body = request.body
    if body.transactional_id is None:
        return Message(error_code=ErrorCode.NONE, producer_id=state.transactions.new_producer_id(), producer_epoch=0)
    code = ErrorCode.INVALID_REQUEST
    if body.transactional_id:
        code = state.coordinator_error(request.node, body.transactional_id)
    if code is ErrorCode.NONE:
        expected = (body.producer_id, body.producer_epoch)
        given = state.transactions.init(body.transactional_id, body.transaction_timeout_ms, expected, request.now_ms)
        if isinstance(given, tuple):
            return Message(error_code=ErrorCode.NONE, producer_id=given[0], producer_epoch=given[1])
        code = _error_code_of_version(request, given)
    return Message(error_code=code, producer_id=-1, producer_epoch=-1)


def _transaction_of_request(state: ClusterState, request: Request) -> BrokerTransaction | ErrorCode:
    body = request.body
    code = state.coordinator_error(request.node, body.transactional_id)
    if code is not ErrorCode.NONE:
        return code
    known = state.transactions.check(body.transactional_id, body.producer_id, body.producer_epoch)
    return _error_code_of_version(request, known) if isinstance(known, ErrorCode) else known


def add_partitions_to_txn(state: ClusterState, request: Request) -> Response:
    """Handle AddPartitionsToTxn: add all partitions of the request to the transaction, or none of them."""
    known = _transaction_of_request(state, request)
    requested = request.partitions()
    unknown = {tp for tp in requested if state.partition(tp) is None}

    def error_code_of_partition(tp: TopicPartition) -> int:
        if isinstance(known, ErrorCode):
            return known
        if unknown:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if tp in unknown else ErrorCode.OPERATION_NOT_ATTEMPTED
        return ErrorCode.NONE

    if isinstance(known, BrokerTransaction) and not unknown:
        code = state.transactions.add(known, request.now_ms, partitions=set(requested), groups=set())
        known = known if code is ErrorCode.NONE else code
    return Message(topics=_error_codes_by_partition(request, error_code_of_partition))


def _error_codes_by_partition(request: Request, code_of: Callable[[TopicPartition], int]) -> list[Message]:
    return [
        Message(
            name=topic.name,
            partitions=[
                Message(partition=number, error_code=code_of(TopicPartition(topic.name, number)))
                for number in topic.partitions
            ],
        )
        for topic in request.body.topics
    ]


def add_offsets_to_txn(state: ClusterState, request: Request) -> Response:
    """Handle AddOffsetsToTxn: add a group's offsets to the transaction."""
    known = _transaction_of_request(state, request)
    if isinstance(known, ErrorCode):
        return Message(error_code=known)
    code = state.transactions.add(known, request.now_ms, partitions=set(), groups={request.body.group_id})
    return Message(error_code=code)


def end_txn(state: ClusterState, request: Request) -> Response:
    """Handle EndTxn: commit or abort the transaction."""
    known = _transaction_of_request(state, request)
    if isinstance(known, ErrorCode):
        return Message(error_code=known)
    return Message(error_code=state.transactions.end(known, request.now_ms, committed=request.body.committed))


def txn_offset_commit(state: ClusterState, request: Request) -> Response:
    """Handle TxnOffsetCommit: commit offsets with the transaction. A member of an older generation gets an error."""
    body = request.body
    code = state.coordinator_error(request.node, body.group_id)
    known = state.transactions.check(body.transactional_id, body.producer_id, body.producer_epoch)
    if code is ErrorCode.NONE and isinstance(known, ErrorCode):
        code = ErrorCode.INVALID_PRODUCER_EPOCH if known is ErrorCode.PRODUCER_FENCED else known
    if code is ErrorCode.NONE and isinstance(known, BrokerTransaction) and body.group_id not in known.groups:
        code = ErrorCode.INVALID_TXN_STATE
    if code is ErrorCode.NONE:
        group = state.groups.known.get(body.group_id)
        if group is not None:
            code = group.commit_error(body, request.now_ms, transactional=True)
        elif body.generation_id >= 0:
            code = ErrorCode.ILLEGAL_GENERATION
        else:
            state.groups.get(body.group_id)
    into: dict[TopicPartition, Committed] = {}
    topics = respond_for_partitions(request, lambda tp, row: commit_one(state, code, into, tp, row))
    if into:
        state.groups.offsets[body.group_id].pending.setdefault(body.producer_id, {}).update(into)
    return Message(topics=topics)
