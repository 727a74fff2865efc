"""The types of Kafka Connect's responses and bodies, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of

CONFIG = {"name": "files", "connector.class": "FileStreamSource", "file": "in.txt", "topic": "lines"}

Connector = Annotated[str, Field(examples=["files"])]
Config = Annotated[dict[str, str], Field(examples=[CONFIG])]
Kind = Literal["source", "sink", "unknown"]
WorkerId = Annotated[str, Field(examples=["host:8085"])]


class ServerInfo(TypedDict):
    """The runtime's version and the cluster's id."""

    version: Annotated[str, Field(examples=["4.1.0"])]
    commit: Annotated[str, Field(examples=["penstock"])]
    kafka_cluster_id: of.ClusterId | None


class WorkerHealth(TypedDict):
    """Whether the worker has started and answers."""

    status: Literal["starting", "unhealthy", "healthy"]
    message: Annotated[str, Field(examples=["Worker has completed startup and is ready to handle requests."])]


class TaskId(TypedDict):
    """The id of a task."""

    connector: Connector
    task: of.Partition


class ConnectorInfo(TypedDict):
    """A connector's config and tasks."""

    name: Connector
    config: Config
    tasks: list[TaskId]
    type: Kind


class TaskInfo(TypedDict):
    """A task with its config."""

    id: TaskId
    config: Annotated[dict[str, str], Field(examples=[{"file": "in.txt"}])]


class InstanceState(TypedDict):
    """The state of a connector, or of one of its tasks, with the worker that runs it or ran it last."""

    state: Annotated[str, Field(examples=["RUNNING"])]
    worker_id: WorkerId
    version: NotRequired[Annotated[str, Field(examples=["1.0"])]]
    trace: NotRequired[Annotated[str, Field(examples=["ConnectError: in.txt: no such file"])]]


class ConnectorTaskState(InstanceState):
    """The state of a task."""

    id: of.Partition


class ConnectorStatus(TypedDict):
    """The states of a connector and its tasks."""

    name: Connector
    connector: InstanceState
    tasks: list[ConnectorTaskState]
    type: Kind


class ExpandedConnector(TypedDict, total=False):
    """The parts of a connector that `expand` selects."""

    info: ConnectorInfo
    status: ConnectorStatus


class ConnectorOffset(TypedDict):
    """A partition and the offset in it. Each source connector defines the fields of both.

    For a sink connector, `partition` has `kafka_topic` and `kafka_partition`, and `offset` has `kafka_offset`.
    """

    partition: Annotated[Any, Field(examples=[{"filename": "in.txt"}])]
    offset: Annotated[Any, Field(examples=[{"position": 42}])]


class ConnectorOffsets(TypedDict):
    """A connector's offsets."""

    offsets: list[ConnectorOffset]


class Message(TypedDict):
    """The outcome of a request, as text."""

    message: Annotated[str, Field(examples=["The offsets for this connector have been altered"])]


Plugin = TypedDict(
    "Plugin",
    {
        "class": Annotated[str, Field(examples=["FileStreamSource"])],
        "type": Annotated[str, Field(examples=["source"])],
        "version": Annotated[str, Field(examples=["1.0"])],
    },
)
"""An installed plugin."""


class ConfigDefinition(TypedDict):
    """A setting of a plugin."""

    name: Annotated[str, Field(examples=["file"])]
    type: Annotated[str, Field(examples=["STRING"])]
    required: bool
    default_value: str | None
    importance: Annotated[str, Field(examples=["HIGH"])]
    documentation: of.Text
    group: str | None
    width: Annotated[str, Field(examples=["LONG"])]
    display_name: Annotated[str, Field(examples=["file"])]
    dependents: Annotated[list[str], Field(examples=[[]])]
    order: of.Count


class ConfigValue(TypedDict):
    """The value of a setting, with its errors."""

    name: Annotated[str, Field(examples=["file"])]
    value: str | None
    recommended_values: Annotated[list[Any], Field(examples=[[]])]
    errors: Annotated[list[str], Field(examples=[[]])]
    visible: bool


class ValidatedSetting(TypedDict):
    """A setting with its value."""

    definition: ConfigDefinition
    value: ConfigValue


class Validation(TypedDict):
    """The settings of a connector's config with their errors."""

    name: Connector
    error_count: of.Count
    groups: Annotated[list[str], Field(examples=[["Common"]])]
    configs: list[ValidatedSetting]


class LoggerLevel(TypedDict):
    """A logger's effective level, and when it was last set."""

    level: Annotated[str, Field(examples=["INFO"])]
    last_modified: of.TimeMs | None


LoggerName = Annotated[str, Field(examples=["root"])]
Connectors = Annotated[list[Connector] | dict[str, ExpandedConnector], Field(examples=[["files"]])]
ActiveTopics = Annotated[dict[str, dict[str, list[str]]], Field(examples=[{"files": {"topics": ["lines"]}}])]
LoggerLevels = Annotated[dict[str, LoggerLevel], Field(examples=[{"root": {"level": "INFO", "last_modified": None}}])]


def openapi_body(example: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a JSON request body.

    FastAPI does not decode the body. The routes do, and report an invalid body with Kafka Connect's errors.
    """
    schema = {"type": "object", "examples": [example]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def openapi_query(**schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of query parameters.

    FastAPI does not decode them. The routes do, as Kafka Connect does, which ignores invalid values.
    """
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]}


CREATE_BODY = openapi_body({"name": "files", "config": CONFIG})
CONFIG_BODY = openapi_body(CONFIG)
PATCH_BODY = openapi_body({"file": "other.txt", "topic": None})
OFFSETS_BODY = openapi_body({"offsets": [{"partition": {"filename": "in.txt"}, "offset": {"position": 42}}]})
LEVEL_BODY = openapi_body({"level": "DEBUG"})

_FLAG = {"type": "boolean", "default": False}
EXPAND_QUERY = openapi_query(expand={"type": "array", "items": {"type": "string", "enum": ["info", "status"]}})
RESTART_QUERY = openapi_query(includeTasks=_FLAG, onlyFailed=_FLAG)
PLUGINS_QUERY = openapi_query(connectorsOnly={"type": "boolean", "default": True})
LEVEL_QUERY = openapi_query(scope={"type": "string", "enum": ["worker", "cluster"], "default": "worker"})
