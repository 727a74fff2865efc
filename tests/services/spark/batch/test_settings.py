"""The settings of `penstock batch`, and the values that it rejects."""

from __future__ import annotations

import pytest

from penstock.services.spark.batch.settings import BatchSettings
from penstock.shared.common.errors import ConfigError

NEEDED = ["--application=visits", "--lake=lake", "--topology=my:build"]
FILES = [*NEEDED, "--files=history/*.parquet"]


def load(*flags: str) -> BatchSettings:
    return BatchSettings.load([*NEEDED, *flags], environ={})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--until=2026-02-30"], "until: .*'2026-02-30'"),
        (["--until=-5"], "until: must not be before 1970"),
        (["--until=1969-12-31"], "until: must not be before 1970"),
        (["--every=often"], "every: .*'often'"),
        (["--every=0s"], "every: .*'0s'"),
        (["--processing-guarantee=at_least_once"], "processing_guarantee: .*at_least_once"),
        (["--live-from=latest"], "live_from: only with files"),
        (["--key-column=a", "--live-from=latest"], "key_column, live_from: only with files"),
        (["--files=f"], "files also need live_from"),
        (["--files=f", "--live-from=2026-02-30"], "live_from: .*'2026-02-30'"),
        (["--files=f", "--live-from=1969-12-31"], "live_from: must not be before 1970"),
        (["--files=f", "--live-from=latest", "--every=5m"], "every: .*files"),
        (["--files=f", "--live-from=latest", "--until=7"], "until: .*files"),
        (["--files=f", "--live-from=latest", "--format=delta"], "format"),
        (["--kafka.security-protocol=SASL_SSL"], "kafka"),
        (["--reader-options=header=true", "--reader-options=Header=false"], "reader_options: .*twice"),
    ],
)
def test_invalid_combinations_are_rejected_by_name(flags: list[str], named: str) -> None:
    """An invalid combination is rejected by name before Spark starts."""
    with pytest.raises(ConfigError, match=named):
        load(*flags)


@pytest.mark.parametrize("live_from", ["earliest", "latest", "0:7", "0:7,1:9", "1357002000000", "2013-01-01T00:00:00Z"])
def test_start_offsets_of_live_from(live_from: str) -> None:
    """Every form of a start offset is a valid setting."""
    assert load("--files=f", f"--live-from={live_from}").live_from == live_from


def test_tasks_go_by_the_streams_settings() -> None:
    """Tasks have the application's stream settings, with the command's values."""
    settings = load("--transaction-timeout-ms=90000", "--max-future-ms=5", "--kafka-timeout-ms=7000")
    streams = settings.streams()
    assert (streams.application_id, streams.lake, streams.changelog_topic) == ("visits", "lake", "visits-changelog")
    assert (streams.transaction_timeout_ms, streams.max_future_ms, streams.topic_wait_ms) == (90_000, 5, 7_000)


def test_locations_that_spark_needs() -> None:
    """They are the lake's location and the files' location as URIs for Hadoop."""
    settings = load("--files=s3://history/*.json", "--live-from=latest")
    assert settings.spark_uris == (settings.tables, "s3a://history/*.json")
    assert load().spark_uris == (settings.tables,)


def test_the_names_of_reader_options_have_no_case() -> None:
    """Spark ignores their case, so the settings have them in lower case."""
    assert load("--reader-options=inferSchema=true").reader_options == {"inferschema": "true"}
