"""Kafka Streams in the benchmark of sessions: `KafkaStreamsSessions.java` in its own JVM.

It first processes as many records for warm-up as are then measured. Without a warm-up, the JVM's compiler takes more
CPU than the records do.

Its jars are locked in `kafka_streams_jars.json`. `scripts/lock_jars.py` resolves them as Maven would, and they are
downloaded from a Maven repository once a user. Java compiles the program when it starts it, so a JDK is needed. If the
JDK or a jar is missing, it is reported as not measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench._peers import measured
from bench._sessions_data import GAP_MS, GRACE_MS
from bench._side_by_side import Figures
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars, read_jar_set

SOURCE = Path(__file__).with_name("KafkaStreamsSessions.java")
JARS = read_jar_set(Path(__file__).with_name("kafka_streams_jars.json"))
GUARANTEES = {"at_least_once": "at_least_once", "exactly_once": "exactly_once_v2"}
"""Kafka Streams' names of the guarantees."""


async def launcher() -> list[str] | str:
    """The command that runs the program, without its arguments, or the reason why there is none."""
    try:
        java = find_java()
        if not java.executable.resolve().with_name("javac").exists():
            return f"{java.home} is a runtime without a compiler; install a JDK"
        return [str(java.executable), "-Xmx1g", "-cp", f"{await fetch_jars(JARS)}/*", str(SOURCE)]
    except PenstockError as e:
        return str(e)


async def session_count(
    name: str, launch: list[str], servers: str, topic: str, guarantee: str, commit_interval_ms: int, records: int
) -> Figures | None:
    """Count sessions of a topic with twice as many records, and write closed sessions to `results_of(name)`."""
    times = [str(GAP_MS), str(GRACE_MS), str(commit_interval_ms)]
    with tempfile.TemporaryDirectory(prefix="kafka-streams-") as folder:
        own = [servers, topic, results_of(name), GUARANTEES[guarantee], *times, str(records), str(records), folder]
        return await measured(name, [*launch, *own])


def results_of(name: str) -> str:
    """The topic of this contestant's results, which is also its application id.

    >>> results_of("kafka streams exactly_once count, zipf keys")
    'kafka-streams-exactly-once-count-zipf-keys'
    """
    return name.replace(",", "").replace(" ", "-").replace("_", "-")
