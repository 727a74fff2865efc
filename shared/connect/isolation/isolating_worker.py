"""A worker that runs connectors in separate processes if `penstock.task.isolation=process`.

An `IsolatedConnector` runs one such connector and its tasks. Each validation of its config, and each change of its
offsets, has a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.connector import Props
from penstock.shared.connect.errors import ConnectorNotFound
from penstock.shared.connect.isolation.connector_process import ConnectorProcess, ConnectorProcessEnded
from penstock.shared.connect.isolation.isolated_connector import IsolatedConnector
from penstock.shared.connect.isolation.messages import Message
from penstock.shared.connect.runtime.config_validation import ConfigInfos
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.status_listener import Id, StatusListener, connector_of
from penstock.shared.connect.runtime.worker import TaskMaker, Worker
from penstock.shared.connect.runtime.worker_config import ISOLATION, WorkerConfig
from penstock.shared.connect.runtime.worker_task import TaskSpec


class IsolatingWorker(Worker):
    """A worker that runs isolated connectors in processes, and all others as every worker does."""

    def __init__(
        self,
        config: WorkerConfig,
        plugins: Plugins,
        offsets: OffsetBackingStore,
        make_task: TaskMaker,
        *,
        log_settings: LogSettings | None = None,
    ) -> None:
        super().__init__(config, plugins, offsets, make_task)
        self._log_settings = log_settings or LogSettings()
        self._isolated: dict[str, IsolatedConnector] = {}
        self._levels: dict[str, str] = {}

    async def shutdown(self) -> None:
        await super().shutdown()
        # A cancelled stop may have left processes without parts.
        await asyncio.gather(*(self._stop_parts(name, ()) for name in tuple(self._isolated)))

    def set_level(self, name: str, level: str) -> None:
        """Set a logger's level in the processes of the isolated connectors, also in future ones."""
        self._levels.pop(name, None)
        self._levels[name] = level
        for isolated in self._isolated.values():
            isolated.send({"do": "level", "name": name, "level": level})

    def connector_names(self) -> frozenset[str]:
        return super().connector_names() | {name for name, found in self._isolated.items() if name in found.parts}

    def task_ids(self) -> frozenset[ConnectorTaskId]:
        parts = (id for isolated in self._isolated.values() for id in isolated.parts)
        return super().task_ids() | {id for id in parts if isinstance(id, ConnectorTaskId)}

    def is_constructed(self, id: ConnectorTaskId) -> bool:
        return super().is_constructed(id) or self._connector_with_part(id) is not None

    def state(self, id: Id) -> State | None:
        isolated = self._connector_with_part(id)
        return super().state(id) if isolated is None else isolated.parts[id].state

    def task_metrics(self) -> list[tuple[ConnectorTaskId, State, dict[str, float]]]:
        now_ms = self._clock.monotonic_ms()
        stall_ms = self.config["task.stall.timeout.ms"]
        isolated = [found.task_metrics(now_ms, stall_ms) for found in self._isolated.values()]
        return super().task_metrics() + [row for rows in isolated for row in rows]

    def stalled_ms(self, id: ConnectorTaskId) -> int:
        isolated = self._connector_with_part(id)
        return super().stalled_ms(id) if isolated is None else isolated.stalled_ms(id, self._clock.monotonic_ms())

    async def start_connector(
        self,
        name: str,
        config: Props,
        target: TargetState,
        listener: StatusListener,
        on_reconfiguration: Callable[[str], None] = lambda _name: None,
    ) -> State:
        if not self._is_isolated_connector(config):
            return await super().start_connector(name, config, target, listener, on_reconfiguration)
        return await self._isolated_connector(name).start_connector(config, target, listener, on_reconfiguration)

    async def stop_connector(self, name: str) -> None:
        await asyncio.gather(super().stop_connector(name), self._stop_parts(name, [name]))

    async def connector_task_configs(self, name: str, config: Props) -> list[dict[str, str]]:
        isolated = self._connector_with_part(name)
        if isolated is None:
            return await super().connector_task_configs(name, config)
        try:
            return await isolated.task_configs(config)
        except ConnectorProcessEnded:
            raise ConnectorNotFound(f"Connector {name} was stopped, or its process has ended") from None

    async def start_task(self, spec: TaskSpec, target: TargetState, listener: StatusListener) -> bool:
        if not self._is_isolated_connector(spec.connector_config):
            return await super().start_task(spec, target, listener)
        self._isolated_connector(spec.id.connector).start_task(spec, target, listener)
        return True

    async def stop_tasks(self, ids: Iterable[ConnectorTaskId]) -> None:
        ids = tuple(ids)
        names = {id.connector for id in ids}
        isolated = (self._stop_parts(name, [id for id in ids if id.connector == name]) for name in names)
        await asyncio.gather(super().stop_tasks(ids), *isolated)

    async def set_target_state(self, name: str, target: TargetState) -> None:
        await super().set_target_state(name, target)
        if (isolated := self._isolated.get(name)) is not None:
            await isolated.set_target_state(target)

    async def validate(self, config: Props) -> ConfigInfos:
        if not self._is_isolated_connector(config):
            return await super().validate(config)
        return ConfigInfos(**await self._request_once({"do": "validate", "config": dict(config)}))

    async def alter_offsets(self, props: Props, offsets: Any) -> bool:
        if not self._is_isolated_connector(props):
            return await super().alter_offsets(props, offsets)
        is_sink = isinstance(offsets, Mapping)
        rows = [((tp.topic, tp.partition), at) for tp, at in offsets.items()] if is_sink else offsets
        command = {"do": "alter_offsets", "config": dict(props), "rows": rows, "sink": is_sink}
        return bool(await self._request_once(command))

    def _is_isolated_connector(self, config: Props) -> bool:
        where = config.get(ISOLATION) or self.config[ISOLATION]
        try:
            return self.transformer.resolve({ISOLATION: where})[ISOLATION] == "process"
        except ConfigError:
            # The call without a process resolves the setting again and reports the error.
            return False

    def _connector_with_part(self, id: Id) -> IsolatedConnector | None:
        isolated = self._isolated.get(connector_of(id))
        return isolated if isolated is not None and id in isolated.parts else None

    def _isolated_connector(self, name: str) -> IsolatedConnector:
        if name not in self._isolated:
            self._isolated[name] = IsolatedConnector(
                name, self._first_message_to_child, self._restarts, self.graceful_timeout_ms, self._clock
            )
        return self._isolated[name]

    async def _stop_parts(self, name: str, ids: Iterable[Id]) -> None:
        isolated = self._isolated.get(name)
        if isolated is None:
            return
        await isolated.stop(ids)
        # While the stop waited, a start may have added parts, or another stop may have removed the entry.
        if not isolated.parts and self._isolated.get(name) is isolated:
            del self._isolated[name]
            self._restarts.forget(name)

    async def _request_once(self, command: Message) -> Any:
        """Run one command in a process of its own, and return its result. The process is then killed."""
        name = command["config"].get("name", "")
        process = ConnectorProcess(name, self._first_message_to_child(name), self.graceful_timeout_ms)
        try:
            return await process.request(command)
        finally:
            await process.kill()

    def _first_message_to_child(self, connector: str) -> Message:
        return {
            "connector": connector,
            "worker": self.config.props,
            "log": {"level": self._log_settings.level, "format": self._log_settings.format},
            "levels": list(self._levels.items()),
        }
