"""The lifecycle of a connector or task, as one table.

    UNASSIGNED, RESTARTING, FAILED ── startup ──> RUNNING
    any but FAILED ── running ──> RUNNING
    any but FAILED ── paused ──> PAUSED
    any but FAILED ── stopped ──> STOPPED (connectors only)
    any ── failure ──> FAILED; any ── restart ──> RESTARTING
    any ── shutdown ──> UNASSIGNED

The names are those of Kafka Connect's status topic and REST. A target state is the requested state. A state is the
actual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.shared.common.errors import IllegalState


class State(Enum):
    """The actual state of a connector or task."""

    UNASSIGNED = "UNASSIGNED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    RESTARTING = "RESTARTING"


class TargetState(Enum):
    """The requested state of a connector: started, paused (its tasks keep their resources), or stopped (no tasks)."""

    STARTED = "STARTED"
    PAUSED = "PAUSED"
    STOPPED = "STOPPED"


class Event(Enum):
    """An event of a connector or task, as the status listener gets it."""

    STARTUP = "startup"
    """It runs, for the first time or after a restart."""
    RUNNING = "running"
    """It continues after a pause or a stop."""
    PAUSED = "paused"
    STOPPED = "stopped"
    """The connector is stopped."""
    FAILURE = "failure"
    SHUTDOWN = "shutdown"
    """It ended here in order and may be started elsewhere."""
    RESTART = "restart"
    """It is started again, after a failure or by request."""


ALIVE = (State.UNASSIGNED, State.RUNNING, State.PAUSED, State.STOPPED, State.RESTARTING)
ALL = (*ALIVE, State.FAILED)

TRANSITIONS: dict[Event, tuple[tuple[State, ...], State]] = {
    Event.STARTUP: ((State.UNASSIGNED, State.RESTARTING, State.FAILED), State.RUNNING),
    Event.RUNNING: (ALIVE, State.RUNNING),
    Event.PAUSED: (ALIVE, State.PAUSED),
    Event.STOPPED: (ALIVE, State.STOPPED),
    Event.FAILURE: (ALL, State.FAILED),
    Event.SHUTDOWN: (ALL, State.UNASSIGNED),
    Event.RESTART: (ALL, State.RESTARTING),
}
"""For each event, the states in which it may happen, and the state that follows."""


def after(state: State, event: Event) -> State:
    """Return the state that follows after an event. Raises IllegalState if the event cannot happen in this state.

    >>> after(State.PAUSED, Event.RUNNING)
    <State.RUNNING: 'RUNNING'>
    """
    froms, to = TRANSITIONS[event]
    if state not in froms:
        raise IllegalState(f"{event.value} is not a transition of state {state.name}")
    return to


@dataclass(frozen=True, order=True, slots=True)
class ConnectorTaskId:
    """A task of a connector, counted from 0."""

    connector: str
    task: int

    def __str__(self) -> str:
        return f"{self.connector}-{self.task}"
