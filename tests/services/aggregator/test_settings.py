"""The aggregator's settings."""

from __future__ import annotations

import pytest

from penstock.services.aggregator.settings import AggregatorSettings
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


def test_an_aggregator_that_cannot_compact_says_so_at_its_start() -> None:
    """Its jobs have no tokens that a function of Python's gives; without a lake or compactions there are no jobs."""
    tokens = ("--kafka.security-protocol=SASL_SSL", "--kafka.sasl-mechanism=OAUTHBEARER")
    tokens += ("--kafka.sasl-oauth-token-provider=tokens:give",)
    assert load(TOPOLOGY, *tokens).streams.lake is None
    assert not load(TOPOLOGY, *tokens, "--streams.lake=lake", "--no-compaction.enabled").compaction.enabled
    with pytest.raises(ConfigError, match=r"kafka\.sasl_mechanism=OAUTHBEARER .* compaction\.enabled=false"):
        load(TOPOLOGY, *tokens, "--streams.lake=lake")
