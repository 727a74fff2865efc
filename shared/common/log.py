"""Sets structlog up once a process: JSON lines for machines, a console form for people, on standard error.

If Penstock is used as a library, it configures nothing. Its log lines go to the standard library's loggers, named by
module (`penstock.shared.clients.producer.producer`), and the program's logging configuration applies. Without a
configuration, Python prints warnings and errors on standard error. If the program has configured structlog, the lines
go to structlog.
"""

from __future__ import annotations

import logging
import sys
from functools import cached_property
from typing import Any, cast

import structlog

from penstock.shared.common.settings import LogSettings


def configure(settings: LogSettings, service: str) -> None:
    """Route structlog and the standard library's logging, such as uvicorn's, through one renderer.

    Unless the level is debug, only critical lines of aiokafka are written. Of httpx, httpcore, py4j and uvicorn's
    access log, at most warnings and errors are written.
    """
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    shared_processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared_processors, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    renderers: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(sort_keys=True)]
        if as_json
        else [
            # With rich installed the default would show local variables, and so passwords and records.
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared_processors,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "py4j"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    # aiokafka logs retries as errors (see shared/clients/connection/security.py), so it logs only at level debug.
    logging.getLogger("aiokafka").setLevel(root.level if settings.level == "debug" else logging.CRITICAL)
    structlog.contextvars.bind_contextvars(service=service)


class _Logger:
    """Chooses the logger at each line, because a module may be imported before logging is set up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._structured = structlog.stdlib.get_logger(name)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._structured if structlog.is_configured() else self._stdlib_logger, method)

    @cached_property
    def _stdlib_logger(self) -> Any:
        return structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=[structlog.stdlib.filter_by_level, _format_event_line],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
        )


def _format_event_line(_: Any, __: str, fields: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """The event and its fields as one text, for a logger without fields."""
    exc_info = fields.pop("exc_info", None)
    line = " ".join([str(fields.pop("event")), *(f"{name}={value!r}" for name, value in fields.items())])
    return (line,), {"exc_info": exc_info}


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module. Events are short phrases; everything else is a field."""
    return cast(structlog.stdlib.BoundLogger, _Logger(name))
