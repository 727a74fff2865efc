"""The aggregator's settings."""

from __future__ import annotations

import pytest

from penstock.services.aggregator.compaction_supervisor import environment
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import ConfigError

TOPOLOGY = "--topology=my.topologies:build"


def load(*flags: str) -> AggregatorSettings:
    return AggregatorSettings.load(flags, program="penstock aggregator", environ={})


def test_only_the_topology_is_required() -> None:
    """All settings but the topology have defaults, and the lake is unset."""
    settings = load(TOPOLOGY)
    assert settings.topology == "my.topologies:build"
    assert (settings.streams.processing_guarantee, settings.streams.lake) == ("exactly_once", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--topology, PENSTOCK_TOPOLOGY"),
        (["--topology=module"], "--topology, PENSTOCK_TOPOLOGY"),
        ([TOPOLOGY, "--streams.application-id=a b"], "streams.application_id"),
        ([TOPOLOGY, "--streams.application-id=.."], "streams.application_id"),
        ([TOPOLOGY, "--streams.processing-guarantee=at_most_once"], "streams.processing_guarantee"),
        ([TOPOLOGY, "--streams.lake="], "streams.lake"),
        ([TOPOLOGY, "--streams.heartbeat-interval-ms=45000"], "must be below session_timeout_ms=45000"),
        ([TOPOLOGY, "--compaction.interval-ms=0"], "compaction.interval_ms"),
        ([TOPOLOGY, "--compaction.spark.driver-memory=lots"], "compaction.spark.driver_memory"),
        ([TOPOLOGY, "--compaction.retention-hours=23"], "compaction.retention_hours"),
    ],
)
def test_an_invalid_value_is_an_error_that_names_it(flags: list[str], message: str) -> None:
    """Missing and invalid settings are a ConfigError that names them."""
    with pytest.raises(ConfigError) as raised:
        load(*flags)
    assert message in str(raised.value)


def test_compaction_jobs_use_the_token_provider() -> None:
    """With OAUTHBEARER compaction is enabled, and its jobs have the same Kafka settings."""
    flags = ("--kafka.security-protocol=SASL_SSL", "--kafka.sasl-mechanism=OAUTHBEARER")
    flags += ("--kafka.sasl-oauth-token-provider=tokens:give", "--streams.lake=lake")
    settings = load(TOPOLOGY, *flags)
    assert settings.compaction.enabled
    job = CompactSettings.load(["--application=a", "--lake=lake"], environ=environment(settings))
    assert job.kafka == settings.kafka
