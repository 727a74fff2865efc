"""Makes a task from its configuration: its classes, converters, clients and limits.

The converters are the connector's, or else the worker's. Each converter gets the settings under its own prefix. The
settings of a client have three layers: the worker's settings, then the worker's `consumer.*`, `producer.*` or
`admin.*`, then the connector's overrides. A later layer overrides an earlier one. The worker's own
`client.id` does not apply, since each client has an id of its own. `connector.client.config.override.policy` limits the
connector's overrides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.allowed_files import FILES_ALLOWED, AllowedFiles
from penstock.shared.connect.config_provider import ConfigTransformer
from penstock.shared.connect.connector import Connector, SinkConnector
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.redaction import Mask
from penstock.shared.connect.runtime.abstract_source_task import SourceParts, WorkerSourceTaskContext
from penstock.shared.connect.runtime.client_settings import (
    consumer_settings,
    kafka_settings,
    producer_settings,
    sink_group_id,
)
from penstock.shared.connect.runtime.connector_config import sink_config, source_config
from penstock.shared.connect.runtime.conversion import Conversion
from penstock.shared.connect.runtime.error_handling import ErrorSettings, RetryWaits, RetryWithToleranceOperator
from penstock.shared.connect.runtime.error_reporting import ErrorReporters, WorkerErrantRecordReporter
from penstock.shared.connect.runtime.exactly_once_source_task import ExactlyOnceSourceTask, transactional_id
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore, StoredOffsetReader
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.sink_task_state import SinkTaskState
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.topic_creation import TopicCreationGroups
from penstock.shared.connect.runtime.transaction_boundaries import ConnectorBoundary, boundary_of
from penstock.shared.connect.runtime.transformation_chain import TransformationChain
from penstock.shared.connect.runtime.worker_config import WorkerConfig
from penstock.shared.connect.runtime.worker_sink_task import WorkerSinkTask, WorkerSinkTaskContext
from penstock.shared.connect.runtime.worker_source_task import WorkerSourceTask
from penstock.shared.connect.runtime.worker_task import TaskSpec, WorkerTask
from penstock.shared.connect.task import SinkTask, SourceTask

Props = Mapping[str, str]
INT_MAX = 2**31 - 1
SINK_POLL_RECORDS = 2_000
"""The maximum number of records of one poll, unless the worker or the connector sets `max.poll.records`."""


class TaskFactory:
    """Makes the tasks of one worker, which calls `factory(spec, listener)`."""

    def __init__(
        self,
        config: WorkerConfig,
        plugins: Plugins,
        offsets: OffsetBackingStore,
        *,
        group_id: str = "connect",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`group_id` is the group of the cluster. Transactional ids begin with it."""
        self._config = config
        self._plugins = plugins
        self._offsets = offsets
        self._group_id = group_id
        self._clock = clock
        self._files = AllowedFiles(config[FILES_ALLOWED])
        self._transformer = ConfigTransformer.of_worker(config["config.providers"], config.props)

    def __call__(self, spec: TaskSpec, listener: StatusListener) -> WorkerTask:
        connector = self._transformer.resolve(spec.connector_config)
        props = self._transformer.resolve(spec.task_config)
        plugin = self._plugins.connector_class(connector.get("connector.class", ""))
        is_sink = issubclass(plugin, SinkConnector)
        values = (sink_config() if is_sink else source_config(connector)).parse(connector, self._plugins.any_kind)
        for given in (connector, props):
            self._files.check(plugin.file_settings, given)
        task = plugin.task_class()
        metrics = TaskMetrics("sink" if is_sink else "source", self._clock.monotonic_ms())
        mask = self._transformer.masking({**spec.connector_config, **spec.task_config}, plugin)
        build = _Build(
            factory=self,
            id=spec.id,
            listener=listener,
            connector=connector,
            props=props,
            values=values,
            metrics=metrics,
            mask=mask,
        )
        made: WorkerTask
        if isinstance(task, SinkTask):
            made = build.sink(task)
        else:
            assert isinstance(task, SourceTask)
            made = build.source(task, plugin)
        made.mask = mask
        return made

    def client_props(self, id: ConnectorTaskId, kind: str, connector: Props) -> dict[str, Any]:
        """Return the properties of one client. `kind` is consumer, producer or admin."""
        return self._config.connector_client_props(kind, f"connector-{kind}-{id}", connector)

    def converter(self, which: str, kind: str, connector: Props) -> Any:
        """Return the connector's converter, or else the worker's, configured."""
        name = f"{which}.converter"
        props = connector if name in connector else self._config.props
        made = self._plugins.make(kind, props.get(name) or self._config[name])
        own = with_prefix(props, f"{name}.")
        if kind == "header_converter":
            made.configure_headers(own)
        else:
            made.configure(own, which == "key")
        return made


