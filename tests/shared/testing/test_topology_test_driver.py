"""The test driver, which runs production's task with its logs in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError, DataError, IllegalState, ProcessingFailed
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import PROGRESS, TAKEOVER, decode_entry
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


def sessions() -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def state_in(folder: Path) -> StateDirectory:
    return StateDirectory(str(folder), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)


def operations(driver: TopologyTestDriver) -> bytes:
    return b"".join(decode_entry(value).operation for _, value in driver.changelog)


def test_commits_after_each_pipe() -> None:
    """By default a record's output can be read immediately, and reading removes it."""
    driver = TopologyTestDriver(sessions())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=11)
    assert driver.read("out") == [ProducerRecord("out", b'{"key":"a","start":0,"end":0,"n":1}', b"a", (), None, 0)]
    assert driver.read("out") == []
    assert operations(driver) == b"TLGFLG"


def test_a_topic_that_nothing_is_written_to() -> None:
    """Reading a topic that the topology does not write to is a ConfigError with the existing topics."""
    with pytest.raises(ConfigError, match=r"'outt'.*out, in-dlq, in-late"):
        TopologyTestDriver(sessions()).read("outt")


def test_records_too_far_in_the_future() -> None:
    """With a time a record more than a day ahead becomes a dead letter, by default, as in
    production; at time 0 none does.
    """
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
    """With `commit_each` off nothing can be read before a commit, and an empty commit does nothing."""
    driver = TopologyTestDriver(sessions(), commit_each=False)
    driver.commit()
    driver.pipe_columns("in", [(b"a", b"{}", 0), (b"a", b"{}", 11)])
    assert (driver.read("out"), operations(driver)) == ([], b"T")
    driver.commit()
    driver.commit()
    assert (len(driver.read("out")), operations(driver)) == (1, b"TFLG")


def test_a_restore_after_a_crash_continues_from_the_last_commit() -> None:
    """After a crash the new owner has a higher epoch and the committed state, and processes
    the rest of the source again.
    """
    driver = TopologyTestDriver(sessions(), commit_each=False)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    driver.commit()
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    driver.crash()
    driver.restore()
    assert driver.task.epoch == 2
    assert [(s.start, s.end, s.states) for s in driver.task.stores["s"].rows()] == [(0, 5, [2])]
    assert operations(driver) == b"TLGT"


def test_records_that_are_piped_after_a_crash_wait_for_the_restore() -> None:
    """The clock moves meanwhile. What needs a task is an error."""
    driver = TopologyTestDriver(sessions())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    driver.crash()
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    driver.pipe_columns("in", [(b"a", b"{}", 7)])
    driver.advance_wall_clock(9)
    for call in (driver.commit, driver.metrics, driver.crash, partial(driver.store, "s")):
        with pytest.raises(IllegalState, match="restore"):
            call()
    driver.restore()
    assert driver.clock.now_ms() == 9
    assert [(s.start, s.end, s.states) for s in driver.task.stores["s"].rows()] == [(0, 7, [3])]


@pytest.mark.parametrize("torn", [1, 2, 99])
def test_a_torn_commit_never_has_its_progress_record(torn: int) -> None:
    """However many entries of the lost commit are in the log, its progress record is not."""
    driver = TopologyTestDriver(sessions(), commit_each=False)
    driver.pipe_columns("in", [(b"a", b"{}", 0), (b"b", b"{}", 0)])
    driver.crash(torn_entries=torn)
    assert operations(driver) == b"T" + b"L" * min(torn, 2)
    driver.restore()
    assert len(driver.task.stores["s"]) == 2
    driver.commit()
    assert operations(driver)[-2:] == b"L" + PROGRESS
    assert operations(driver).count(TAKEOVER) == 2


class Closing(Processor):
    """Appends to `calls` when it is closed; raises then if `fails`."""

    def __init__(self, calls: list[str], fails: bool) -> None:
        self._calls = calls
        self._fails = fails

    def init(self, context: ProcessorContext) -> None:
        self._store = context.store("rows")

    def process(self, record: Record) -> None:
        self._store.put(record.key, record.value)

    def close(self) -> None:
        self._calls.append(f"closed with {self._store.get('a')}")
        if self._fails:
            raise OSError("the file is gone")


