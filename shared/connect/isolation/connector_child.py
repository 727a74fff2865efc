"""A connector's process: it makes the connector at the first question, and answers questions about it (an edge)."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

from penstock.shared.connect.connector import Connector
from penstock.shared.connect.isolation.child import Link, config_of, loggers_of, run
from penstock.shared.connect.isolation.messages import Message, error_message, from_rows
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.validation import validate_connector

Json = dict[str, Any]


class ServedConnector:
    """Answers questions about one connector. `say` sends messages to the worker. It is also the connector's context."""

    def __init__(
        self, make: Callable[[], Connector], validate: Callable[[Json], Json], say: Callable[[Message], None]
    ) -> None:
        self._make, self._validate, self._say = make, validate, say
        self._connector: Connector | None = None
        self._started = False
        self._answering: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<ServedConnector {self._connector!r}{', started' if self._started else ''}>"

    def request_task_reconfiguration(self) -> None:
        self._say({"reconfigure": True})

    def raise_error(self, error: Exception) -> None:
        self._say({"failed": error_message(error)})

    def on_question(self, asked: Message) -> None:
        """Answers a question, beside others in progress."""
        answering = asyncio.create_task(self._answer(asked))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def close(self) -> None:
        """Stops the connector if it is not stopped yet."""
        if self._started and self._connector is not None:
            await self._connector.stop()

    async def _answer(self, asked: Message) -> None:
        try:
            self._say({"answer": asked["ask"], "value": await self._do(asked)})
        # an error of the connector's code, or of a value that is not JSON: the worker handles it
        except Exception as e:
            self._say({"answer": asked["ask"], **error_message(e)})

    async def _do(self, asked: Message) -> Any:
        what = asked["do"]
        if what == "validate":
            return self._validate(asked["props"])
        if self._connector is None:
            self._connector = self._make()
            self._connector.initialize(self)
        if what == "start":
            await self._connector.start(asked["props"])
            self._started = True
        elif what == "stop":
            self._started = False
            await self._connector.stop()
        elif what == "task_configs":
            return [dict(config) for config in await self._connector.task_configs(asked["tasks_max"])]
        elif what == "alter_offsets":
            wanted: Any = from_rows(asked["rows"]) if asked["sink"] else [(row[0], row[1]) for row in asked["rows"]]
            return await cast(Any, self._connector).alter_offsets(asked["props"], wanted)
        return None


def class_at(module: str, name: str) -> type[Connector]:
    """Returns a connector's class by its module and name."""
    return cast(type[Connector], attrgetter(name)(importlib.import_module(module)))


async def drive(start: Message, link: Link) -> None:
    """Serves the connector until the worker closes the link, or has ended."""
    loggers, over = loggers_of(start), asyncio.Event()

    def validate(props: Json) -> Json:
        plugins = Plugins.installed()
        infos = validate_connector(plugins, props, config_of(start, plugins).values)
        return {"name": infos.name, "groups": infos.groups, "configs": infos.configs}

    served = ServedConnector(lambda: class_at(*start["connector_class"])(), validate, link.say)

    def on_message(message: Message) -> None:
        if "level" in message:
            loggers.set_level(*message["level"])
        else:
            served.on_question(message)

    link.read(on_message, over.set, start["grace_ms"])
    await over.wait()
    await served.close()


if __name__ == "__main__":
    run(drive)
