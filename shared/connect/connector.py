"""What a connector's author writes: the connector itself, which says what its tasks are to do.

A connector does no work on records. It checks its configuration, divides the work into at most `tasks.max` task
configurations, and may watch its system and ask for them to be made anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Protocol

from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.config_def import ConfigDef, ConfigValue
from penstock.shared.connect.record import Offset, Partition
from penstock.shared.connect.task import SinkTask, SourceTask, Task
from penstock.shared.connect.version import CONNECT_VERSION

Props = Mapping[str, str]


class ExactlyOnceSupport(Enum):
    """Whether a source connector keeps its part of exactly-once."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"


class ConnectorContext(Protocol):
    """What a connector may ask its worker."""

    def request_task_reconfiguration(self) -> None:
        """Have `task_configs` called again: the work is divided differently now."""
        ...

    def raise_error(self, error: Exception) -> None:
        """Fail the connector, from a background task of its own."""
        ...


class Connector(ABC):
    """Base of both kinds."""

    kafka_class: ClassVar[str | None] = None
    """The name of Kafka's class that this one stands for."""

    file_settings: ClassVar[tuple[str, ...]] = ()
    """The settings that name a file, a folder or a URL of an object store.

    The worker compares them with its `connect.files.allowed` in validation, and before the connector and its tasks
    start. A task opens files by `context.files`.
    """

    context: ConnectorContext

    def initialize(self, context: ConnectorContext) -> None:
        """Called first, before `start`."""
        self.context = context

    def version(self) -> str:
        return CONNECT_VERSION

    @abstractmethod
    async def start(self, props: Props) -> None:
        """Take the configuration, which has been validated; what it raises fails the connector."""

    @abstractmethod
    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        """A configuration for each task, at most `max_tasks` of them."""

    async def stop(self) -> None:
        """Let go of everything that `start` opened."""

    @classmethod
    @abstractmethod
    def config(cls) -> ConfigDef:
        """What may be set, beyond what every connector has."""

    def validate(self, props: Props) -> list[ConfigValue]:
        """What is wrong with the settings together; by default what their definitions say of each."""
        return self.config().validate_values(props)


class SourceConnector(Connector):
    """Reads from a system into Kafka."""

    task_class: ClassVar[type[SourceTask]]

    def exactly_once_support(self, props: Props) -> ExactlyOnceSupport | None:
        """Whether exactly-once holds with these settings; None: it cannot say."""
        return None

    def can_define_transaction_boundaries(self, props: Props) -> bool:
        """Whether `transaction.boundary=connector` may be set."""
        return False

    async def alter_offsets(self, props: Props, offsets: list[tuple[Partition, Offset | None]]) -> bool:
        """Check or mirror offsets that someone sets by hand; False: not supported, True: taken over.

        An error refuses them. By default everything is accepted unseen.
        """
        return False


class SinkConnector(Connector):
    """Writes from Kafka into a system."""

    task_class: ClassVar[type[SinkTask]]

    async def alter_offsets(self, props: Props, offsets: Mapping[TopicPartition, int | None]) -> bool:
        """Check or mirror offsets that someone sets by hand; as for sources."""
        return False


def task_class(connector: type[Connector]) -> type[Task]:
    """The tasks that the connector's work is done by."""
    found: type[Task] = connector.task_class  # type: ignore[attr-defined]
    return found
