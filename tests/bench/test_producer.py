"""The producers' bench on a small scale: every contestant writes all its records."""

from __future__ import annotations

import pytest
from anyio.from_thread import start_blocking_portal

from bench import producer
from penstock.shared.testing.fake_broker import FakeCluster

RECORDS = 2_000


def test_the_payload_is_as_described() -> None:
    """Values have about 100 bytes and are all different. Keys repeat."""
    keys, values = producer.payloads(producer.KEYS + 10)
    assert keys[producer.KEYS :] == keys[:10]
    assert len(set(values)) == len(values)
    assert 90 <= sum(map(len, values)) / len(values) <= 110


@pytest.mark.parametrize("contestant", producer.CONTESTANTS)
def test_a_round(contestant: str) -> None:
    """A round writes each record twice (for the warm-up and the measurement), in the partition of its key, and has all
    figures."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(FakeCluster()) as cluster:
        portal.call(lambda: cluster.create_topic(producer.TOPIC, partitions=producer.PARTITIONS))
        figures = producer.run_one(contestant, cluster.bootstrap_servers, RECORDS)
        found = portal.call(cluster.records, producer.TOPIC)
    assert set(figures) == {"records_per_second", "cpu_us_per_record", "p99_ms"}
    assert all(figure > 0 for figure in figures.values())
    _, values = producer.payloads(RECORDS)
    assert sorted(record.value or b"" for record in found) == sorted(2 * values)
    where = {record.key: record.partition for record in found}
    assert all(where[record.key] == record.partition for record in found)
    assert len(set(where.values())) == producer.PARTITIONS


def test_a_profile() -> None:
    """A profile lists the functions of a contestant by their own time."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(FakeCluster()) as cluster:
        portal.call(lambda: cluster.create_topic(producer.TOPIC, partitions=producer.PARTITIONS))
        profile = producer.profiled("penstock send", cluster.bootstrap_servers, RECORDS)
    assert "Ordered by: internal time" in profile
    assert "producer.py" in profile


def test_the_wanted_ratios_are_of_contestants() -> None:
    """Each wanted ratio is of two contestants and above 1."""
    for ours, theirs, least in producer.WANTED:
        assert {ours, theirs} <= set(producer.CONTESTANTS)
        assert least > 1
