"""Kafka's jars: which they are, and how a start waits for them.

They are kept once per user and Kafka version, in `~/.cache/penstock/kafka-4.1.1` (see shared/common/ivy.py).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.ivy import JarSet, announcement, fetch_jars
from penstock.shared.common.java import Java, find_java
from penstock.shared.common.log import configure
from penstock.shared.common.settings import LogSettings

KAFKA_VERSION = "4.1.1"
KAFKA_JARS = JarSet(
    title=f"Kafka {KAFKA_VERSION}",
    folder=f"kafka-{KAFKA_VERSION}",
    artifacts=(
        ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
        # The binding must be the one for slf4j 1.7, which is what Kafka's jars ask for.
        ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3"),
    ),
    needed_bytes=150 * 1024 * 1024,
)


async def kafka_jars(java: Java, environ: Mapping[str, str] | None = None) -> Path:
    """The folder that holds Kafka's jars; downloads them when it is not there yet.

    Takes about a minute the first time. Cancelling it ends the download. Raises JarsUnavailable.
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(fetch_jars, java.executable, KAFKA_JARS, environ, stop=stop)
    finally:
        stop.set()


def main() -> int:
    """Put Kafka's jars into the cache and print their folder; a download and a failure are lines on standard error."""
    configure(LogSettings(level="warning"), "kafka")
    if (said := announcement(KAFKA_JARS)) is not None:
        print(f"penstock: {said}", file=sys.stderr, flush=True)
    try:
        print(asyncio.run(kafka_jars(find_java())))
    except ConfigError as e:
        print(f"penstock: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
