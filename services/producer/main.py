"""`penstock producer`: the producer service as a process."""

from __future__ import annotations

import asyncio
import sys

from services.producer.daemon import ProducerDaemon
from services.producer.settings import ProducerServiceSettings
from shared.common import daemon, log
from shared.common.errors import ConfigError
from shared.common.settings import load_or_exit

PROGRAM = "penstock producer"
WRONG_SETTING = 2


def main(arguments: list[str]) -> int:
    """Run until SIGTERM; the exit status (2 for a wrong setting)."""
    settings = load_or_exit(ProducerServiceSettings, arguments, PROGRAM)
    log.configure(settings.log, "producer")
    try:
        return asyncio.run(_serve(settings))
    except ConfigError as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)
        return WRONG_SETTING


async def _serve(settings: ProducerServiceSettings) -> int:
    return await daemon.run(ProducerDaemon(settings), settings.shutdown_timeout_ms)