def closing(calls: list[str], *, fails: bool = False) -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").process(lambda: Closing(calls, fails), builder.add_store("rows"))
    return builder.build()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_close_closes_the_processors_once(is_on_disk: bool, tmp_path: Path) -> None:
    """The driver's end, and a new owner, close the processors, which can still read their stores; a crash does not."""
    calls: list[str] = []
    driver = TopologyTestDriver(closing(calls), state=state_in(tmp_path) if is_on_disk else None)
    driver.pipe("in", key=b"a", value=b"1")
    driver.crash()
    driver.close()
    driver.restore()
    assert calls == []
    driver.restore()
    assert calls == ["closed with 1"]
    driver.close()
    driver.close()
    assert calls == ["closed with 1"] * 2


def test_an_error_of_a_processors_close(tmp_path: Path) -> None:
    """`close` raises it as ProcessingFailed with the node, once the stores on disk are closed."""
    state = state_in(tmp_path)
    driver = TopologyTestDriver(closing([], fails=True), state=state)
    with pytest.raises(ProcessingFailed, match=r"node 'process-2'.*the file is gone"):
        driver.close()
    state.state_of(0).close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_new_owner_takes_over_despite_an_error_of_a_processors_close(is_on_disk: bool, tmp_path: Path) -> None:
    """`restore` raises the error of the former task's `close` once the new task runs."""
    driver = TopologyTestDriver(closing([], fails=True), state=state_in(tmp_path) if is_on_disk else None)
    driver.pipe("in", key=b"a", value=b"1")
    with pytest.raises(ProcessingFailed, match=r"node 'process-2'.*the file is gone"):
        driver.restore()
    driver.pipe("in", key=b"b", value=b"2")
    assert sorted(driver.store("rows").items()) == [("a", 1), ("b", 2)]
    driver.crash()


def test_a_new_driver_does_not_continue_from_the_state_on_disk_of_another(tmp_path: Path) -> None:
    """Its changelog is empty, so it deletes state that is ahead of it, and processes its first records."""
    state = state_in(tmp_path)
    for _ in range(2):
        driver = TopologyTestDriver(sessions(), state=state)
        assert (driver.restored_entries, driver.task.epoch, len(driver.store("s"))) == (0, 1, 0)
        driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
        driver.pipe("in", key=b"a", value=b"{}", timestamp=11)
        assert len(driver.read("out")) == 1
        driver.close()


def test_the_wall_clock_moves_only_when_advanced() -> None:
    """Processing a record does not change the wall clock."""
    driver = TopologyTestDriver(sessions(), now_ms=1_000)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=99_999)
    assert driver.task.now_ms == 1_000
    driver.advance_wall_clock(5)
    assert driver.task.now_ms == 1_005
    with pytest.raises(ValueError, match="forward"):
        driver.advance_wall_clock(-1)


def test_stores_and_metrics() -> None:
    """Stores and metrics can be read between records, and an unknown store is a ConfigError with the existing ones."""
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
    with pytest.raises(ConfigError, match=r"'nope'.*users, s, rates"):
        driver.store("nope")


def test_columns_for_a_global_table() -> None:
    """`pipe_columns` fills a global table, as `pipe` does, and raises for a record that the table cannot hold."""
    builder = StreamsBuilder()
    builder.stream("in").join(builder.global_table("rates"), max, key=lambda r: r.key).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe_columns("rates", [(b"eur", b"2", 0), (b"usd", b"3", 1)])
    assert [driver.store("rates").get(key) for key in ("eur", "usd")] == [2, 3]
    with pytest.raises(ProcessingFailed, match=r"'rates'.*without a key"):
        driver.pipe_columns("rates", [(None, b"1", 0)])


