"""Replays recorded cases of Kafka Streams and compares the output.

    python -m penstock.testing.oracle [--batch N] [--store in_memory|rocksdb] FILE…

A file has one JSON case a line (plain or gzip), recorded from Kafka Streams' TopologyTestDriver: parameters, the piped
records, and the output. Cases with windows are replayed through the DSL, cases with punctuation through the Processor
API, both on Penstock's `TopologyTestDriver`. With `--batch N`, the records of cases with windows are piped in batches
of N, with a commit after each batch. In that case the net output of each commit is compared: the last value of each
window, and a retraction only for a window that an earlier commit had output. With `--store rocksdb` the state is
on disk, in a temporary folder, and no row stays in memory after its commit.

The command prints each mismatch, then `K skipped` for cases of kinds that Penstock does not have, and last `N passed, M
failed`. The exit status is 1 if a case failed or none passed, else 0.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.shared.streams.aggregations.aggregation import Aggregate, Aggregation, Count, Max, Sum
from penstock.shared.streams.dsl.builder import GroupedStream, StreamsBuilder, WindowedGroup
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.punctuation import PunctuationType, Schedule
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

SOURCE = "input"
RESULTS = "output"
ROCKSDB_BYTES_MAX = 16 * 1024 * 1024
KINDS = ("session", "tumbling", "hopping", "sliding", "punctuation")

Case = dict[str, Any]
Output = dict[str, Any]


class Value(msgspec.Struct):
    """A recorded input value."""

    value: int


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a file, `.gz` or plain."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield msgspec.json.decode(line)


def replay(case: Case, state: StateDirectory | None = None) -> str | None:
    """None if Penstock's output is as recorded, otherwise the difference.

    For a case with windows, the number of dropped records is compared as well.

    With `state` the stores of a case with windows are on disk, in a new folder for each case. Raises KeyError for an
    unknown kind of case.
    """
    return _replay_punctuation(case) if case["kind"] == "punctuation" else _replay_windows(case, state)


def replay_batches(case: Case, size: int, state: StateDirectory | None = None) -> str | None:
    """As `replay`, but after each `size` records of a case with windows, it commits and compares the net output."""
    if case["kind"] == "punctuation":
        return _replay_punctuation(case)
    driver = _make_driver(case, state, commit_each=False, deduplicate_updates=True, columns_min=1)
    try:
        return _differs_in_batches(case, size, driver)
    finally:
        driver.close()


def _make_driver(case: Case, state: StateDirectory | None, **options: Any) -> TopologyTestDriver:
    partition = 0 if state is None else len(state.partitions())
    return TopologyTestDriver(_topology_of_case(case), state=state, partition=partition, **options)


def _differs_in_batches(case: Case, size: int, driver: TopologyTestDriver) -> str | None:
    shown: set[tuple[str, int, int]] = set()
    for start in range(0, len(case["input"]), size):
        driver.pipe_columns(SOURCE, [_piped_record(record) for record in case["input"][start : start + size]])
        driver.commit()
        recorded = [o for o in case["output"] if start <= o["step"] < start + size]
        got = [msgspec.json.decode(out.key or b"{}") for out in driver.read(RESULTS)]
        by_window = ("key", "start", "end")
        difference = first_difference(
            _sorted_outputs(got, by_window), _sorted_outputs(_net_output_of_commit(recorded, shown), by_window)
        )
        if difference is not None:
            return f"batch of {size} at {start}: {difference}"
    return _compare_dropped_records(case, driver)


def _net_output_of_commit(outputs: list[Output], shown: set[tuple[str, int, int]]) -> list[Output]:
    """The last output of each window in a commit, without retractions of windows that no earlier commit has output.

    `shown` are the windows that earlier commits have output; it is updated.
    """
    last = {(o["key"], o["start"], o["end"]): o for o in outputs}
    net = [o for window, o in last.items() if o["value"] is not None or window in shown]
    for window, output in last.items():
        shown.discard(window) if output["value"] is None else shown.add(window)
    return [{name: value for name, value in o.items() if name != "step"} for o in net]


def aggregation(name: str) -> Aggregation[Any]:
    """The aggregation for a case's `aggregate`. Raises ValueError for an unknown name.

    `list` joins the values as text in the order in which they were added. When sessions are merged, the values of the
    earlier session come first.
    """
    match name:
        case "count":
            return Count()
        case "sum":
            return Sum("value")
        case "max":
            return Max("value")
        case "list":
            return Aggregate(str, lambda joined, v: _with_comma(joined, str(v.value)), _with_comma, str)
    raise ValueError(f"unknown aggregate {name!r}")


def _with_comma(a: str, b: str) -> str:
    return f"{a},{b}" if a and b else a or b


def _windowed_stream(case: Case, grouped: GroupedStream) -> WindowedGroup:
    grace = case["grace_ms"]
    match case["kind"]:
        case "session":
            return grouped.session_window(case["gap_ms"], grace)
        case "tumbling":
            return grouped.tumbling_window(case["size_ms"], grace)
        case "hopping":
            return grouped.hopping_window(case["size_ms"], case["advance_ms"], grace)
        case "sliding":
            return grouped.sliding_window(case["size_ms"], grace)
    raise KeyError(case["kind"])


def _topology_of_case(case: Case) -> Topology:
    builder = StreamsBuilder()
    windows = _windowed_stream(case, builder.stream(SOURCE, value=Value).group_by_key())
    table = windows.aggregate("windows", result=aggregation(case["aggregate"]))
    (table.on_update() if case["emit"] == "on_update" else table.on_close()).to(RESULTS, encode=_encode_result)
    return builder.build()


def _piped_record(record: dict[str, Any]) -> tuple[bytes | None, bytes, int]:
    key = record["key"]
    return None if key is None else key.encode(), msgspec.json.encode({"value": record["value"]}), record["timestamp"]


def _replay_windows(case: Case, state: StateDirectory | None) -> str | None:
    driver = _make_driver(case, state)
    try:
        return _differs_by_record(case, driver)
    finally:
        driver.close()


def _differs_by_record(case: Case, driver: TopologyTestDriver) -> str | None:
    got: list[Output] = []
    for step, record in enumerate(case["input"]):
        key, value, timestamp = _piped_record(record)
        driver.pipe(SOURCE, key=key, value=value, timestamp=timestamp)
        got += [{"step": step, **msgspec.json.decode(out.key or b"{}")} for out in driver.read(RESULTS)]
    return _compare_dropped_records(case, driver) or first_difference(got, case["output"])


def _compare_dropped_records(case: Case, driver: TopologyTestDriver) -> str | None:
    metrics = driver.task.metrics
    late = metrics.late_total if case["kind"] == "session" else metrics.missed_windows_total
    dropped = late + metrics.skipped_total
    return None if dropped == case["dropped"] else f"dropped {dropped}, recorded {case['dropped']}"


def _encode_result(record: Record) -> tuple[bytes, None]:
    result = None if record.value is None else record.value.results["result"]
    fields = {**record.key._asdict(), "value": None if result is None else str(result), "timestamp": record.timestamp}
    return msgspec.json.encode(fields), None


class _Schedules(Processor):
    """Schedules and cancels punctuations as the case's records specify.

    Each punctuation appends its (id, timestamp) to `calls`.
    """

    def __init__(self, calls: list[tuple[int, int]]) -> None:
        self._calls = calls
        self._schedules: dict[int, Schedule] = {}

    def process(self, record: Record) -> None:
        if (requested := record.value.get("schedule")) is not None:
            type_ = PunctuationType[requested["type"]]
            callback = self._punctuator(requested["id"], requested["cancel_after"])
            self._schedules[requested["id"]] = self.context.schedule(requested["interval_ms"], type_, callback)
        if (cancel := record.value.get("cancel")) is not None:
            self._schedules[cancel].cancel()

    def _punctuator(self, own: int, cancel_after: int) -> Any:
        calls_left = [cancel_after]

        def punctuate(timestamp: int) -> None:
            self._calls.append((own, timestamp))
            calls_left[0] -= 1
            if calls_left[0] == 0:
                self._schedules[own].cancel()

        return punctuate


def _replay_punctuation(case: Case) -> str | None:
    calls: list[tuple[int, int]] = []
    builder = StreamsBuilder()
    builder.stream(SOURCE).process(lambda: _Schedules(calls))
    driver = TopologyTestDriver(builder.build(), now_ms=case["wall_clock_start"])
    got: list[Output] = []
    for step, operation in enumerate(case["input"]):
        if operation["op"] == "advance_wall_clock":
            driver.advance_wall_clock(operation["ms"])
        else:
            driver.pipe(SOURCE, key=b"k", value=msgspec.json.encode(operation), timestamp=operation["timestamp"])
        got += [{"step": step, "id": own, "timestamp": timestamp} for own, timestamp in calls]
        calls.clear()
    by_moment = ("step", "timestamp", "id")
    return first_difference(_sorted_outputs(got, by_moment), _sorted_outputs(case["output"], by_moment))


def _sorted_outputs(outputs: Iterable[Output], fields: tuple[str, ...]) -> list[Output]:
    return sorted(outputs, key=lambda output: tuple(output[f] for f in fields))


def first_difference(got: list[Output], recorded: list[Output]) -> str | None:
    """The first difference between two lists of outputs; None if they are equal."""
    for i, (ours, theirs) in enumerate(zip(got, recorded, strict=False)):
        if ours != theirs:
            return f"output {i}: {ours}, recorded {theirs}"
    if len(got) != len(recorded):
        return f"{len(got)} outputs, recorded {len(recorded)}"
    return None


def main(arguments: list[str]) -> int:
    """Run the oracle: replay files of recorded cases, and return the exit status."""
    parser = argparse.ArgumentParser("oracle")
    parser.add_argument("--batch", type=_batch_size, metavar="N", help="records that are taken at once")
    parser.add_argument("--store", choices=("in_memory", "rocksdb"), default="in_memory")
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    if given.store == "in_memory":
        return _replay_files(given.files, None, given.batch)
    with tempfile.TemporaryDirectory() as folder:
        state = StateDirectory(folder, "oracle", memory_bytes_max=ROCKSDB_BYTES_MAX, cache_bytes_max=0)
        state.acquire()
        try:
            return _replay_files(given.files, state, given.batch)
        finally:
            state.release()


def _batch_size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError(f"{size} is no number of records")
    return size


def _replay_files(files: list[Path], state: StateDirectory | None, batch: int | None) -> int:
    passed = 0
    failed = 0
    skipped = 0
    for file in files:
        for number, case in enumerate(read_cases(file), 1):
            if case["kind"] not in KINDS:
                skipped += 1
                continue
            difference = replay(case, state) if batch is None else replay_batches(case, batch, state)
            if difference is None:
                passed += 1
            else:
                failed += 1
                print(f"{file}:{number}: {case['kind']}, seed {case.get('seed')}: {difference}")
    if skipped:
        print(f"{skipped} skipped")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0
