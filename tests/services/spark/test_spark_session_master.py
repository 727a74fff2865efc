"""An unreachable standalone master is reported at once."""

from __future__ import annotations

import socket

import pytest

from penstock.services.compaction_settings import SparkSettings
from penstock.services.spark.errors import SparkFailed
from penstock.services.spark.spark_session import connection_failure, master_addresses, spark_session


def test_only_a_standalone_master_has_addresses() -> None:
    """A standalone master may have standby addresses. Other kinds of masters are not checked."""
    assert master_addresses("spark://a:7077,b.c:1") == [("a", 7077), ("b.c", 1)]
    assert [master_addresses(master) for master in ("local[*]", "yarn", "k8s://https://host:443")] == [[], [], []]
    assert connection_failure("yarn") is None


def test_one_that_answers_is_enough() -> None:
    """The session starts if one of the masters is reachable. If none is, each has its reason in the error."""
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = [server.getsockname()[1] for server in (there, gone)]
        gone.close()
        assert connection_failure(f"spark://127.0.0.1:{ports[1]},127.0.0.1:{ports[0]}") is None
        master = f"spark://127.0.0.1:{ports[1]},127.0.0.1:{ports[1]}"
    failure = f"127.0.0.1:{ports[1]}: Connection refused"
    assert connection_failure(master) == f"{failure}; {failure}"
    assert "a..b:7077: " in (connection_failure("spark://a..b:7077") or "")
    assert "a:99999: " in (connection_failure("spark://a:99999") or "")
    expected = rf"{master} .*spark\.master.*{failure}"
    with pytest.raises(SparkFailed, match=expected), spark_session(SparkSettings(master=master), "test"):
        raise AssertionError("there is no Spark")
