"""The check of a Kafka client's liveness, with a client that is silent for a time that the test sets."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.http.kafka_liveness import PROBE_SHARE, KafkaLiveness

LIMIT_MS = 1_000


@dataclass
class Client:
    """Implements `penstock.api.http.kafka_liveness.LivenessClient`."""

    silent: float | None = 0.0
    requests: int = 0

    def silent_ms(self) -> float | None:
        return self.silent

    def ping(self) -> None:
        self.requests += 1


def test_silence_beyond_the_limit_is_unhealthy_until_an_answer_comes() -> None:
    """Silence beyond the limit is unhealthy with its duration and the setting, until the next answer."""
    client = Client()
    liveness = KafkaLiveness(lambda: client, LIMIT_MS)
    assert liveness().ok
    client.silent = LIMIT_MS
    assert liveness().ok
    client.silent = LIMIT_MS + 1
    assert (liveness().ok, liveness().detail) == (
        False,
        "no answer from any broker for 1001 ms (kafka_silence_max_ms=1000)",
    )
    client.silent = 0
    assert liveness().ok


def test_a_silent_client_is_probed_before_the_limit() -> None:
    """A client that has been silent for a share of the limit is probed, since it may only be waiting."""
    client = Client()
    liveness = KafkaLiveness(lambda: client, LIMIT_MS)
    liveness.run_once()
    assert client.requests == 0
    client.silent = LIMIT_MS * PROBE_SHARE
    liveness.run_once()
    liveness.run_once()
    assert client.requests == 2


def test_a_missing_or_closed_client_is_unhealthy() -> None:
    """Without an open client the check is unhealthy, and nothing is probed."""
    client = Client(silent=None)
    for given in (None, client):
        liveness = KafkaLiveness(lambda given=given: given, LIMIT_MS)  # type: ignore[misc]
        liveness.run_once()
        assert not liveness().ok
        assert "not connected" in liveness().detail
    assert client.requests == 0


def test_the_newest_client_counts() -> None:
    """The check uses the current client, if a fenced one is replaced."""
    clients = [Client(silent=LIMIT_MS + 1), Client()]
    liveness = KafkaLiveness(lambda: clients[-1], LIMIT_MS)
    assert liveness().ok
    clients.pop()
    assert not liveness().ok
