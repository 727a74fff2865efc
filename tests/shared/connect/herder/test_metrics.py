"""A worker's metrics, with Kafka Connect's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from penstock.shared.clients.producer import Producer
from penstock.shared.common.metrics import render
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector
from penstock.shared.connect.herder.metrics import ConnectMetrics
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import TargetState
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.storage.cluster_config_state import ConfigSnapshot
from tests.shared.connect.harness import RecordingSink, RecordingSource, Running, running


class FakeHerder:
    """The source of the metrics: a worker, and fixed values of a group."""

    def __init__(self, run: Running) -> None:
        self.worker: Worker = run.worker
        self.plugins: Plugins = run.worker.plugins

    def snapshot(self) -> ConfigSnapshot:
        return ConfigSnapshot()

    def startup_metrics(self) -> Mapping[str, float]:
        return {"task_startup_attempts_total": 1.0}

    def rebalance_metrics(self) -> Mapping[str, float]:
        return {"completed_rebalances_total": 2.0, "rebalance_max_time_ms": 5.0}

    def rebalance_texts(self) -> Mapping[str, str]:
        return {"leader_name": "http://a:8083/"}


def exposed(run: Running) -> dict[str, Any]:
    """Every sample by its name, and the types by the family's name."""
    registry = CollectorRegistry()
    ConnectMetrics(cast(Any, FakeHerder(run)), registry)
    families = list(text_string_to_metric_families(render(registry).decode()))
    samples = {sample.name: sample for family in families for sample in family.samples}
    return {"samples": samples, "types": {family.name: family.type for family in families}}


SINK = """sink_record_read_rate sink_record_read_total sink_record_send_rate sink_record_send_total
sink_record_active sink_record_active_count_avg sink_record_active_count_max sink_record_lag_max partitions
offset_commit_seq_no offset_commit_completion_rate offset_commit_completion_total offset_commit_skip_rate
offset_commit_skip_total put_batch_avg_time_seconds put_batch_max_time_seconds"""
SOURCE = """source_record_poll_rate source_record_poll_total source_record_write_rate source_record_write_total
source_record_active source_record_active_count_avg source_record_active_count_max poll_batch_avg_time_seconds
poll_batch_max_time_seconds transaction_size_avg transaction_size_min transaction_size_max"""
TASK = """batch_size_avg batch_size_max offset_commit_avg_time_seconds offset_commit_max_time_seconds
offset_commit_success_ratio offset_commit_failure_ratio running_ratio pause_ratio status"""
ERRORS = """record_failures_total record_errors_total records_skipped_total retries_total errors_logged_total
deadletterqueue_produce_requests_total deadletterqueue_produce_failures_total last_error_timestamp_seconds"""


@pytest.mark.parametrize(
    ("connector", "group", "own"), [(RecordingSink, "sink", SINK), (RecordingSource, "source", SOURCE)]
)
async def test_a_task_has_kafka_connects_metrics(connector: type, group: str, own: str) -> None:
    """Each task has every metric of Kafka Connect's table, under its group's name and with Prometheus' units."""
    async with running() as run:
        await run.run(connector, **({"topics": "t"} if group == "sink" else {}))
        names = exposed(run)["samples"].keys()
        groups = {f"{group}_task_metrics": own, "connector_task_metrics": TASK, "task_error_metrics": ERRORS}
        wanted = {f"kafka_connect_{group}_{name}" for group, text in groups.items() for name in text.split()}
        assert not wanted - names


async def test_task_metrics_count_records() -> None:
    """Task metrics count records, the running ratio and commits, and totals are counters."""
    async with running() as run:
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            await producer.send("t", b"x")
        await run.run(RecordingSink, topics="t")

        def values() -> dict[str, float]:
            return {name.removeprefix("kafka_connect_"): s.value for name, s in exposed(run)["samples"].items()}

        await run.until(lambda: values().get("sink_task_metrics_sink_record_send_total") == 1.0)
        assert values()["sink_task_metrics_sink_record_send_rate"] > 0
        assert 0 < values()["connector_task_metrics_running_ratio"] <= 1
        await run.until(lambda: values()["connector_task_metrics_offset_commit_success_ratio"] == 1.0)
        found = exposed(run)
        assert found["types"]["kafka_connect_sink_task_metrics_sink_record_send"] == "counter"
        assert found["types"]["kafka_connect_sink_task_metrics_partitions"] == "gauge"
        assert found["types"]["kafka_connect_task_error_metrics_retries"] == "counter"


async def test_the_worker_and_its_group_are_counted() -> None:
    """Worker metrics count connectors and task startups, and show rebalances and the leader."""
    async with running() as run:
        props = {"name": "c", "connector.class": "FileStreamSink", "topics": "t", "file": "x"}
        run.worker.plugins.add(FileStreamSinkConnector, "FileStreamSink")
        await run.worker.start_connector("c", props, TargetState.STARTED, run.listener)
        samples = exposed(run)["samples"]
        assert samples["kafka_connect_connect_worker_metrics_connectors"].value == 1.0
        assert samples["kafka_connect_connect_worker_metrics_task_startup_attempts_total"].value == 1.0
        assert samples["kafka_connect_connect_worker_rebalance_metrics_rebalance_max_time_seconds"].value == 0.005
        assert samples["kafka_connect_connect_worker_rebalance_metrics_leader_name"].labels == {
            "leader_name": "http://a:8083/"
        }
