"""The decision on an error: retry, tolerate, or fail the task (`errors.*`).

Any error of a conversion or transform may be tolerated, and any error of a record that a sink reports. Under
at-least-once, the same holds for a source's record that Kafka rejects.

A conversion or transform with a retriable error is repeated until `errors.retry.timeout` has passed since its first
attempt. The first delay is 300 ms, and each delay is twice the previous one, up to `errors.retry.delay.max.ms`. After
that each delay is a random time below this maximum.

If the retries fail, or the error is not retriable, the record has failed. It is logged and sent to the DLQ if the
connector configures that. Then the task fails under `errors.tolerance=none`, and the record is skipped under `all`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from penstock.shared.common.errors import RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import ToleranceExceeded, summary_of
from penstock.shared.connect.redaction import unmasked
from penstock.shared.connect.runtime.task_metrics import TaskMetrics

log = get_logger(__name__)

T = TypeVar("T")

RETRIES_DELAY_MIN_MS = 300
# The delay doubles at most this often, up to 10,000 years. The limit keeps the number small.
RETRIES_DELAY_SHIFT_MAX = 40
CHECK_MS = 100
"""How often a wait checks whether the task is to stop or pause."""
LOG_MS = 10_000
"""The log reports at most this often that a conversion is still being retried."""


class Stage(Enum):
    """The stage at which a record failed. The log and the context headers of dead letters contain its name."""

    TRANSFORMATION = "TRANSFORMATION"
    TASK_PUT = "TASK_PUT"
    KEY_CONVERTER = "KEY_CONVERTER"
    VALUE_CONVERTER = "VALUE_CONVERTER"
    HEADER_CONVERTER = "HEADER_CONVERTER"
    KAFKA_PRODUCE = "KAFKA_PRODUCE"


@dataclass(frozen=True)
class ErrorSettings:
    """A connector's `errors.*`."""

    retry_timeout_ms: int = 0
    retry_delay_max_ms: int = 60_000
    tolerate: bool = False
    log: bool = False
    log_messages: bool = False
    dead_letter_topic: str = ""
    dead_letter_replication_factor: int = 3
    dead_letter_headers: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ErrorSettings:
        """Return the settings from a connector's parsed settings."""
        dlq = "errors.deadletterqueue."
        return cls(
            values["errors.retry.timeout"],
            values["errors.retry.delay.max.ms"],
            values["errors.tolerance"].lower() == "all",
            values["errors.log.enable"],
            values["errors.log.include.messages"],
            values.get(f"{dlq}topic.name") or "",
            values.get(f"{dlq}topic.replication.factor", 3),
            values.get(f"{dlq}context.headers.enable", False),
        )

    @property
    def reports(self) -> bool:
        """Return whether errors are tolerated, logged or sent to the DLQ. Then a sink task gets an error reporter."""
        return self.tolerate or self.log or bool(self.dead_letter_topic)


@dataclass(frozen=True)
class Failure:
    """One record's failure: its stage, the class that executed, the error, and the number of attempts."""

    stage: Stage
    executing_class: type
    error: Exception
    attempt: int = 1

    def __str__(self) -> str:
        return f"{self.stage.name} by {self.executing_class.__name__}: {type(self.error).__name__}: {self.error}"


class RetryWithToleranceOperator:
    """Decides on errors, and counts them."""

    def __init__(self, settings: ErrorSettings, metrics: TaskMetrics, rng: random.Random | None = None) -> None:
        self.settings = settings
        self._metrics = metrics
        self._random = rng or random.Random()  # noqa: S311  # spreads retries

    def __repr__(self) -> str:
        return f"<RetryWithToleranceOperator {self.settings}>"

    def retry_after(self, error: Exception, attempt: int, started_ms: int, now_ms: int) -> int | None:
        """Return the delay in ms before the next attempt of the operation, or None if there is none.

        `attempt` is the number of the failed attempt, from 1. `started_ms` is the start of the first attempt.
        """
        if not isinstance(error, RetriableError):
            return None
        self._metrics.add("total_record_failures")
        timeout_ms = self.settings.retry_timeout_ms
        if timeout_ms != -1 and now_ms - started_ms >= timeout_ms:
            return None
        self._metrics.add("total_retries")
        # As in RetryWithToleranceOperator.backoff: beyond the maximum the delay is random, so that tasks that failed
        # together do not retry together.
        delay_ms = RETRIES_DELAY_MIN_MS << min(attempt - 1, RETRIES_DELAY_SHIFT_MAX)
        if delay_ms > self.settings.retry_delay_max_ms:
            delay_ms = self._random.randrange(max(1, self.settings.retry_delay_max_ms))
        # The last attempt is at the end of the timeout, and not a whole delay after it.
        left_ms = started_ms + timeout_ms - now_ms
        return delay_ms if timeout_ms == -1 else min(delay_ms, left_ms)

    def failed(self, failure: Failure, now_ms: int) -> None:
        """Count a failed record. Raises ToleranceExceeded if the failure is not tolerated.

        The caller must report the failure (log, dead letter) before. As in Kafka Connect, failures that are not
        tolerated are reported too.
        """
        self._metrics.set("last_error_timestamp", now_ms)
        if not isinstance(failure.error, RetriableError):
            self._metrics.add("total_record_failures")
        if not self.settings.tolerate:
            self._metrics.add("total_record_errors")
            raise ToleranceExceeded(f"Tolerance exceeded in error handler: {failure}") from failure.error
        self._metrics.add("total_records_skipped")


class Interrupted(Exception):
    """Leaves a conversion because the task is to stop or pause; it is no error.

    The current record is converted after the pause, or by the next task.
    """


class RetryWaits:
    """The waits of one task's conversions. A wait ends early when `is_over` returns True.

    With `errors.retry.timeout=-1` a conversion is retried forever while a schema registry is down, and the task stays
    RUNNING. `since_ms` and a periodic log line report that the task makes no progress.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._logged_ms: int | None = None
        self.since_ms: int | None = None
        """When the wait of the current operation on one record began, monotonic, or None if none waits."""
        self.is_over: Callable[[], bool] = lambda: False
        self.mask: Callable[[str], str] = unmasked

    def __repr__(self) -> str:
        return f"<RetryWaits of {self._task}, {'none' if self.since_ms is None else f'since {self.since_ms} ms'}>"

    def begin(self, now_ms: int) -> None:
        """Record that an operation cannot be completed at once."""
        self.since_ms = now_ms
        self._logged_ms = None

    def end(self) -> None:
        """Record that the operation no longer waits."""
        self.since_ms = None

    def failed(self, what: str, error: Exception, now_ms: int) -> None:
        """Log that the operation will be tried again: the first time, and then at most every `LOG_MS`."""
        if self._logged_ms is None or now_ms - self._logged_ms >= LOG_MS:
            self._logged_ms = now_ms
            for_ms = 0 if self.since_ms is None else now_ms - self.since_ms
            log.warning(
                "conversion will be retried",
                task=self._task,
                stage=what,
                error=self.mask(summary_of(error)),
                for_ms=for_ms,
            )

    async def wait_for(self, what: Awaitable[T]) -> T:
        """Await an awaitable and return its result. If the task is to stop or pause meanwhile, cancel the awaitable
        and raise Interrupted."""
        doing = asyncio.ensure_future(what)
        try:
            while not doing.done():
                if self.is_over():
                    raise Interrupted
                await asyncio.wait((doing,), timeout=CHECK_MS / 1000)
            return doing.result()
        finally:
            if not doing.done():
                doing.cancel()
                await asyncio.wait((doing,))
