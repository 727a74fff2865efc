"""Error handlers: the reaction to a record that cannot be processed, for each stage.

`dead_letter` sends the record to its source's dead-letter topic. `continue` skips and counts the record. `fail` ends
the worker; the task's position stays before the record. In the stage `process` a DataError means that the record is
invalid, not the program. So even under `fail` it makes the record a dead letter. Once a store has taken the record, the
handlers decide about a single output instead of the record (`output_guard`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.shared.clients.dead_letters.dead_letter import STAGE_DESERIALIZE, STAGE_PROCESS
from penstock.shared.common.errors import ConfigError, DataError

ExceptionHandler = Literal["dead_letter", "continue", "fail"]


@dataclass(frozen=True, slots=True)
class ErrorHandlers:
    """The handler of each stage: reading key, value and timestamp; processing in the nodes; encoding the outputs."""

    deserialize: ExceptionHandler = "dead_letter"
    process: ExceptionHandler = "dead_letter"
    produce: ExceptionHandler = "dead_letter"

    def __post_init__(self) -> None:
        """Raise ConfigError if a handler is unknown."""
        for stage in ("deserialize", "process", "produce"):
            if (handler := getattr(self, stage)) not in get_args(ExceptionHandler):
                known = ", ".join(get_args(ExceptionHandler))
                raise ConfigError(f"ErrorHandlers: {stage} must be one of {known}, got {handler!r}")

    def of(self, stage: str, error: Exception) -> tuple[ExceptionHandler, str]:
        """Return the handler for this error, and the reason for a message.

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
