"""The test driver: production's task with its logs in memory."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError, DataError, ProcessingFailed
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import PROGRESS, TAKEOVER, decode
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.task.error_handlers import ErrorHandlers
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


def sessions() -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def operations(driver: TopologyTestDriver) -> bytes:
    return b"".join(decode(value).operation for _, value in driver.changelog)


def test_commits_after_each_pipe() -> None:
    """By default what a record causes can be read at once, and reading takes it out."""
    driver = TopologyTestDriver(sessions())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=11)
    assert driver.read("out") == [ProducerRecord("out", b'{"key":"a","start":0,"end":0,"n":1}', b"a", (), None, 0)]
    assert driver.read("out") == []
    assert operations(driver) == b"TLGFLG"


def test_a_topic_that_nothing_is_written_to() -> None:
    """Reading it is refused with the topics that there are, so that a misspelt name makes no test pass."""
    with pytest.raises(ConfigError, match=r"to the topic 'outt'; the topology writes to out, in-dlq, in-late"):
        TopologyTestDriver(sessions()).read("outt")


def test_what_lies_too_far_ahead_is_as_in_production() -> None:
    """With a time of its own the driver refuses what is more than a day ahead of it; at time 0 all is ahead."""
    day_ms = 86_400_000
    counts = []
    timed: dict[str, Any] = {"now_ms": 1_000}
    given: list[dict[str, Any]] = [timed, {}, timed | {"max_future_ms": None}, {"max_future_ms": 5}]
    for options in given:
        driver = TopologyTestDriver(sessions(), errors=ErrorHandlers(), **options)
        for at in (1_000 + day_ms, 1_001 + day_ms):
            driver.pipe("in", key=b"a", value=b"{}", timestamp=at)
        counts.append(len(driver.read("in-dlq")))
    assert counts == [1, 0, 0, 2]


def test_commit_each_off() -> None:
    """With `commit_each` off nothing can be read before a commit, which does nothing where there is nothing to do."""
    driver = TopologyTestDriver(sessions(), commit_each=False)
    driver.commit()
    driver.pipe_columns("in", [(b"a", b"{}", 0), (b"a", b"{}", 11)])
    assert (driver.read("out"), operations(driver)) == ([], b"T")
    driver.commit()
    driver.commit()
    assert (len(driver.read("out")), operations(driver)) == (1, b"TFLG")


def test_a_crash_loses_what_was_not_committed_and_restore_does_it_again() -> None:
    """After a crash the new owner has a higher epoch, the committed state, and takes the rest of the source log."""
    driver = TopologyTestDriver(sessions(), commit_each=False)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    driver.commit()
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    driver.crash()
    driver.restore()
    assert driver.task.epoch == 2
    assert [(s.start, s.end, s.states) for s in driver.task.stores["s"].rows()] == [(0, 5, [2])]
    assert operations(driver) == b"TLGT"


@pytest.mark.parametrize("torn", [1, 2, 99])
def test_a_torn_commit_never_has_its_progress_record(torn: int) -> None:
    """However many entries of the lost commit arrive, the record that would confirm them does not."""
    driver = TopologyTestDriver(sessions(), commit_each=False)
    driver.pipe_columns("in", [(b"a", b"{}", 0), (b"b", b"{}", 0)])
    driver.crash(torn_entries=torn)
    assert operations(driver) == b"T" + b"L" * min(torn, 2)
    driver.restore()
    assert len(driver.task.stores["s"]) == 2
    driver.commit()
    assert operations(driver)[-2:] == b"L" + PROGRESS
    assert operations(driver).count(TAKEOVER) == 2


def test_the_wall_clock_moves_only_when_told() -> None:
    """Processing a record takes no time."""
    driver = TopologyTestDriver(sessions(), now_ms=1_000)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=99_999)
    assert driver.task.now_ms == 1_000
    driver.advance_wall_clock(5)
    assert driver.task.now_ms == 1_005
    with pytest.raises(ValueError, match="forward"):
        driver.advance_wall_clock(-1)


def test_stores_and_metrics() -> None:
    """Stores and counts can be read while it runs; an unknown store's error names those that there are."""
    builder = StreamsBuilder()
    users = builder.table("users")
    builder.global_table("rates")
    joined = builder.stream("in").join(users, lambda value, user: user)
    joined.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("users", key=b"a", value=b'{"city":"Oslo"}')
    driver.pipe("rates", key=b"eur", value=b"2")
    for at in (1, 100, 5):
        driver.pipe("in", key=b"a", value=b"{}", timestamp=at)
    assert (driver.store("users").get("a"), driver.store("rates").get("eur")) == ({"city": "Oslo"}, 2)
    assert [row.start for row in driver.store("s").rows()] == [100]
    metrics = driver.metrics()
    assert (metrics["records"], metrics["closed_windows"], metrics["late_records"]) == (4, 1, 1)
    with pytest.raises(ConfigError, match="no store 'nope'; the topology has users, s, rates"):
        driver.store("nope")


