"""What the config topic said since the herder last looked, and what follows from it.

Changes come one by one while the herder may be in the middle of a rebalance; they are kept here and taken together.

>>> pending = PendingChanges()
>>> pending.add(ConnectorChanged("orders"), 7, known={"orders"})
>>> pending.add(ConnectorChanged("new"), 8, known={"orders"})
>>> pending.rejoin, sorted(pending.take().connectors)
('connector new is new', ['orders'])
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.shared.connect.states import ConnectorTaskId
from penstock.shared.connect.storage.config_records import LoggerLevel, RestartRequest, SessionKey
from penstock.shared.connect.storage.config_state import (
    NO_OFFSET,
    ConfigChange,
    ConnectorChanged,
    ConnectorRemoved,
    TargetStateChanged,
    TasksChanged,
)


@dataclass(slots=True)
class Changes:
    """What is to be looked at: connectors to bounce, tasks to replace, targets to follow, restarts to make."""

    connectors: set[str] = field(default_factory=set)
    tasks: set[ConnectorTaskId] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)
    restarts: dict[str, RestartRequest] = field(default_factory=dict)
    loggers: list[LoggerLevel] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.connectors or self.tasks or self.targets or self.restarts or self.loggers)


class PendingChanges:
    """The changes that were not taken yet; `rejoin` says why the group is to assign anew, if it is."""

    def __init__(self) -> None:
        self._changes = Changes()
        self.rejoin: str | None = None
        self._rejoin_offset = NO_OFFSET

    def __bool__(self) -> bool:
        return bool(self._changes) or self.rejoin is not None

    def __repr__(self) -> str:
        return f"<PendingChanges {self._changes}, rejoin={self.rejoin!r}>"

    def add(self, change: ConfigChange, offset: int, known: Collection[str]) -> None:
        """Take one, which the record at `offset` made; `known` are the connectors that were there before it."""
        match change:
            case ConnectorChanged(connector) if connector in known:
                self._changes.connectors.add(connector)
            case ConnectorChanged(connector):
                self._wish(f"connector {connector} is new", offset)
            case ConnectorRemoved(connector):
                self._wish(f"connector {connector} was removed", offset)
                for held in (self._changes.connectors, self._changes.targets):
                    held.discard(connector)
            case TasksChanged(connector, tasks):
                self._changes.tasks |= set(tasks)
                self._wish(f"the tasks of {connector} changed", offset)
            case TargetStateChanged(connector):
                self._changes.targets.add(connector)
            case RestartRequest(connector):
                self._changes.restarts[connector] = _wider(self._changes.restarts.get(connector), change)
            case LoggerLevel():
                self._changes.loggers.append(change)
            case SessionKey():
                pass  # whoever needs it finds it in the snapshot

    def _wish(self, reason: str, offset: int) -> None:
        self.rejoin, self._rejoin_offset = reason, offset

    def assigned(self, offset: int) -> None:
        """The group has assigned by the configs up to `offset`: what they say needs no further rebalance."""
        if self._rejoin_offset <= offset:
            self.rejoin = None

    def take(self) -> Changes:
        """All of them, once; the wish to rejoin is taken by itself."""
        taken, self._changes = self._changes, Changes()
        return taken

    def take_rejoin(self) -> str | None:
        """Why the group is to assign anew; once."""
        taken, self.rejoin = self.rejoin, None
        return taken


def _wider(first: RestartRequest | None, second: RestartRequest) -> RestartRequest:
    """Of two requests that came together the one that restarts more."""
    if first is None:
        return second
    return RestartRequest(
        second.connector, first.only_failed and second.only_failed, first.include_tasks or second.include_tasks
    )
