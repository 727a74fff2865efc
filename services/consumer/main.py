"""`penstock consumer`: the handler daemon as a process."""

from __future__ import annotations

import asyncio
import sys

from services.consumer.daemon import ConsumerDaemon
from services.consumer.settings import ConsumerServiceSettings
from shared.common import daemon, log
from shared.common.errors import ConfigError
from shared.common.settings import load_or_exit


def main(arguments: list[str]) -> int:
    """Run until SIGTERM; the exit status (2 for a wrong setting or handler)."""
    settings = load_or_exit(ConsumerServiceSettings, arguments, "penstock consumer")
    log.configure(settings.log, "consumer")
    return asyncio.run(_serve(settings))


async def _serve(settings: ConsumerServiceSettings) -> int:
    try:
        service = ConsumerDaemon(settings)
    except ConfigError as e:
        print(f"penstock consumer: {e}", file=sys.stderr)
        return 2
    return await daemon.run(service, settings.shutdown_timeout_ms)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
