"""The base classes of connectors. A connector divides its work into tasks.

A connector does not process records. It checks its configuration and returns at most `tasks.max` task configurations.
It may watch the external system, and ask the worker to reconfigure its tasks.

`start`, `stop`, `task_configs` and `alter_offsets` are `async def` or `def`. The worker awaits an `async def` method on
its event loop. It calls a `def` method in a thread of the connector's own, as in Java, so that it may block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from enum import Enum
from typing import ClassVar, Protocol

from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.config_def import ConfigDef, ConfigValue
from penstock.shared.connect.record import Offset, Partition
from penstock.shared.connect.task import NOTHING, SinkTask, SourceTask, Task
from penstock.shared.connect.version import CONNECT_VERSION

Props = Mapping[str, str]


class ExactlyOnceSupport(Enum):
    """Whether a source connector supports exactly-once."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"


class ConnectorContext(Protocol):
    """The calls that a connector may make to its worker."""

    def request_task_reconfiguration(self) -> None:
        """Make the worker call `task_configs` again, because the division of the work has changed.

        Does nothing unless the connector is RUNNING: in `start` it has no effect.
        """
        ...

    def raise_error(self, error: Exception) -> None:
        """Fail the connector. Call it from a background task of the connector."""
        ...


class Connector(ABC):
    """Base of source and sink connectors."""

    kafka_class: ClassVar[str | None] = None
    """The name of the Kafka class that this class replaces."""

    file_settings: ClassVar[tuple[str, ...]] = ()
    """The settings that name a file, a folder or a URL of an object store.

    The worker compares them with its `connect.files.allowed` in validation, and before the connector and its tasks
    start. A task opens files by `context.files`.
    """

    task_class: ClassVar[type[Task]]
    """The class of the connector's tasks."""

    context: ConnectorContext

    props: dict[str, str]
    """The configuration that the default `start` keeps."""

    def initialize(self, context: ConnectorContext) -> None:
        """Take the context. The worker calls it before each `start`.

        A connector object that is made only to validate settings or to alter offsets gets no context.
        """
        self.context = context

    def version(self) -> str:
        """Return the connector's version: by default, that of Connect."""
        return CONNECT_VERSION

    def start(self, props: Props) -> Awaitable[None] | None:
        """Take the validated configuration. An error that it raises fails the connector.

        The default keeps the configuration as `props`, for the default `task_configs`. An override calls
        `super().start(props)`, or `task_configs` is overridden too.
        """
        self.props = dict(props)
        return NOTHING

    @abstractmethod
    def task_configs(self, max_tasks: int) -> Awaitable[list[dict[str, str]]] | list[dict[str, str]]:
        """Return a configuration for each task, at most `max_tasks` of them.

        Tasks get values that are not texts in their JSON form, and no settings that are None.

        If it raises an error, the worker calls it again after a backoff, and the tasks run on meanwhile. If it returns
        more than `max_tasks` configurations, the connector fails, unless `tasks.max.enforce` is false.
        """

    def stop(self) -> Awaitable[None] | None:
        """Release everything that `start` opened."""
        return NOTHING

    @classmethod
    @abstractmethod
    def config(cls) -> ConfigDef:
        """Return the connector's own settings, without those that every connector has."""

    def validate(self, props: Props) -> list[ConfigValue]:
        """Return each setting with its value and its errors.

        The default checks each setting by its definition alone. Override it to check settings against each other.
        """
        return self.config().validate_values(props)


class SourceConnector(Connector):
    """Reads from a system into Kafka."""

    task_class: ClassVar[type[SourceTask]]

    def task_configs(self, max_tasks: int) -> Awaitable[list[dict[str, str]]] | list[dict[str, str]]:
        """Return a configuration for each task. By default, the connector's configuration, for one task."""
        return [self.props]

    def exactly_once_support(self, props: Props) -> ExactlyOnceSupport | None:
        """Return `ExactlyOnceSupport.SUPPORTED` if exactly-once holds with these settings, `UNSUPPORTED` if not, or
        None if the connector cannot tell."""
        return None

    def can_define_transaction_boundaries(self, props: Props) -> bool:
        """Return whether `transaction.boundary=connector` may be set."""
        return False

    def alter_offsets(self, props: Props, offsets: list[tuple[Partition, Offset | None]]) -> Awaitable[bool] | bool:
        """Check or store offsets that a user alters, and return True.

        An offset of None is to be removed. An error that it raises rejects the offsets. The default accepts all offsets
        without a check, and returns False. The user is then told to alter any offsets outside of Connect as well.
        """
        return False


class SinkConnector(Connector):
    """Writes from Kafka into a system."""

    task_class: ClassVar[type[SinkTask]]

    def task_configs(self, max_tasks: int) -> Awaitable[list[dict[str, str]]] | list[dict[str, str]]:
        """Return a configuration for each task. By default, the connector's configuration, for `max_tasks` tasks."""
        return [self.props] * max_tasks

    def alter_offsets(self, props: Props, offsets: Mapping[TopicPartition, int | None]) -> Awaitable[bool] | bool:
        """Check or store offsets that a user alters, as for sources.

        A reset has None for each partition whose offset the group has. It is empty if the group has none.
        """
        return False
