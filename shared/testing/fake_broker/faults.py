"""Faults on demand: a test defines what the broker does with a request, in place of or before its normal response.

A hook sees a request before the broker does and returns an action. If it returns None, the request goes to the next
hook or to the broker. `times` counts a hook's actions, not its calls. Several hooks are called in the order in which
they were added. No hook sees a request of an API or version that the broker does not support, or, before a login, a
request that needs one.

A Kafka broker processes one request of a connection at a time. So a dropped request (`Drop`) blocks its connection:
later requests on that connection get no response either, until the client closes the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS, Api, ErrorCode
from penstock.shared.testing.fake_broker.request import Request, partition_number


@dataclass(frozen=True)
class Drop:
    """Never answer the request, nor later ones of its connection.

    With `handled` the broker carries out the request, but none of the later ones.
    """

    handled: bool = False


@dataclass(frozen=True)
class Close:
    """Close the connection; with `handled`, after the broker has carried out the request."""

    handled: bool = False


@dataclass(frozen=True)
class Delay:
    """Wait, then do another action, or let the request through."""

    ms: int
    then: Action | None = None


@dataclass(frozen=True)
class Fail:
    """Answer with the error `code`. If `partitions` is given, only these fail, and the broker handles all other
    partitions. On a request that names none of them the hook does not act.

    If `handled`, the broker also carries out the part of the request that fails, like a leader that loses its
    leadership after an append.

    A response to Metadata has no error code of its own. So Metadata is always handled. Then each topic of the response
    gets the error and no partitions. With `partitions`, only these get the error, and no leader.
    """

    code: int
    partitions: Collection[TopicPartition] | None = None
    handled: bool = False


@dataclass(frozen=True)
class Respond:
    """Answer with this body; fields it lacks have their defaults."""

    body: Message


Action = Drop | Close | Delay | Fail | Respond
Hook = Callable[[Request], Action | Awaitable[Action | None] | None]


class Control:
    """A hook, active until `remove()`, the end of its `with` block, or `times` actions. `acted` counts its actions."""

    def __init__(
        self, controls: list[Control], api: Api | None, hook: Hook | Action, times: int | None, node: int | None
    ) -> None:
        self._controls = controls
        self.api = api
        self.times = times
        self.node = node
        self.hook: Hook = hook if callable(hook) else lambda _: hook
        self.acted = 0
        if times != 0:
            controls.append(self)

    def __repr__(self) -> str:
        of = "every api" if self.api is None else self.api.name
        return f"<Control of {of}, acted {self.acted} of {self.times} times, {'on' if self.is_on else 'removed'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.remove()

    @property
    def is_on(self) -> bool:
        return self in self._controls

    def remove(self) -> None:
        """Let everything through from now on."""
        if self.is_on:
            self._controls.remove(self)

    def is_for(self, request: Request) -> bool:
        """Whether the hook is to see a request."""
        return self.is_on and self.api in (None, request.api) and self.node in (None, request.node)

    def count(self) -> None:
        """Count an action of the hook; after the last of its `times` the hook is removed."""
        self.acted += 1
        if self.times is not None and self.acted >= self.times:
            self.remove()


def failed_response(request: Request, code: int, partitions: Collection[TopicPartition] | None = None) -> Message:
    """The response of `Fail` to any request except Metadata: the error `code` for each part of the request.

    With `partitions`, the response contains only these partitions of the request.
    """
    body = request.body
    response = Message()
    fields = {one.name: one for one in SUPPORTED_APIS[request.api].response.fields}
    if "topics" in fields:
        named = {one.name for one in fields["topics"].children}
        if "partitions" in named:
            response.topics = _failed_topics(request, code, partitions)
        else:
            names = getattr(body, "topic_names", None) or [one.name for one in body.topics or ()]
            response.topics = [Message(name=name, error_code=code) for name in names]
    if "groups" in fields and hasattr(body, "groups"):
        response.groups = [Message(group_id=group_id, error_code=code) for group_id in body.groups]
    if "resources" in fields:
        response.resources = [
            Message(resource_type=one.resource_type, resource_name=one.resource_name, error_code=code)
            for one in body.resources
        ]
    if "error_code" in fields and partitions is None and request.api is not Api.FETCH:
        response.error_code = code
    if request.api is Api.JOIN_GROUP:
        # Versions below 7 of the response do not allow null.
        response.protocol_name = ""
    return response


def _failed_topics(request: Request, code: int, partitions: Collection[TopicPartition] | None) -> list[Message]:
    if partitions is not None and request.body.topics is None:
        # An OffsetFetch of all topics names no partitions.
        requested = list(partitions)
    else:
        requested = [tp for tp in request.partitions() if partitions is None or tp in partitions]
    rows: dict[str, list[Message]] = {}
    for tp in requested:
        rows.setdefault(tp.topic, []).append(Message(partition=tp.partition, error_code=code))
    return [Message(name=topic, partitions=failed) for topic, failed in rows.items()]


def is_action_for(action: Action, request: Request) -> bool:
    """Whether the request names a partition that fails, or with Metadata a topic. Other actions are for every request.

    An OffsetFetch or Metadata without topics (null) is for all of them.
    """
    while isinstance(action, Delay) and action.then is not None:
        action = action.then
    if not isinstance(action, Fail):
        return True
    if request.api is Api.METADATA:
        return _asks_for_failing_topic(action, request)
    if action.partitions is None:
        return True
    if request.api is Api.OFFSET_FETCH and request.body.topics is None:
        return True
    return not set(action.partitions).isdisjoint(request.partitions())


def _asks_for_failing_topic(action: Fail, request: Request) -> bool:
    """Whether a Metadata request asks for a topic that fails, or for all topics."""
    rows = request.body.topics
    # In version 0 an empty list asks for all topics, and in later versions null.
    if rows is None or (not rows and request.version == 0):
        return True
    failing = None if action.partitions is None else {tp.topic for tp in action.partitions}
    # A topic may be named by its id alone.
    return any(failing is None or row.name is None or row.name in failing for row in rows)


def without_partitions(request: Request, partitions: Collection[TopicPartition]) -> Request:
    """The request without the partitions that fail; a Fetch does not wait for records."""

    def kept_partition_rows(topic: Message) -> list[Any]:
        return [row for row in topic.partitions if TopicPartition(topic.name, partition_number(row)) not in partitions]

    body = Message(**vars(request.body))
    if body.topics is not None:
        topics = [Message(**{**vars(topic), "partitions": kept_partition_rows(topic)}) for topic in body.topics]
        body.topics = [topic for topic in topics if topic.partitions]
    if hasattr(body, "max_wait_ms"):
        body.max_wait_ms = 0
    return replace(request, body=body)


def merge_failures(response: Message, failures: Message) -> Message:
    """The broker's response with the failures in place of its partitions, or of its topics if they have no partitions.

    A partition that fails with DUPLICATE_SEQUENCE_NUMBER keeps the offset of the broker's response.
    """
    by_name = {topic.name: topic for topic in response.topics}
    for topic in failures.topics:
        if topic.name not in by_name:
            response.topics.append(topic)
            continue
        if not hasattr(topic, "partitions"):
            by_name[topic.name].error_code = topic.error_code
            continue
        known = {row.partition: row for row in by_name[topic.name].partitions}
        for row in topic.partitions:
            if row.error_code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER and row.partition in known:
                row = Message(**{**vars(known[row.partition]), "error_code": row.error_code})
            known[row.partition] = row
        by_name[topic.name].partitions = list(known.values())
    return response
