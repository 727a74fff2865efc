"""The peers of the benchmark of sessions, each run as its own documentation shows. Needs nothing of Penstock.

It runs in a Python environment that has `bytewax` and `quixstreams`, which may differ from the benchmark's:

    python bench/_session_peers.py --list
    python bench/_session_peers.py --one NAME --servers HOST:PORT --topic TOPIC --records N

`--list` prints the peers that can be imported, one a line. `--one` prints its figures as JSON in the last line: records
per second and CPU microseconds a record of this process. Bytewax counts sessions (gap 30 min, waiting 5 min for late
records) and writes them to a topic, without recovery. Its time runs from the first record to its end. Quix Streams
counts tumbling windows of 30 min, at least once, with its changelog and RocksDB, and writes closed windows to a topic.
Its time runs from the first record to the last, without the commit that follows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from typing import Any

GAP, GRACE = timedelta(minutes=30), timedelta(minutes=5)
IDLE_SECONDS = 5.0
PEERS = {"bytewax session count": "bytewax", "quix tumbling count": "quixstreams"}


class Stopwatch:
    """Wall and CPU time from the first of `records` records to the last."""

    def __init__(self, records: int) -> None:
        self.left = self.records = records
        self.wall = self.cpu = 0.0
        self.last = (0.0, 0.0)

    def seen(self) -> None:
        """Count one more record."""
        if self.left == self.records:
            self.wall, self.cpu = time.perf_counter(), time.process_time()
        self.left -= 1
        if self.left == 0:
            self.last = time.perf_counter(), time.process_time()

    def figures(self, *, to_last_record: bool = False) -> dict[str, float]:
        """The figures up to now, or up to the last record."""
        if self.left:
            raise SystemExit(f"{self.left} of {self.records} records did not come")
        wall_end, cpu_end = self.last if to_last_record else (time.perf_counter(), time.process_time())
        wall, cpu = wall_end - self.wall, cpu_end - self.cpu
        return {"records_per_second": self.records / wall, "cpu_us_per_record": cpu / self.records * 1e6}


def bytewax_sessions(servers: str, topic: str, records: int) -> dict[str, float]:
    """Session counts with Bytewax: from Kafka to Kafka, without recovery."""
    import bytewax.operators as op
    import bytewax.operators.windowing as win
    from bytewax.connectors.kafka import KafkaSinkMessage
    from bytewax.connectors.kafka import operators as kafka
    from bytewax.dataflow import Dataflow
    from bytewax.testing import run_main

    watch = Stopwatch(records)

    def keyed(message: Any) -> tuple[str, Any]:
        watch.seen()
        return message.key.decode(), message

    def timed(message: Any) -> datetime:
        return datetime.fromtimestamp(message.timestamp[1] / 1000, UTC)

    def result(one: tuple[str, tuple[int, int]]) -> Any:
        key, (_, count) = one
        return KafkaSinkMessage(key.encode(), b'{"n":%d}' % count)

    flow = Dataflow("sessions")
    read = kafka.input("in", flow, brokers=[servers], topics=[topic], tail=False)
    by_key = op.map("keyed", read.oks, keyed)
    clock = win.EventClock(timed, wait_for_system_duration=GRACE)
    windows = win.fold_window(
        "count", by_key, clock, win.SessionWindower(gap=GAP), lambda: 0, lambda n, _: n + 1, lambda a, b: a + b
    )
    kafka.output("out", op.map("result", windows.down, result), brokers=[servers], topic="results-bytewax")
    run_main(flow)
    return watch.figures()


def quix_tumbling(servers: str, topic: str, records: int) -> dict[str, float]:
    """Tumbling counts with Quix Streams: at least once, with its changelog."""
    from quixstreams import Application

    logging.disable(logging.WARNING)
    watch = Stopwatch(records)

    def seen(value: Any) -> None:
        watch.seen()

    with tempfile.TemporaryDirectory(prefix="quix-") as folder:
        application = Application(
            broker_address=servers,
            consumer_group=f"quix-{time.time_ns()}",
            auto_offset_reset="earliest",
            loglevel=None,
            state_dir=folder,
        )
        source = application.topic(topic, value_deserializer="json", key_deserializer="str")
        results = application.topic("results-quixstreams", value_serializer="json", key_serializer="str")
        frame = application.dataframe(source).update(seen)
        frame.tumbling_window(GAP, grace_ms=GRACE).count().final().to_topic(results)
        application.run(timeout=IDLE_SECONDS)  # ends after this time without records
    return watch.figures(to_last_record=True)


RUN = {"bytewax session count": bytewax_sessions, "quix tumbling count": quix_tumbling}


def main() -> int:
    """List the peers, or run one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", choices=sorted(PEERS))
    parser.add_argument("--servers", default="localhost:9092")
    parser.add_argument("--topic", default="")
    parser.add_argument("--records", type=int, default=0)
    given = parser.parse_args()
    if given.list or given.one is None:
        print("\n".join(name for name, module in PEERS.items() if importlib.util.find_spec(module) is not None))
        return 0
    print(json.dumps(RUN[given.one](given.servers, given.topic, given.records)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