class _Build:
    """Makes one task."""

    def __init__(
        self,
        factory: TaskFactory,
        id: ConnectorTaskId,
        listener: StatusListener,
        connector: Props,
        props: Props,
        values: Mapping[str, Any],
        metrics: TaskMetrics,
        mask: Mask,
    ) -> None:
        self._factory = factory
        self._id = id
        self._listener = listener
        self._connector = connector
        self._props = props
        self._values = values
        self._metrics = metrics
        self._mask = mask
        self._config = factory._config
        self._clock = factory._clock
        self._errors = ErrorSettings.of(values)
        self._operator = RetryWithToleranceOperator(self._errors, metrics)
        self._reporters = self._make_error_reporters()

    def _make_error_reporters(self) -> ErrorReporters:
        producer = None
        admin = None
        if self._errors.dead_letter_topic:
            producer = self._make_producer()
            admin = self._make_admin()
        return ErrorReporters(self._id, self._errors, self._metrics, producer, admin, mask=self._mask)

    def _make_producer(self, **fixed: Any) -> Producer:
        props = self._factory.client_props(self._id, "producer", self._connector)
        # As in Worker.baseProducerConfigs: a record waits for its topic and its broker without a limit.
        defaults = {"max.block.ms": INT_MAX}
        # Under exactly-once the producer's own default applies: a transaction does not last that long.
        if "transactional_id" not in fixed:
            defaults["delivery.timeout.ms"] = INT_MAX
        return Producer(kafka_settings(props), producer_settings({**defaults, **props}, **fixed))

    def _make_admin(self) -> Admin:
        return Admin(kafka_settings(self._factory.client_props(self._id, "admin", self._connector)))

    def _make_conversion(self) -> Conversion:
        make = self._factory.converter
        return Conversion(
            key=make("key", "converter", self._connector),
            value=make("value", "converter", self._connector),
            header=make("header", "header_converter", self._connector),
            chain=TransformationChain.of(self._factory._plugins, self._connector),
            operator=self._operator,
            clock=self._clock,
            report=self._reporters.report,
            waits=RetryWaits(str(self._id)),
        )

    def sink(self, task: SinkTask) -> WorkerSinkTask:
        consumer = self._make_consumer()
        sink_state = SinkTaskState(
            self._config["offset.flush.interval.ms"],
            self._config["offset.flush.timeout.ms"],
            self._clock.monotonic_ms(),
        )
        conversion = self._make_conversion()
        made = WorkerSinkTask(
            id=self._id,
            listener=self._listener,
            task=task,
            props=self._props,
            topics=self._topics_to_subscribe(),
            consumer=consumer,
            conversion=conversion,
            sink_state=sink_state,
            reporters=self._reporters,
            metrics=self._metrics,
            clock=self._clock,
        )
        made.context = WorkerSinkTaskContext(made, self._props, self._factory._files, consumer)
        if self._errors.reports:
            made.context.errant_record_reporter = WorkerErrantRecordReporter(
                reporters=self._reporters,
                operator=self._operator,
                raw=made.raw,
                task_class=type(task),
                clock=self._clock,
                conversion=conversion,
                thread=made.thread,
            )
        return made

    def _make_consumer(self) -> Consumer:
        props = self._factory.client_props(self._id, "consumer", self._connector)
        defaults = {
            "auto.offset.reset": "earliest",
            "max.poll.records": SINK_POLL_RECORDS,
        }
        merged = {**defaults, **props}
        # The group.id of a distributed worker is the workers' own group. Its sinks must not join that.
        merged["group.id"] = sink_group_id(self._id.connector, self._connector)
        settings = consumer_settings(merged, commit_strategy="none")
        # A revocation may take as long as the connector's last `put` and flush.
        settings = settings.model_copy(update={"listener_timeout_ms": settings.max_poll_interval_ms})
        return Consumer(kafka_settings(props), settings)

    def _topics_to_subscribe(self) -> Sequence[str] | re.Pattern[str]:
        if topics := self._values["topics"]:
            return list(topics)
        if pattern := self._values["topics.regex"]:
            return re.compile(pattern)
        raise ConfigError("Must configure one of topics or topics.regex")

    def source(self, task: SourceTask, plugin: type[Connector]) -> WorkerTask:
        exactly_once = self._config["exactly.once.source.support"].lower() == "enabled"
        reader = StoredOffsetReader(self._factory._offsets, self._id.connector)
        context = WorkerSourceTaskContext(self._props, self._factory._files, reader)
        fixed: dict[str, Any] = {}
        if exactly_once:
            fixed["transactional_id"] = transactional_id(self._factory._group_id, self._id)
        groups = TopicCreationGroups.of(self._connector) if self._config["topic.creation.enable"] else None
        parts = SourceParts(
            task=task,
            props=self._props,
            context=context,
            producer=self._make_producer(**fixed),
            conversion=self._make_conversion(),
            reporters=self._reporters,
            admin=self._make_admin(),
            topic_wait_ms=self._config["topic.wait.timeout.ms"],
            topic_groups=groups,
        )
        common = (self._id, self._listener, parts, self._factory._offsets)
        interval_ms = self._config["offset.flush.interval.ms"]
        if not exactly_once:
            return WorkerSourceTask(
                *common,
                self._metrics,
                self._clock,
                flush_interval_ms=interval_ms,
                flush_timeout_ms=self._config["offset.flush.timeout.ms"],
            )
        boundary_ms = self._values["transaction.boundary.interval.ms"]
        boundary = boundary_of(
            self._values["transaction.boundary"].lower(),
            interval_ms if boundary_ms is None else boundary_ms,
            self._clock.monotonic_ms(),
        )
        if isinstance(boundary, ConnectorBoundary):
            context.transaction_context = boundary
        return ExactlyOnceSourceTask(*common, boundary, self._metrics, self._clock)
