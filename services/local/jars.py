"""Kafka's jars: which they are, and the command that puts them into the cache.

They are kept once per user and Kafka version, in `~/.cache/penstock/kafka-4.1.1` (see shared/common/jars.py).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.jars import announcement, fetch_jars, read_jar_set
from penstock.shared.common.log import configure
from penstock.shared.common.settings import LogSettings

KAFKA_VERSION = "4.1.1"
KAFKA_JARS = read_jar_set(Path(__file__).with_name("kafka_jars.json"))


def main() -> int:
    """Put Kafka's jars into the cache and print their folder; a download and a failure are lines on standard error."""
    configure(LogSettings(level="warning"), "kafka")
    try:
        if (said := announcement(KAFKA_JARS)) is not None:
            print(f"penstock: {said}", file=sys.stderr, flush=True)
        print(asyncio.run(fetch_jars(KAFKA_JARS)))
    except ConfigError as e:
        print(f"penstock: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