def test_a_topic_that_no_source_reads() -> None:
    """A record for another topic is refused, and the topics that there are named."""
    driver = TopologyTestDriver(sessions())
    with pytest.raises(ConfigError, match="no source reads the topic 'inn'; the topology reads in"):
        driver.pipe("inn", value=b"{}")
    with pytest.raises(ConfigError, match="inn"):
        driver.pipe_columns("inn", [])


def test_a_paused_task_stays_so_over_a_crash() -> None:
    """Pausing is the user's word: the task that takes over is paused as well, until it is resumed."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pause()
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"k", value=b"{}", timestamp=1)
    assert driver.metrics()["records"] == 0
    driver.resume()
    assert driver.metrics()["records"] == 1


def test_headers_are_piped_as_a_dict() -> None:
    """As well as in pairs: a record goes on with them."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", value=b"{}", headers={"trace": b"1"})
    assert [record.headers for record in driver.read("out")] == [(("trace", b"1"),)]


def divided(topic: str = "in") -> Topology:
    """A node of the user's that raises at n = 0, with a store of its own behind it."""
    builder = StreamsBuilder()
    builder.global_table("rates")
    ratios = builder.stream(topic).map_values(lambda value: 12 // value["n"])
    ratios.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def test_an_error_in_user_code_raises() -> None:
    """By default a test fails at it: the error is the cause, and the message names its node and the record."""
    driver = TopologyTestDriver(divided())
    driver.pipe("in", key=b"a", value=b'{"n":1}')
    with pytest.raises(ProcessingFailed, match=r"node 'map_values-2': in-0@1 .*ZeroDivisionError") as raised:
        driver.pipe("in", key=b"a", value=b'{"n":0}')
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert driver.read("in-dlq") == []


def test_what_says_that_the_record_is_bad_raises_too() -> None:
    """What cannot be decoded, and a DataError of user code, which `fail` makes a dead letter, end the driver."""

    def refuse(value: Any) -> Any:
        raise DataError("no such item")

    builder = StreamsBuilder()
    builder.global_table("rates")
    builder.stream("in").map_values(refuse).to("out")
    messages = {b"{": "node 'source-1': in-0@0 .*not JSON", b"{}": "node 'map_values-2': in-0@0 .*no such item"}
    for value, message in messages.items():
        with pytest.raises(ProcessingFailed, match=message):
            TopologyTestDriver(builder.build()).pipe("in", key=b"a", value=value)
    with pytest.raises(ProcessingFailed, match=r"global table 'rates'.*without a key"):
        TopologyTestDriver(builder.build()).pipe("rates", value=b"1")


def test_errors_are_handled_where_it_is_told_to() -> None:
    """With an application's handlers a record becomes a dead letter, as in production."""
    driver = TopologyTestDriver(divided(), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b'{"n":0}')
    driver.pipe("rates", value=b"1")
    assert len(driver.read("in-dlq")) == 1
    with pytest.raises(ConfigError, match=r"errors must be .*, got 'ignore'"):
        TopologyTestDriver(divided(), errors="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"topic": b"in"}, TypeError, "topic must be a str, got b'in'"),
        ({"key": "a"}, TypeError, "key for 'in' must be bytes or None, got 'a'; encode it"),
        ({"value": {"n": 1}}, TypeError, r"value for 'in' must be bytes or None, got \{'n': 1\}; serialize it"),
        ({"timestamp": 1.5}, TypeError, "timestamp for 'in' must be an int, .* got 1.5"),
        ({"timestamp": True}, TypeError, "timestamp .* got True"),
        ({"timestamp": -2}, ValueError, "timestamp .* got -2"),
        ({"timestamp": 2**63}, ValueError, "timestamp .* got 9223372036854775808"),
        ({"headers": {"trace": "1"}}, TypeError, r"headers .* got \('trace', '1'\)"),
        ({"headers": "trace"}, TypeError, "headers .* got 'trace'"),
    ],
)
def test_what_no_record_can_hold_is_refused(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    """A wrong type is named where it is piped; nothing of it is taken."""
    driver = TopologyTestDriver(sessions(), errors=ErrorHandlers())
    given = {"topic": "in", "key": b"a", "value": b"{}", "timestamp": 1} | wrong
    with pytest.raises(error, match=message):
        driver.pipe(given.pop("topic"), **given)
    if "headers" not in wrong and "topic" not in wrong:
        with pytest.raises(error, match=message):
            driver.pipe_columns("in", [(given["key"], given["value"], given["timestamp"])])
    assert driver.metrics()["records"] == 0
    assert driver.piped == []
