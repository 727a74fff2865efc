"""The benchmark of sessions: its limits, and the measurements that need no broker."""

from __future__ import annotations

import pytest

from bench import _kafka_streams, sessions
from bench._sessions_data import LAWS

OPEN_SESSION_BYTES = (50, 300)
"""The allowed range: more than a count and a sum need, and less than one Python object per session."""


def test_every_ratio_and_rate_with_a_limit_is_measured() -> None:
    """Every ratio with a limit is of measured contestants, and every rate with a limit is measured for its kind of
    windows."""
    streams = {
        sessions.row(f"{sessions.KAFKA_STREAMS} {guarantee} count", law)
        for law in sessions.LAWS_OF[sessions.SESSION]
        for guarantee in _kafka_streams.GUARANTEES
    }
    measured = {kind: set(sessions.contestants(laws)) for kind, laws in sessions.LAWS_OF.items()}
    assert {name for *names, _ in sessions.WANTED for name in names} <= measured[sessions.SESSION] | streams
    for kind, rates in sessions.RATES_WANTED.items():
        assert set(rates) <= measured[kind], kind


def test_every_kind_of_windows_has_laws_of_keys() -> None:
    """Each kind of windows has known key distributions, and a row's name can be split into its contestant and
    distribution."""
    assert set(sessions.LAWS_OF) == set(sessions.WINDOWS)
    for laws in sessions.LAWS_OF.values():
        assert set(laws) <= set(LAWS)
        for name in sessions.contestants(laws):
            assert sessions.row(*sessions.parts_of(name)) == name


@pytest.mark.parametrize("kind", list(sessions.WINDOWS))
def test_contestants_that_only_read_run_on_one_topic(kind: str) -> None:
    """The two contestants that only read run on one topic. The others run on the topic of each key distribution."""
    names = sessions.contestants(sessions.LAWS_OF[kind])
    first, *_ = laws = sessions.LAWS_OF[kind]
    assert names[:2] == [sessions.row(sessions.CONSUME, first), sessions.row(sessions.FETCH, first)]
    assert len(names) == len(set(names)) == 2 + len(laws) * len(sessions.OURS)


def test_open_sessions_take_little_memory() -> None:
    """An open session with a count and a mean takes between 50 and 300 bytes."""
    least, most = OPEN_SESSION_BYTES
    assert least < sessions.bytes_per_session(100_000) <= most


def test_a_latency_counts_only_at_the_required_rate() -> None:
    """A latency passes only if it is below its limit and enough records were sent."""
    held = {"p99_ms": 121.0, "offered_per_second": 9_800.0}
    assert sessions.latency_holds("at_least_once", held)
    assert not sessions.latency_holds("at_least_once", held | {"offered_per_second": 9_799.0})
    assert not sessions.latency_holds("at_least_once", held | {"p99_ms": 121.1})
    assert sessions.latency_holds("exactly_once", held | {"p99_ms": 250.0})


@pytest.mark.parametrize(("several", "missed"), [(1.15, False), (1.16, True)])
def test_worker_processes_are_compared_by_cpu(several: float, missed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers are compared with one by CPU per record, not by rate."""
    figures = {
        sessions.workers_row(1): {"records_per_second": 1.0, "cpu_us_per_record": 1.0},
        sessions.workers_row(2): {"records_per_second": 2.0, "cpu_us_per_record": several},
    }
    assert sessions.workers_missed(figures, 2) is missed
    assert f"--workers 2 / --workers 1: {several}" in capsys.readouterr().out