def test_a_topic_that_no_source_reads() -> None:
    """A record for an unknown topic is a ConfigError with the existing ones."""
    driver = TopologyTestDriver(sessions())
    with pytest.raises(ConfigError, match=r"'inn'.*reads in\b"):
        driver.pipe("inn", value=b"{}")
    with pytest.raises(ConfigError, match="inn"):
        driver.pipe_columns("inn", [])


@pytest.mark.parametrize("headers", [{"trace": b"1"}, [("trace", b"1")], [["trace", b"1"]]])
def test_headers_may_be_piped_as_a_dict_or_a_list(headers: Any) -> None:
    """Processors get a tuple of pairs, as from a consumer, and the record is forwarded with them."""
    own = (("own", b"2"),)
    builder = StreamsBuilder()
    builder.stream("in").map(lambda record: record._replace(headers=record.headers + own)).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", value=b"{}", headers=headers)
    assert [record.headers for record in driver.read("out")] == [(("trace", b"1"), ("own", b"2"))]


def test_records_of_a_topic_that_the_topology_reads_itself() -> None:
    """Results and late records that go to a topic of another source are processed there, and can be read as well."""
    builder = StreamsBuilder()
    builder.stream("in").to("next")
    builder.stream("next").to("out")
    windows = builder.stream("clicks").group_by_key().tumbling_window(10)
    windows.aggregate("w", n=Count()).on_close().to("counts")
    builder.stream("clicks-late").to("repaired")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=7, headers={"trace": b"1"})
    written = [(r.key, r.value, r.headers, r.timestamp) for topic in ("next", "out") for r in driver.read(topic)]
    assert written == [(b"a", b"{}", (("trace", b"1"),), 7)] * 2
    for at in (5, 50, 6):
        driver.pipe("clicks", key=b"a", value=b"{}", timestamp=at)
    assert [len(driver.read(topic)) for topic in ("clicks-late", "repaired")] == [1, 1]


def test_dead_letters_that_the_topology_reads_itself() -> None:
    """A dead letter is processed with the time of the wall clock, which is the time of its writing."""
    builder = StreamsBuilder()
    builder.stream("in").map_values(lambda value: 12 // value["n"]).to("out")
    builder.stream("in-dlq").to("seen")
    driver = TopologyTestDriver(builder.build(), now_ms=1_000, errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b'{"n":0}', timestamp=5)
    assert [len(driver.read("in-dlq")), *(record.timestamp for record in driver.read("seen"))] == [1, 1_000]


def test_a_global_table_that_the_topology_writes() -> None:
    """The results of a commit are rows before the results for other topics are processed, as in a worker's turn."""
    builder = StreamsBuilder()
    rates = builder.global_table("rates")
    given = builder.stream("in")
    given.to("next")
    given.to("rates")
    builder.stream("next").join(rates, lambda value, rate: rate, key=lambda r: r.key).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"eur", value=b'{"n":2}')
    assert driver.store("rates").get("eur") == {"n": 2}
    assert [record.value for record in driver.read("out")] == [b'{"n":2}']
    assert len(driver.read("rates")) == 1


def two_branches() -> Topology:
    """A stream that is joined with a count of itself, each through a repartition topic."""
    builder = StreamsBuilder()
    orders = builder.stream("orders")
    shown = orders.key_by(lambda record: record.value["user"], name="shown")
    counts = orders.key_by(lambda record: record.value["user"], name="counts").group_by_key().aggregate("t", n=Count())
    shown.left_join(counts, lambda value, row: row["n"] if row else 0).to("out")
    return builder.build()


def test_the_repartition_topics_of_a_commit_are_merged_by_timestamp() -> None:
    """The topics of one sub-topology get their records at once: the count of an order is there when it is joined."""
    driver = TopologyTestDriver(two_branches())
    driver.pipe_columns("orders", [(b"1", b'{"user":"ann"}', 10), (b"2", b'{"user":"ann"}', 20)])
    assert [record.value for record in driver.read("out")] == [b"1", b"2"]


