"""What becomes of a record that cannot be handled, by the stage at which that showed.

`dead_letter` sends it to its source's dead-letter topic, `continue` leaves it out and counts it, `fail` stops the task
before it. At `process` a DataError says that the record is bad, not the program: it is a dead letter also under `fail`.
Behind a store it is not the record but one output that they decide about (`output_guard`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.shared.clients.consumer.dead_letters import STAGE_DESERIALIZE, STAGE_PROCESS
from penstock.shared.common.errors import ConfigError, DataError

ExceptionHandler = Literal["dead_letter", "continue", "fail"]


@dataclass(frozen=True, slots=True)
class ErrorHandlers:
    """One a stage: reading key, value and timestamp; the nodes; writing what they sent on."""

    deserialize: ExceptionHandler = "dead_letter"
    process: ExceptionHandler = "dead_letter"
    produce: ExceptionHandler = "dead_letter"

    def __post_init__(self) -> None:
        """ConfigError for a handler that there is not."""
        for stage in ("deserialize", "process", "produce"):
            if (handler := getattr(self, stage)) not in get_args(ExceptionHandler):
                known = ", ".join(get_args(ExceptionHandler))
                raise ConfigError(f"ErrorHandlers: {stage} must be one of {known}, got {handler!r}")

    def of(self, stage: str, error: Exception) -> tuple[ExceptionHandler, str]:
        """What to do about this error, and the reason why, for a message.

        >>> handlers = ErrorHandlers(process="fail")
        >>> handlers.of("process", ValueError())
        ('fail', 'processing_exception_handler is fail')
        >>> handlers.of("process", DataError())[0]
        'dead_letter'
        """
        if stage == STAGE_DESERIALIZE:
            return self.deserialize, f"deserialization_exception_handler is {self.deserialize}"
        if stage == STAGE_PROCESS:
            handler = "dead_letter" if self.process == "fail" and isinstance(error, DataError) else self.process
            return handler, f"processing_exception_handler is {self.process}"
        return self.produce, f"production_exception_handler is {self.produce}"


DEAD_LETTERS = ErrorHandlers()
