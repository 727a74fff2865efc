"""The aggregator's settings."""

from __future__ import annotations

import pytest

from penstock.services.aggregator.compaction import environment
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import ConfigError

TOPOLOGY = "--topology=my.topologies:build"


def load(*flags: str) -> AggregatorSettings:
    return AggregatorSettings.load(flags, program="penstock aggregator", environ={})


def test_a_topology_is_all_that_is_needed() -> None:
    """Everything but the topology has a default; without a lake no compaction is configured."""
    settings = load(TOPOLOGY)
    assert settings.topology == "my.topologies:build"
    assert (settings.streams.processing_guarantee, settings.streams.lake) == ("exactly_once", None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--topology, PENSTOCK_TOPOLOGY"),
        (["--topology=module"], "--topology, PENSTOCK_TOPOLOGY"),
        ([TOPOLOGY, "--streams.application-id=a b"], "streams.application_id"),
        ([TOPOLOGY, "--streams.application-id=.."], "streams.application_id"),
        ([TOPOLOGY, "--streams.processing-guarantee=at_most_once"], "streams.processing_guarantee"),
        ([TOPOLOGY, "--streams.lake="], "streams.lake"),
        ([TOPOLOGY, "--streams.heartbeat-interval-ms=45000"], "must be below session_timeout_ms=45000"),
        ([TOPOLOGY, "--compaction.interval-ms=0"], "compaction.interval_ms"),
        ([TOPOLOGY, "--compaction.spark-memory=lots"], "compaction.spark_memory"),
        ([TOPOLOGY, "--compaction.retention-hours=23"], "compaction.retention_hours"),
    ],
)
def test_a_wrong_value_is_refused_by_name(flags: list[str], said: str) -> None:
    """What is missing or wrong is named at start-up."""
    with pytest.raises(ConfigError) as raised:
        load(*flags)
    assert said in str(raised.value)


def test_an_aggregator_that_logs_in_with_tokens_compacts() -> None:
    """Its jobs read Kafka with Penstock's own client, and are told to log in as it does."""
    flags = ("--kafka.security-protocol=SASL_SSL", "--kafka.sasl-mechanism=OAUTHBEARER")
    flags += ("--kafka.sasl-oauth-token-provider=tokens:give", "--streams.lake=lake")
    settings = load(TOPOLOGY, *flags)
    assert settings.compaction.enabled
    job = CompactSettings.load(["--application=a", "--lake=lake"], environ=environment(settings))
    assert job.kafka == settings.kafka