def test_a_new_owner_merges_its_records_by_timestamp() -> None:
    """After a crash, the records since the last commit are processed as one fetch of all topics."""
    builder = StreamsBuilder()
    users = builder.table("users")
    builder.stream("in").left_join(users, lambda value, user: user).to("out")
    driver = TopologyTestDriver(builder.build(), commit_each=False)
    driver.pipe("users", key=b"a", value=b"1", timestamp=90)
    driver.commit()
    driver.pipe("in", key=b"a", value=b"{}", timestamp=20)
    driver.pipe("users", key=b"a", value=b"2", timestamp=10)
    driver.crash()
    driver.restore()
    driver.commit()
    assert [record.value for record in driver.read("out")] == [b"2"]


def divided(topic: str = "in") -> Topology:
    """A topology with a mapper that raises at n = 0, followed by a store."""
    builder = StreamsBuilder()
    builder.global_table("rates")
    ratios = builder.stream(topic).map_values(lambda value: 12 // value["n"])
    ratios.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def test_an_error_in_user_code_raises() -> None:
    """By default an error in user code is raised, with its node and the record in the message."""
    driver = TopologyTestDriver(divided())
    driver.pipe("in", key=b"a", value=b'{"n":1}')
    with pytest.raises(ProcessingFailed, match=r"node 'map_values-2': in-0@1 .*ZeroDivisionError") as raised:
        driver.pipe("in", key=b"a", value=b'{"n":0}')
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert driver.read("in-dlq") == []


def test_a_data_error_raises_too() -> None:
    """A record that cannot be decoded and a DataError of user code, which `fail` makes dead letters, are raised too."""

    def fail(value: Any) -> Any:
        raise DataError("no such item")

    builder = StreamsBuilder()
    builder.global_table("rates")
    builder.stream("in").map_values(fail).to("out")
    messages = {b"{": "node 'source-1': in-0@0 .*not JSON", b"{}": "node 'map_values-2': in-0@0 .*no such item"}
    for value, message in messages.items():
        with pytest.raises(ProcessingFailed, match=message):
            TopologyTestDriver(builder.build()).pipe("in", key=b"a", value=value)
    with pytest.raises(ProcessingFailed, match=r"'rates'.*without a key"):
        TopologyTestDriver(builder.build()).pipe("rates", value=b"1")


def test_errors_are_handled_with_error_handlers() -> None:
    """With an application's handlers a failed record becomes a dead letter, as in production."""
    driver = TopologyTestDriver(divided(), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b'{"n":0}')
    driver.pipe("rates", value=b"1")
    assert len(driver.read("in-dlq")) == 1
    with pytest.raises(ConfigError, match=r"errors.*'ignore'"):
        TopologyTestDriver(divided(), errors="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"topic": b"in"}, TypeError, "topic .*b'in'"),
        ({"key": "a"}, TypeError, "key for 'in' .*'a'"),
        ({"value": {"n": 1}}, TypeError, r"value for 'in' .*\{'n': 1\}"),
        ({"timestamp": 1.5}, TypeError, "timestamp for 'in' .*1.5"),
        ({"timestamp": True}, TypeError, "timestamp .* got True"),
        ({"timestamp": -2}, ValueError, "timestamp .* got -2"),
        ({"timestamp": 2**63}, ValueError, "timestamp .* got 9223372036854775808"),
        ({"headers": {"trace": "1"}}, TypeError, r"headers .* got \('trace', '1'\)"),
        ({"headers": "trace"}, TypeError, "headers .* got 'trace'"),
    ],
)
def test_invalid_records_are_rejected(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    """A value of the wrong type is an error with its name, and nothing is piped."""
    driver = TopologyTestDriver(sessions(), errors=ErrorHandlers())
    given = {"topic": "in", "key": b"a", "value": b"{}", "timestamp": 1} | wrong
    with pytest.raises(error, match=message):
        driver.pipe(given.pop("topic"), **given)
    if "headers" not in wrong and "topic" not in wrong:
        with pytest.raises(error, match=message):
            driver.pipe_columns("in", [(given["key"], given["value"], given["timestamp"])])
    assert driver.metrics()["records"] == 0
    assert driver.source_log == {"in": []}
