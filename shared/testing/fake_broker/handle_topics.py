"""Metadata, and the admin client's requests about topics and their configs."""

from __future__ import annotations

from collections.abc import Callable

from penstock.shared.common.topic_names import is_topic_name
from penstock.shared.testing.fake_broker.cluster_state import ClusterState
from penstock.shared.testing.fake_broker.codec import NO_UUID, Message
from penstock.shared.testing.fake_broker.configs import TOPIC_CONFIGS, wrong_topic_config
from penstock.shared.testing.fake_broker.handler_responses import Response
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from penstock.shared.testing.fake_broker.request import Request
from penstock.shared.testing.fake_broker.topics import NO_LEADER, BrokerTopic, Partition

TOPIC_RESOURCE = 2
SET = 0
DELETE = 1
SOURCE_TOPIC = 1
SOURCE_DEFAULT = 5
ALL_TOPICS_WHEN_EMPTY_BEFORE = 1
ALLOW_AUTO_CREATE_SINCE = 4


def metadata(state: ClusterState, request: Request) -> Response:
    """Handle Metadata: return the running nodes, and the requested topics; all topics for null, or [] in version 0."""
    requested = request.body.topics
    if requested is None or (not requested and request.version < ALL_TOPICS_WHEN_EMPTY_BEFORE):
        topics = [_describe_topic(state, topic) for topic in state.topics.values()]
    else:
        may_create = request.version < ALLOW_AUTO_CREATE_SINCE or request.body.allow_auto_topic_creation
        topics = [_topic_metadata(state, row, may_create=may_create) for row in requested]
    return Message(
        brokers=[
            Message(node_id=node.node_id, host=node.host, port=node.port, rack=None)
            for node in state.nodes.values()
            if node.is_alive
        ],
        cluster_id=state.cluster_id,
        controller_id=state.controller,
        topics=topics,
    )


def _topic_metadata(state: ClusterState, row: Message, *, may_create: bool) -> Message:
    name = row.name
    if name is None:
        name = next((topic.name for topic in state.topics.values() if topic.topic_id == row.topic_id), None)
        if name is None:
            return Message(error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=None, topic_id=row.topic_id)
    if name in state.topics:
        return _describe_topic(state, state.topics[name])
    if not is_topic_name(name):
        return Message(error_code=ErrorCode.INVALID_TOPIC_EXCEPTION, name=name, topic_id=NO_UUID)
    if may_create and state.configs["auto.create.topics.enable"] == "true":
        factor = min(int(state.configs["default.replication.factor"]), len(state.nodes))
        return _describe_topic(state, state.create_topic(name, int(state.configs["num.partitions"]), factor, {}))
    return Message(error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name=name, topic_id=NO_UUID)


def _describe_topic(state: ClusterState, topic: BrokerTopic) -> Message:
    return Message(
        error_code=ErrorCode.NONE,
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=[_partition_metadata(state, one) for one in topic.partitions],
    )


def _partition_metadata(state: ClusterState, one: Partition) -> Message:
    return Message(
        error_code=ErrorCode.LEADER_NOT_AVAILABLE if one.leader == NO_LEADER else ErrorCode.NONE,
        partition=one.topic_partition.partition,
        leader_id=one.leader,
        leader_epoch=one.leader_epoch,
        replica_nodes=one.replicas,
        isr_nodes=one.isr,
        offline_replicas=[node for node in one.replicas if node not in state.alive],
    )


ErrorAndMessage = tuple[ErrorCode, str]
"""The error of one row of a request, and its message: NONE and "" if there is none."""


def create_topics(state: ClusterState, request: Request) -> Response:
    """Handle CreateTopics: create each valid topic."""
    return Message(
        topics=[_create_topic(state, row, validate_only=request.body.validate_only) for row in request.body.topics]
    )


def _create_topic(state: ClusterState, row: Message, *, validate_only: bool) -> Message:
    error = _error_of_new_topic(state, row)
    if error is not None:
        code, message = error
        return Message(name=row.name, error_code=code, error_message=message, topic_id=NO_UUID, configs=None)
    configs = {one.name: one.value for one in row.configs}
    assignments = {one.partition: one.broker_ids for one in row.assignments}
    count = row.num_partitions if row.num_partitions > 0 else int(state.configs["num.partitions"])
    factor = row.replication_factor if row.replication_factor > 0 else int(state.configs["default.replication.factor"])
    topic_id = NO_UUID
    if not validate_only:
        topic_id = state.create_topic(row.name, count, min(factor, len(state.nodes)), configs, assignments).topic_id
    return Message(
        name=row.name,
        error_code=ErrorCode.NONE,
        topic_id=topic_id,
        num_partitions=len(assignments) or count,
        replication_factor=len(assignments[0]) if assignments else factor,
        configs=[],
    )


