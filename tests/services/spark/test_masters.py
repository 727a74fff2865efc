"""A standalone master that is not there is told at once."""

from __future__ import annotations

import socket

import pytest

from penstock.services.spark.masters import addresses, silence
from penstock.services.spark.session import SparkFailed, spark_session
from penstock.services.spark.settings import SparkSettings


def test_only_a_standalone_master_has_addresses() -> None:
    """Some may stand in for each other; those of a cluster's manager are its own matter."""
    assert addresses("spark://a:7077,b.c:1") == [("a", 7077), ("b.c", 1)]
    assert [addresses(master) for master in ("local[*]", "yarn", "k8s://https://host:443")] == [[], [], []]
    assert silence("yarn") is None


def test_one_that_answers_is_enough() -> None:
    """A master whose stand-in is the active one is reached; where none is, each says why."""
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = [server.getsockname()[1] for server in (there, gone)]
        gone.close()
        assert silence(f"spark://127.0.0.1:{ports[1]},127.0.0.1:{ports[0]}") is None
        master = f"spark://127.0.0.1:{ports[1]},127.0.0.1:{ports[1]}"
    refused = f"127.0.0.1:{ports[1]}: Connection refused"
    assert silence(master) == f"{refused}; {refused}"
    assert "a..b:7077: " in (silence("spark://a..b:7077") or "")
    assert "a:99999: " in (silence("spark://a:99999") or "")
    expected = rf"{master} did not start \(spark\.master\): no master answers: {refused}"
    with pytest.raises(SparkFailed, match=expected), spark_session(SparkSettings(master=master), "test"):
        raise AssertionError("there is no Spark")
