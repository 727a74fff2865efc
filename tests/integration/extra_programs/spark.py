"""`penstock[spark]`: a batch makes a lake from a file of events, and the table holds its closed window."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
from deltalake import DeltaTable, QueryBuilder

from penstock import Admin, event_time_topic

TOPOLOGY = """
from penstock import Count, StreamsBuilder

def topology(topic):
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(gap=1_800_000)
    windows.aggregate("visits", clicks=Count()).on_close().to(f"{topic}-visits")
    return builder.build()
"""
CLICKS = """
{"user": "ann", "at": "2024-05-01T10:00:00Z"}
{"user": "ann", "at": "2024-05-01T10:10:00Z"}
{"user": "ann", "at": "2024-05-01T12:00:00Z"}
"""


async def create(servers: str, topic: str) -> None:
    async with Admin(servers) as admin:
        await admin.create_topics([event_time_topic(name, 1) for name in (topic, f"{topic}-visits")])


def main(servers: str, topic: str, folder: Path) -> None:
    asyncio.run(create(servers, topic))
    (folder / "visits.py").write_text(TOPOLOGY)
    (folder / "clicks.json").write_text(CLICKS.lstrip())
    settings = {
        "application": topic,
        "lake": f"{folder}/lake",
        "topology": "visits:topology",
        "topology-options": json.dumps({"topic": topic}),
        "files": f"{folder}/clicks.json",
        "format": "json",
        "key-column": "user",
        "timestamp-column": "at",
        "live-from": "earliest",
        "kafka.bootstrap-servers": servers,
        "spark.master": "local[1]",
        "spark.shuffle-partitions": "1",
    }
    command = [
        str(Path(sys.executable).with_name("penstock")),
        "batch",
        *(f"--{n}={v}" for n, v in settings.items()),
    ]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    visits = DeltaTable(f"{folder}/lake/{topic}/closed/visits")
    rows = QueryBuilder().register("visits", visits).execute("SELECT key, clicks FROM visits").read_all()
    print(pyarrow.table(rows).to_pylist())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
