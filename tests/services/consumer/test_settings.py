"""Settings of the consumer service."""

from __future__ import annotations

import pytest

from penstock.services.consumer.handler_loop import GIVE_UP_COMMIT_TIMEOUT_MS
from penstock.services.consumer.settings import GIVE_UP_RESERVE_MS, UNCOMPRESSED_BYTES_MAX, ConsumerServiceSettings
from penstock.services.consumer.transactor import CLOSE_TIMEOUT_MS
from penstock.shared.clients.producer import ProducerSettings
from penstock.shared.common.errors import ConfigError, DataError, KafkaTimeout

NEEDED = ["--topics", "clicks", "--group-id", "alerts", "--handler", "app:handle"]


def load(*arguments: str, **environ: str) -> ConsumerServiceSettings:
    return ConsumerServiceSettings.load([*NEEDED, *arguments], environ=environ)


def test_the_reserve_of_a_shutdown_is_enough_without_kafka() -> None:
    """The last commit, and then the closes of a producer and of the consumer, take their whole time in an outage."""
    assert GIVE_UP_COMMIT_TIMEOUT_MS + 2 * CLOSE_TIMEOUT_MS < GIVE_UP_RESERVE_MS


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["--topics=a,b"], {}),
        (["--topics", "a", "--topics", "b"], {}),
        ([], {"PENSTOCK_TOPICS": "a, b"}),
    ],
)
def test_topics_are_one_text_or_several(arguments: list[str], environ: dict[str, str]) -> None:
    """The flag for topics may be repeated or contain commas, and the variable contains commas."""
    settings = ConsumerServiceSettings.load([*NEEDED[2:], *arguments], environ=environ)
    assert settings.topics == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--dead-letter-topic", "clicks"], "dead_letter_topic"),
        (["--topics", "clicks,clicks-dlq"], "dead_letter_topic"),
        (["--consumer.group-id", "other"], "--consumer.group-id"),
        (["--consumer.commit-strategy", "auto"], "--consumer.commit-strategy"),
        (["--producer.acks", "1", "--no-producer.enable-idempotence"], "producer.acks: a dead letter"),
        (["--producer.transactional-id", "t"], "producer.transactional_id"),
        (
            ["--processing-guarantee=exactly_once", "--consumer.isolation-level=read_uncommitted"],
            "consumer.isolation_level",
        ),
        (["--retry.backoff-max-ms", "1"], "retry.backoff_max_ms"),
        (["--shutdown-timeout-ms", str(GIVE_UP_RESERVE_MS)], "shutdown_timeout_ms"),
        (["--consumer.listener-timeout-ms", "5000"], "consumer.listener_timeout_ms"),
        (["--ordering", "none"], "ordering"),
        (["--max-attempts", "0"], "max_attempts"),
        (["--retry.jitter", "1"], "retry.jitter"),
        (["--retry.backoff-ms=-1"], "retry.backoff_ms"),
        (["--retry.multiplier", "0.5"], "retry.multiplier"),
    ],
)
def test_invalid_settings_are_an_error(arguments: list[str], named: str) -> None:
    """An invalid or contradicting setting is a ConfigError with its name."""
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        load(*arguments)


@pytest.mark.parametrize(("listener_timeout_ms", "max_poll_interval_ms"), [(30_000, 40_000), (40_000, 30_000)])
def test_a_drain_leaves_time_for_the_last_commit(listener_timeout_ms: int, max_poll_interval_ms: int) -> None:
    """The drain has the shorter of the listener's two limits, minus the reserve for the last commit."""
    settings = load(
        "--consumer.listener-timeout-ms", str(listener_timeout_ms),
        "--consumer.max-poll-interval-ms", str(max_poll_interval_ms),
    )  # fmt: skip
    assert settings.handler_loop_options().drain_timeout_ms == 30_000 - GIVE_UP_RESERVE_MS


def test_missing_settings_are_named() -> None:
    """Missing required settings are a ConfigError with their names."""
    with pytest.raises(ConfigError, match=r"topics.*group_id.*handler"):
        ConsumerServiceSettings.load([], environ={})
    with pytest.raises(ConfigError, match="topics"):
        ConsumerServiceSettings.load([*NEEDED[2:], "--topics", ","], environ={})


def test_settings_reach_the_components() -> None:
    """The scheduler, the retry policy and the client have the settings' limits, and only the runner commits."""
    settings = load(
        "--ordering=partition", "--max-concurrency=7", "--batch-records-max=9", "--max-attempts=2",
        "--retry.retriable=KafkaTimeout", "--consumer.max-poll-records=50", "--consumer.group-instance-id=one",
    )  # fmt: skip
    scheduler = settings.scheduler(batch=True)
    assert (scheduler.ordering, scheduler.max_concurrency, scheduler.batch_records_max) == ("partition", 7, 9)
    assert settings.scheduler(batch=False).batch_records_max == 1
    policy = settings.retry_policy()
    assert policy.max_attempts == 2
    assert (policy.is_retriable(KafkaTimeout), policy.is_retriable(OSError)) == (True, False)
    assert not load().retry_policy().is_retriable(DataError)
    client = settings.consumer_settings()
    assert (client.group_id, client.commit_strategy, client.max_poll_records) == ("alerts", "none", 50)
    assert client.group_instance_id == "one"


def test_settings_of_exactly_once() -> None:
    """Exactly-once reads committed records and commits often; each member has its own
    transactional id, which a static member keeps.
    """
    once = load("--processing-guarantee", "exactly_once")
    assert once.consumer_settings().isolation_level == "read_committed"
    assert once.handler_loop_options().commit_interval_ms == 100
    first, second = once.producer_settings(2_000_000), once.producer_settings(0)
    assert first.max_request_size == UNCOMPRESSED_BYTES_MAX
    assert once.producer_settings(2 * UNCOMPRESSED_BYTES_MAX).max_request_size == once.producer.buffer_memory
    assert first.compression_type == "zstd"
    assert first.transaction_timeout_ms == 10_000
    assert str(first.transactional_id).startswith("alerts-")
    assert first.transactional_id != second.transactional_id
    assert (once.producer.compression_type, once.producer.transaction_timeout_ms) == ("zstd", 10_000)  # as in --help
    other = load(
        "--processing-guarantee=exactly_once", "--producer.linger-ms=1", "--consumer.max-poll-records=1"
    ).producer_settings(0)
    assert (other.linger_ms, other.compression_type, other.transaction_timeout_ms) == (1, "zstd", 10_000)
    own = once.model_copy(update={"producer": ProducerSettings(linger_ms=1)}).producer_settings(0)
    assert (own.linger_ms, own.compression_type, own.transaction_timeout_ms) == (1, "zstd", 10_000)
    static = load("--processing-guarantee=exactly_once", "--consumer.group-instance-id=one", "--commit-interval-ms=250")
    assert static.producer_settings(0).transactional_id == "alerts-one"
    assert static.handler_loop_options().commit_interval_ms == 250
    named = load(
        "--processing-guarantee=exactly_once", "--producer.transactional-id=t", "--producer.transaction-timeout-ms=5000"
    )
    assert (named.producer_settings(0).transactional_id, named.producer_settings(0).transaction_timeout_ms) == (
        "t",
        5_000,
    )
    plain = load()
    assert plain.producer_settings(0).transactional_id is None
    assert plain.handler_loop_options().commit_interval_ms == 5_000
