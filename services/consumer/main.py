"""`penstock consumer`: the handler daemon as a process."""

from __future__ import annotations

import sys

from penstock.services import service_lifecycle
from penstock.services.consumer.daemon import ConsumerDaemon
from penstock.services.consumer.settings import ConsumerServiceSettings


def main(arguments: list[str]) -> int:
    """Run `penstock consumer` until SIGTERM or SIGINT. The exit status is 2 if a setting or the handler is invalid."""
    return service_lifecycle.serve("penstock consumer", ConsumerServiceSettings, ConsumerDaemon, arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