def _error_of_new_topic(state: ClusterState, row: Message) -> ErrorAndMessage | None:
    if not is_topic_name(row.name):
        return ErrorCode.INVALID_TOPIC_EXCEPTION, f"Topic name is invalid: {row.name!r}"
    if row.name in state.topics:
        return ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic '{row.name}' already exists."
    if row.assignments:
        if sorted(one.partition for one in row.assignments) != list(range(len(row.assignments))):
            return ErrorCode.INVALID_REPLICA_ASSIGNMENT, "partitions should be a consecutive 0-based integer sequence"
        for one in row.assignments:
            nodes = state.nodes.keys() & set(one.broker_ids)
            if not nodes or len(nodes) != len(one.broker_ids):
                return ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{one.broker_ids} are not different registered brokers"
        if len({len(one.broker_ids) for one in row.assignments}) > 1:
            return ErrorCode.INVALID_REPLICA_ASSIGNMENT, "all partitions must have the same number of replicas"
    else:
        if row.num_partitions == 0 or row.num_partitions < -1:
            return ErrorCode.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value."
        if row.replication_factor == 0 or row.replication_factor < -1:
            return ErrorCode.INVALID_REPLICATION_FACTOR, "Replication factor must be larger than 0."
        if row.replication_factor > len(state.nodes):
            return (
                ErrorCode.INVALID_REPLICATION_FACTOR,
                f"Unable to replicate the partition {row.replication_factor} time(s): The target replication factor of "
                f"{row.replication_factor} cannot be reached because only {len(state.nodes)} broker(s) are registered.",
            )
    for config in row.configs:
        if (why := wrong_topic_config(config.name, config.value)) is not None:
            return ErrorCode.INVALID_CONFIG, why
    return None


def delete_topics(state: ClusterState, request: Request) -> Response:
    """Handle DeleteTopics: delete each existing topic."""

    def delete_topic(name: str) -> ErrorCode:
        if name not in state.topics:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        state.delete_topic(name)
        return ErrorCode.NONE

    return Message(topics=[Message(name=name, error_code=delete_topic(name)) for name in request.body.topic_names])


def create_partitions(state: ClusterState, request: Request) -> Response:
    """Handle CreatePartitions: add partitions to topics."""

    def create_partitions_of_topic(row: Message) -> ErrorAndMessage:
        topic = state.topics.get(row.name)
        if topic is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "This server does not host this topic-partition."
        if row.count <= len(topic.partitions):
            message = f"Topic currently has {len(topic.partitions)} partitions, which is not less than {row.count}."
            return ErrorCode.INVALID_PARTITIONS, message
        if not request.body.validate_only:
            factor = len(topic.partitions[0].replicas)
            topic.add_partitions(row.count, sorted(state.nodes), state.alive, factor)
        return ErrorCode.NONE, ""

    return Message(topics=_results_of_topics(request, create_partitions_of_topic))


def _results_of_topics(request: Request, act: Callable[[Message], ErrorAndMessage]) -> list[Message]:
    found = [(row.name, *act(row)) for row in request.body.topics]
    return [Message(name=name, error_code=code, error_message=why or None) for name, code, why in found]


def describe_configs(state: ClusterState, request: Request) -> Response:
    """Handle DescribeConfigs: return the configs of topics with the values in force.

    If a request names no configs, the response has all configs of the topic. For a broker it has none.
    """
    with_synonyms = request.body.include_synonyms
    return Message(resources=[_describe_configs(state, row, synonyms=with_synonyms) for row in request.body.resources])


def _describe_configs(state: ClusterState, row: Message, *, synonyms: bool) -> Message:
    """Return a resource's configs. Their synonyms lack the broker's configs, which Kafka adds under other names."""
    found = Message(
        error_code=ErrorCode.NONE, resource_type=row.resource_type, resource_name=row.resource_name, configs=[]
    )
    if row.resource_type != TOPIC_RESOURCE:
        return found
    topic = state.topics.get(row.resource_name)
    if topic is None:
        found.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        found.error_message = "there is no such topic"
        return found
    found.configs = [
        Message(
            name=name,
            value=topic.config(name),
            config_source=SOURCE_TOPIC if name in topic.configs else SOURCE_DEFAULT,
            is_sensitive=False,
            synonyms=[Message(name=name, value=topic.config(name), source=SOURCE_TOPIC)]
            if synonyms and name in topic.configs
            else [],
        )
        for name in TOPIC_CONFIGS
        if not row.configuration_keys or name in row.configuration_keys
    ]
    return found


def incremental_alter_configs(state: ClusterState, request: Request) -> Response:
    """Handle IncrementalAlterConfigs: set and unset configs of topics."""

    def alter_topic_configs(row: Message) -> ErrorAndMessage:
        topic = state.topics.get(row.resource_name)
        if row.resource_type != TOPIC_RESOURCE:
            return ErrorCode.INVALID_REQUEST, "configs of topics alone can be changed"
        if topic is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic"
        for config in row.configs:
            if config.config_operation not in (SET, DELETE):
                return ErrorCode.INVALID_REQUEST, "configs can be set and deleted"
            why = wrong_topic_config(config.name, config.value) if config.config_operation == SET else None
            if why is not None:
                return ErrorCode.INVALID_CONFIG, why
        for config in row.configs if not request.body.validate_only else ():
            if config.config_operation == SET:
                topic.configs[config.name] = config.value
            else:
                topic.configs.pop(config.name, None)
        return ErrorCode.NONE, ""

    found = [(row, *alter_topic_configs(row)) for row in request.body.resources]
    return Message(
        resources=[
            Message(
                error_code=code,
                error_message=why or None,
                resource_type=row.resource_type,
                resource_name=row.resource_name,
            )
            for row, code, why in found
        ]
    )
