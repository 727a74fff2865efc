"""`penstock admin`: the admin service as a process."""

from __future__ import annotations

import asyncio
import sys

from services.admin.daemon import AdminDaemon
from services.admin.settings import AdminServiceSettings
from shared.common import daemon, log
from shared.common.errors import ConfigError
from shared.common.settings import load_or_exit

PROGRAM = "penstock admin"
WRONG_SETTING = 2


def main(arguments: list[str]) -> int:
    """Run until SIGTERM; the exit status (2 for a wrong setting)."""
    settings = load_or_exit(AdminServiceSettings, arguments, PROGRAM)
    log.configure(settings.log, "admin")
    try:
        return asyncio.run(_serve(settings))
    except ConfigError as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)
        return WRONG_SETTING


async def _serve(settings: AdminServiceSettings) -> int:
    return await daemon.run(AdminDaemon(settings), settings.shutdown_timeout_ms)
