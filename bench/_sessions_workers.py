"""The CPU cost of a record in `penstock aggregator --workers N`: the CPU of its worker processes, for session counts.

The workers start on an empty topic. Once each runs its share of the partitions they are stopped (SIGSTOP), the topic is
filled, and they continue (SIGCONT). So each worker has its whole backlog from the beginning, and its start is not
counted. The measurement ends when the group has committed all records.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bench._sessions_data import GAP_MS, GRACE_MS, PARTITIONS, fill, make_topic
from bench._side_by_side import Figures
from penstock.services.local.stack import Service, ServiceSpec, Stack
from penstock.shared.clients.admin import Admin
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology

WAIT_SECONDS = 120
POLL_SECONDS = 0.05
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def topology(topic: str, results: str) -> Topology:
    """Session counts by key. The workers load it by its name."""
    builder = StreamsBuilder()
    windows = builder.stream(topic, value=bytes).group_by_key().session_window(gap=GAP_MS, grace=GRACE_MS)
    windows.aggregate("sessions", n=Count()).on_close().to(results)
    return builder.build()


async def session_count(kafka: KafkaSettings, workers: int, count: int, law: str, commit_interval_ms: int) -> Figures:
    """One round, at least once, on its own topic."""
    name = f"workers-{workers}-{time.time_ns()}"
    topic, results = f"{name}-clicks", f"{name}-sessions"
    for each in (topic, results):
        await make_topic(kafka, each)
    async with Admin(kafka) as admin:
        with tempfile.TemporaryDirectory() as folder:
            stack = Stack(Path(folder), hermetic=True)
            settings = {
                "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
                "TOPOLOGY": f"{__name__}:topology",
                "TOPOLOGY_OPTIONS": msgspec.json.encode({"topic": topic, "results": results}).decode(),
                "WORKERS": str(workers),
                "STREAMS__APPLICATION_ID": name,
                "STREAMS__PROCESSING_GUARANTEE": "at_least_once",
                "STREAMS__COMMIT_INTERVAL_MS": str(commit_interval_ms),
                "STREAMS__REPLICATION_FACTOR": "1",
                "STREAMS__STATE_DIR": folder,
                "COMPACTION__ENABLED": "false",
            }
            try:
                service = await stack.start(ServiceSpec(name, settings, arguments=["aggregator"]))
                pids = await _running(service, workers)
                try:
                    _signal(pids, signal.SIGSTOP)
                    await fill(kafka, count, law, topic)
                finally:
                    started, cpu = time.perf_counter(), cpu_seconds(pids)
                    _signal(pids, signal.SIGCONT)
                await _committed(admin, name, topic, count)
                wall, cpu = time.perf_counter() - started, cpu_seconds(pids) - cpu
            finally:
                await stack.stop()
    return {"records_per_second": count / wall, "cpu_us_per_record": cpu / count * 1e6}


async def _running(service: Service, workers: int) -> list[int]:
    """The workers' process ids, once each of them runs its share of the partitions."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            if service.ended:
                raise service.died()
            health = await service.get("/health")
            checks = {} if health is None else health["checks"]
            names = ["tasks"] if workers == 1 else [f"worker-{number}" for number in range(1, workers + 1)]
            facts = [checks.get(each, {}) for each in names]
            if all(each.get("partitions_running") == PARTITIONS // workers for each in facts):
                return [each["pid"] for each in facts]
            await asyncio.sleep(POLL_SECONDS)


async def _committed(admin: Admin, group: str, topic: str, count: int) -> None:
    """Wait until the group has committed all records of the topic."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            offsets = await admin.group_offsets(group)
            if sum(at.offset for partition, at in offsets.items() if partition.topic == topic) >= count:
                return
            await asyncio.sleep(POLL_SECONDS)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def cpu_seconds(pids: Iterable[int]) -> float:
    """The CPU time of these processes, in user and kernel mode."""
    return sum(cpu_ticks(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")) for pid in pids) / TICKS_PER_SECOND


def cpu_ticks(stat: str) -> int:
    """The CPU ticks in a line of `/proc/PID/stat`: fields 14 and 15, counted after the name, which may hold any text.

    >>> cpu_ticks("7 (a b) c) S 1 7 7 0 -1 4194560 100 0 0 0 120 30 0 0 20 0")
    150
    """
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
