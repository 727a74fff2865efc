"""The specs of the demo's services: how a stack starts the aggregator, the consumer and the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.services.local.demo.events import PipelinePlan
from penstock.services.local.demo.handler import FILE_VARIABLE
from penstock.services.local.stack import ServiceSpec

COMPACTION_INTERVAL_MS = 5_000
COMMIT_INTERVAL_MS = 200
# The interval is short because the demo waits for the consumer's last commit.
CONSUMER_COMMIT_INTERVAL_MS = 500
# On two cores and a heap of 1 GB the parallel collectors cost a short job a tenth of its CPU time.
SPARK_CONF = {"spark.driver.extraJavaOptions": "-XX:+UseSerialGC"}


def aggregator_spec(plan: PipelinePlan, bootstrap_servers: str, lake: Path, *, compacts: bool = True) -> ServiceSpec:
    """Return the spec of the demo's aggregator, which runs under exactly_once.

    If `compacts`, the aggregator requests a compaction every five seconds of wall-clock time.
    """
    return ServiceSpec(
        "aggregator",
        {
            "KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "TOPOLOGY": plan.topology,
            "TOPOLOGY_OPTIONS": _encode_json(plan.options),
            "STREAMS__APPLICATION_ID": plan.application,
            "STREAMS__COMMIT_INTERVAL_MS": str(COMMIT_INTERVAL_MS),
            "STREAMS__LAKE": str(lake),
            "STREAMS__GROUP_INSTANCE_ID": "aggregator-1",
            "COMPACTION__ENABLED": "true" if compacts else "false",
            "COMPACTION__INTERVAL_MS": str(COMPACTION_INTERVAL_MS),
            "COMPACTION__SPARK__CONF": _encode_json(SPARK_CONF),
        },
    )


def consumer_group_id(plan: PipelinePlan) -> str:
    """Return the group id of the demo's consumer, which handles the results."""
    return f"notable-{plan.results}"


def consumer_spec(plan: PipelinePlan, bootstrap_servers: str, notable: Path) -> ServiceSpec:
    """Return the spec of the demo's consumer, which keeps the notable sessions in a file."""
    return ServiceSpec(
        "consumer",
        {
            "KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "TOPICS": plan.results,
            "GROUP_ID": consumer_group_id(plan),
            "HANDLER": plan.handler,
            "COMMIT_INTERVAL_MS": str(CONSUMER_COMMIT_INTERVAL_MS),
            "CONSUMER__ISOLATION_LEVEL": "read_committed",
            "CONSUMER__AUTO_OFFSET_RESET": "earliest",
        },
        environment={FILE_VARIABLE: str(notable)},
    )


def gateway_spec(plan: PipelinePlan, bootstrap_servers: str, others: Mapping[str, str]) -> ServiceSpec:
    """Return the spec of the demo's gateway, which receives the events and serves the dashboard."""
    # A user's own file may have events from before 2000; demo.csv_events checks the unit of its times.
    topics = {plan.topic: {"key": plan.key, "time": plan.time, "min_event_time": "1970-01-01"}}
    return ServiceSpec(
        "gateway",
        {
            "KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "INGEST__TOPICS": _encode_json(topics),
            "INGEST__DEFAULT_TOPIC__ALLOWED": "false",
            "GATEWAY_SERVICES": _encode_json(others),
        },
        module="penstock.services.local.gateway",
    )


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
