"""The outcome of each event of one request, and the response body.

Sans-IO. The outcome of an event is "stored" if the broker has acknowledged it, "not stored" if it certainly is not in
the topic, and "unknown" otherwise. A client can safely send an event again if it was not stored. An event whose outcome
is unknown could be stored twice. The size of the result is bounded: after `max_errors` errors, reading stops. It stops
as well after an error that would affect all later events (Kafka is unreachable). The response names the first event
that was not read.

>>> from penstock.shared.common.errors import BrokerNotAvailable
>>> result = IngestResult("line", max_errors=10)
>>> result.add_outcomes([1, 2], [RecordMetadata("t", 0, 7, 0), BrokerNotAvailable("no broker")])
>>> result.status, result.body()["stored"], result.body()["errors"][0]["line"]
(207, 1, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from penstock.api.http.problem import failed_outcome, kind_of_record_error
from penstock.api.http.status_codes import (
    BAD_REQUEST,
    FORBIDDEN,
    GATEWAY_TIMEOUT,
    INTERNAL_SERVER_ERROR,
    MULTI_STATUS,
    NOT_FOUND,
    OK,
    SERVICE_UNAVAILABLE,
    TOO_MANY_REQUESTS,
)
from penstock.api.ingest.event import RecordError
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import RecordMetadata

log = get_logger(__name__)

Outcome = RecordMetadata | BaseException

AFFECTS_ALL = frozenset({FORBIDDEN, NOT_FOUND, TOO_MANY_REQUESTS})
"""Statuses below 500 of errors that concern the topic or the service, not one record."""


def log_unexpected_outcome(error: BaseException) -> None:
    """Log a record's error that is not a PenstockError, because the response does not contain its text."""
    log.error("sending a record failed", error=type(error).__name__, exc_info=error)


