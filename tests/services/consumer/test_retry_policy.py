"""The decision to retry a failed record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.consumer.retry_policy import GiveUp, Retry, RetryPolicy
from penstock.shared.common.errors import ConfigError, DataError, KafkaTimeout, SerializationError


def test_waits_double_up_to_the_limit() -> None:
    """Without jitter the waits grow by the multiplier up to the limit."""
    policy = RetryPolicy(backoff_ms=100, backoff_max_ms=1_000, jitter=0)
    assert [policy.backoff_after_ms(n, 0.5) for n in (1, 2, 3, 4, 5, 5_000)] == [100, 200, 400, 800, 1_000, 1_000]


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 0.99), st.integers(0, 5_000), st.floats(1, 50))
def test_jitter_stays_within_its_share(
    attempts: int, random: float, jitter: float, start: int, multiplier: float
) -> None:
    """For any random number the wait stays within the jitter's share and never exceeds the limit."""
    policy = RetryPolicy(backoff_ms=start, backoff_max_ms=30_000, jitter=jitter, multiplier=multiplier)
    plain = RetryPolicy(backoff_ms=start, backoff_max_ms=30_000, jitter=0, multiplier=multiplier)
    wait_ms, plain_ms = policy.backoff_after_ms(attempts, random), plain.backoff_after_ms(attempts, random)
    assert plain_ms * (1 - jitter) - 1 <= wait_ms <= min(plain_ms * (1 + jitter) + 1, 30_000)


def test_the_last_attempt_gives_up() -> None:
    """`max_attempts` counts handler calls, including the first."""
    policy = RetryPolicy(max_attempts=2, jitter=0)
    assert policy.decide(OSError(), 1, 0.5) == Retry(100)
    assert policy.decide(OSError(), 2, 0.5) == GiveUp("2 attempts failed")


@pytest.mark.parametrize(
    ("retriable", "not_retriable", "error", "expected"),
    [
        ((Exception,), (DataError,), SerializationError, False),
        ((Exception,), (DataError,), KafkaTimeout, True),
        (("ConnectionError",), (), ConnectionResetError, True),
        (("builtins.ConnectionError",), (), ValueError, False),
        (("penstock.errors.KafkaTimeout",), (), KafkaTimeout, True),
        ((ConnectionResetError,), (OSError,), ConnectionResetError, True),
        ((OSError,), (ConnectionResetError,), ConnectionResetError, False),
        ((OSError,), (OSError,), OSError, False),
    ],
)
def test_the_nearest_named_class_decides(
    retriable: tuple[type | str, ...], not_retriable: tuple[type | str, ...], error: type[Exception], expected: bool
) -> None:
    """The nearest matching base of an exception decides whether it is retried, and a tie is not retried."""
    assert RetryPolicy(retriable=retriable, not_retriable=not_retriable).is_retriable(error) is expected


@pytest.mark.parametrize(
    "options", [{"max_attempts": 0}, {"backoff_ms": -1}, {"backoff_max_ms": 1}, {"multiplier": 0.5}, {"jitter": 1.0}]
)
def test_invalid_limits_are_rejected(options: dict[str, float]) -> None:
    """An invalid limit is a ConfigError with its name."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        RetryPolicy(**options)  # type: ignore[arg-type]
