"""The check of a client's liveness with Kafka, over a client that is silent for as long as a test says."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.http.kafka_liveness import PROBE_SHARE, KafkaLiveness

LIMIT_MS = 1_000


@dataclass
class Client:
    """Implements `penstock.api.http.kafka_liveness.LivenessClient`."""

    silent: float | None = 0.0
    asked: int = 0

    def silent_ms(self) -> float | None:
        return self.silent

    def ping(self) -> None:
        self.asked += 1


def test_silence_beyond_the_limit_is_unhealthy_until_an_answer_comes() -> None:
    """The reason names how long it was silent and the setting; the first answer makes it well again."""
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


def test_a_quiet_client_is_asked_well_before_the_limit() -> None:
    """A member that waits for a rebalance hears nothing for a minute: what counts is that nobody answers a question."""
    client = Client()
    liveness = KafkaLiveness(lambda: client, LIMIT_MS)
    liveness.run_once()
    assert client.asked == 0
    client.silent = LIMIT_MS * PROBE_SHARE
    liveness.run_once()
    liveness.run_once()
    assert client.asked == 2


def test_what_is_not_connected_is_not_healthy() -> None:
    """Neither before there is a client, nor before it is open, nor is it asked anything then."""
    client = Client(silent=None)
    for given in (None, client):
        liveness = KafkaLiveness(lambda given=given: given, LIMIT_MS)  # type: ignore[misc]
        liveness.run_once()
        assert not liveness().ok
        assert "not connected" in liveness().detail
    assert client.asked == 0


def test_the_newest_client_counts() -> None:
    """A member that was fenced is replaced by another one."""
    clients = [Client(silent=LIMIT_MS + 1), Client()]
    liveness = KafkaLiveness(lambda: clients[-1], LIMIT_MS)
    assert liveness().ok
    clients.pop()
    assert not liveness().ok