class IngestResult:
    """Counts, the last offset in each partition, and errors of one request.

    `unit` is what a position counts: lines or array indexes. The response, or each line of a streamed one, lists the
    offsets of at most `max_offsets` events; 0 for none.
    """

    def __init__(self, unit: Literal["line", "index"], max_errors: int, max_offsets: int = 0) -> None:
        self.unit = unit
        self.max_errors = max_errors
        self.stored_count = 0
        self.unknown_count = 0
        self.withheld_count = 0
        """Valid events that were not sent because another event of an atomic request is invalid."""
        self.errors: list[RecordError] = []
        self.last_offsets: dict[int, int] = {}
        self.stopped_at: int | None = None
        self.stop_reason = ""
        self._stop_status = SERVICE_UNAVAILABLE
        self._max_offsets = max_offsets
        self._offsets: list[dict[str, int]] = []
        self._lasting_failure = ""
        self._is_unexpected_logged = False
        # The attributes `_popped_…` cover the events that `pop_details` has reported.
        self._popped_statuses: set[int] = set()
        self._popped_count = 0
        self._popped_stored_count = 0
        self._popped_retry_after_s: int | None = None
        self.on_error: Callable[[RecordError], None] | None = None
        """Called once with each error."""
        self.on_stored: Callable[[int], None] | None = None
        """Called by `add_outcomes` with the number of stored events that it has added."""

    def __repr__(self) -> str:
        return f"IngestResult(stored={self.stored_count}, errors={len(self.errors)}, stopped_at={self.stopped_at})"

    def add_errors(self, errors: Iterable[RecordError]) -> None:
        """Add the errors of events that were not sent."""
        for error in errors:
            self._add_error(error)

    def add_outcomes(self, positions: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Add the outcomes of the events at these positions: the broker's acknowledgements, or errors."""
        last = self.last_offsets
        offsets = self._offsets
        stored_before = self.stored_count
        for position, outcome in zip(positions, outcomes, strict=True):
            if not isinstance(outcome, RecordMetadata):
                self._add_failed_record(position, outcome)
                continue
            self.stored_count += 1
            partition = outcome.partition
            offset = outcome.offset
            if offset > last.get(partition, -1):
                last[partition] = offset
            if len(offsets) < self._max_offsets:
                offsets.append({self.unit: position, "partition": partition, "offset": offset})
        if self.on_stored is not None:
            self.on_stored(self.stored_count - stored_before)

    def discard_acknowledgements(self) -> None:
        """Forget the stored events and their offsets. The errors remain."""
        self.stored_count = 0
        self.last_offsets.clear()
        self._offsets.clear()

    def pop_details(self) -> dict[str, Any]:
        """Return what was added since the last call as JSON values, and forget the errors and offsets.

        The row has the number of stored events, the errors, and at most `max_offsets` offsets. The counts remain.
        """
        row: dict[str, Any] = {"stored": self.stored_count - self._popped_stored_count}
        self._popped_stored_count = self.stored_count
        if self.errors:
            row["errors"] = [self._error_row(e) for e in sorted(self.errors, key=lambda e: e.position)]
            self._popped_retry_after_s = self.retry_after_s
            self._popped_count += len(self.errors)
            self._popped_statuses.update(e.status for e in self.errors)
            self.errors.clear()
        if self._offsets:
            row["offsets"] = self._offsets
            row["offsets_omitted"] = row["stored"] - len(self._offsets)
            self._offsets = []
        return row

    def totals(self) -> dict[str, Any]:
        """Return the counts of all events by outcome, and where and why reading stopped early."""
        failed = self._popped_count + len(self.errors)
        totals = {"stored": self.stored_count, "not_stored": failed - self.unknown_count, "unknown": self.unknown_count}
        return totals | self._stop_details()

    def stop(self, position: int, reason: str, status: int = SERVICE_UNAVAILABLE) -> None:
        """Record that reading stopped before `position`. A later call counts only if its position is lower.

        `status` is the response's status if no event was stored and none failed.
        """
        if self.stopped_at is None or position < self.stopped_at:
            self.stopped_at = position
            self.stop_reason = reason
            self._stop_status = status

    @property
    def must_stop(self) -> str:
        """The reason why the rest of the request need not be read, or ""."""
        if len(self.errors) >= self.max_errors:
            return f"there were {len(self.errors)} errors"
        return self._lasting_failure

    @property
    def status(self) -> int:
        """The HTTP status of the response:

        - 200: all events are stored.
        - 207: some events are stored.
        - 500, 504: no event is known to be stored, but some may be.
        - Any other status: no event is stored.
        """
        statuses = self._statuses()
        if not statuses and self.stopped_at is None:
            return OK
        if self.stored_count:
            return MULTI_STATUS
        # No event is known to be stored: the first of these statuses that an error has.
        for status in (GATEWAY_TIMEOUT, INTERNAL_SERVER_ERROR, SERVICE_UNAVAILABLE, TOO_MANY_REQUESTS):
            if status in statuses:
                return status
        # Else the status that all errors share, or 400 for different ones. Without an error, the status given to
        # `stop`.
        if len(statuses) == 1:
            return statuses.pop()
        return BAD_REQUEST if statuses else self._stop_status

    def _statuses(self) -> set[int]:
        """Return the statuses of all errors so far."""
        return self._popped_statuses | {e.status for e in self.errors}

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which failed or unread events may be sent again; None if that would not help."""
        waits = [e.retry_after_s for e in self.errors if e.retry_after_s is not None]
        if self._popped_retry_after_s is not None:
            waits.append(self._popped_retry_after_s)
        if waits:
            return max(waits)
        is_rejected = self._stop_status == BAD_REQUEST or not self._statuses().isdisjoint((FORBIDDEN, NOT_FOUND))
        may_succeed = not is_rejected and len(self.errors) < self.max_errors
        return 1 if self.stopped_at is not None and may_succeed else None

    def body(self) -> dict[str, Any]:
        """Return the response as plain values."""
        body: dict[str, Any] = {
            "stored": self.stored_count,
            "last_offsets": {str(p): self.last_offsets[p] for p in sorted(self.last_offsets)},
        }
        if self._max_offsets:
            body["offsets"] = sorted(self._offsets, key=lambda row: row[self.unit])
            body["offsets_omitted"] = self.stored_count - len(self._offsets)
        if self.status != OK:
            body["not_stored"] = len(self.errors) - self.unknown_count + self.withheld_count
            body["unknown"] = self.unknown_count
            body["errors"] = [self._error_row(e) for e in sorted(self.errors, key=lambda e: e.position)]
        return body | self._stop_details()

    def _stop_details(self) -> dict[str, Any]:
        """Return the members of a response that name the first event that was not read."""
        if self.stopped_at is None:
            return {}
        reason = f"{self.stop_reason}; nothing from here on was read or stored"
        return {f"stopped_at_{self.unit}": self.stopped_at, "stop_reason": reason}

    def _add_error(self, error: RecordError) -> None:
        self.errors.append(error)
        if self.on_error is not None:
            self.on_error(error)

    def _add_failed_record(self, position: int, error: BaseException) -> None:
        kind = kind_of_record_error(error)
        status, error_code, title, retry_after_s = kind
        message = str(error) if isinstance(error, PenstockError) and str(error) else title
        # Every event of the request may have the same error.
        if not isinstance(error, PenstockError) and not self._is_unexpected_logged:
            self._is_unexpected_logged = True
            log_unexpected_outcome(error)
        outcome = failed_outcome(kind)
        self.unknown_count += outcome == "unknown"
        self._add_error(
            RecordError(
                position=position,
                status=status,
                error_code=error_code,
                message=message,
                column=None,
                retry_after_s=retry_after_s,
                outcome=outcome,
            )
        )
        if status in AFFECTS_ALL or status >= INTERNAL_SERVER_ERROR:
            self._lasting_failure = self._lasting_failure or message

    def _error_row(self, error: RecordError) -> dict[str, Any]:
        row: dict[str, Any] = {self.unit: error.position}
        if error.column is not None:
            row["column"] = error.column
        return row | {"error_code": error.error_code, "message": error.message, "outcome": error.outcome}
