"""Windows by key and time from changelog and lake, and the command that prints them."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from penstock.services.aggregator.changelog_tail import (
    ChangelogLocation,
    TailChange,
    decode_tail_change,
)
from penstock.services.aggregator.sessions_command import main, print_windows
from penstock.services.aggregator.stored_windows import (
    StoredWindow,
    StoredWindowsQuery,
    WindowQueryOptions,
    choose_store,
)
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ConfigError, CorruptRecord
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.records import Columns, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, apply_one_by_one, feed_records
from penstock.shared.streams.changelog.format import (
    Progress,
    Takeover,
    encode_deleted,
    encode_final,
    encode_live,
    encode_progress,
    encode_takeover,
)
from penstock.shared.streams.changelog.store_schema import AggregationSchema
from penstock.shared.testing.fake_broker import FakeCluster
from tests import lake_tables
from tests.services.aggregator.closed_logs import CODEC, STORE

PROGRESS = Progress("app", "exactly_once", {}, {}, {}, {}, (STORE,), 0)


def test_an_unreadable_state_is_located() -> None:
    """The error has topic, partition and offset of the record itself, not of the record that confirms it."""
    seen = list[TailChange]()
    reader = ChangelogReader(apply_one_by_one(lambda change: seen.append(decode_tail_change(change))))
    values = [encode_takeover(1, Takeover("app", "here", 0)), encode_live(0, 1, 1, 0, 5, b"short")]
    values.append(encode_progress(1, 1, PROGRESS))
    offsets = np.arange(70, 73)
    message = r"^app-changelog-3 at offset 71:.*streams reset"
    with pytest.raises(CorruptRecord, match=message):
        feed_records(reader, Columns("app-changelog", 3, [None, b"k", None], values, offsets, offsets))


def test_the_store_is_the_only_one_or_named() -> None:
    """A table does not count. An unknown store, a table, or no store if there is no commit, is a ConfigError."""
    table = msgspec.structs.replace(STORE, name="rows", kind="table")
    for progress in (PROGRESS, msgspec.structs.replace(PROGRESS, stores=(table, STORE))):
        assert choose_store([progress], None) == choose_store([progress], "s") == STORE
        with pytest.raises(ConfigError, match=r"store: rows: .* s$"):
            choose_store([progress], "rows")
    with pytest.raises(ConfigError, match=r"store: unset: .* none$"):
        choose_store([msgspec.structs.replace(PROGRESS, stores=(table,))], None)
    with pytest.raises(ConfigError, match=r"store: unset: .* none$"):
        choose_store([msgspec.structs.replace(PROGRESS, stores=())], None)
    with pytest.raises(ConfigError, match=r"store: t.* s\b"):
        choose_store([PROGRESS], "t")
    with pytest.raises(ConfigError, match="no commit"):
        choose_store([], None)


def test_an_invalid_time_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid time ends the command with status 2, the flag's name and the expected format."""
    for flag in ("--from", "--to"):
        assert main(["--application", "app", flag, "yesterday"]) == 2
        output = capsys.readouterr().err
        assert output.count("\n") == 1
        assert flag in output
        assert "'yesterday'" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--status", "closed"], "closed windows are in the lake: set lake, or status=open"),
        (["--key", "\udcff"], "pass such a key with --key-base64"),
        (["--key-from", "\udcff"], "pass such a key with --key-base64"),
        (["--key", "ann", "--key-base64", "Ym9i"], "key and key_base64 cannot be combined"),
        (["--key-base64", "!!!!"], "key_base64: is not base64"),
        (["--key-base64", "YW5u!"], "key_base64: is not base64"),
        (["--to", "99999999999999999999"], "more ms than Kafka has room for"),
        (["--from", "9" * 9_999], "more ms than Kafka has room for"),
        (["--from", "2026-01-02", "--to", "2026-01-01"], "from=2026-01-02 must not be after to=2026-01-01"),
        (["--key-from", "z", "--key-to", "a"], "key_from='z' must not be after key_to='a'"),
    ],
)
def test_impossible_queries_are_rejected(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Queries that cannot have a result end with status 2 and one line, before any request."""
    assert main(["--application", "app", *flags]) == 2
    assert message in capsys.readouterr().err


def test_windows_are_shown_as_rows() -> None:
    """Each window has one row with its bounds in UTC and its results."""
    console = Console(file=io.StringIO(), width=160)
    print_windows(STORE, [StoredWindow(0, 0, 1500, "open", {"n": 4.0}, "k")], console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "s: 1 windows" in output
    assert "1970-01-01T00:00:01.500" in output
    assert "4.0" in output


@pytest.mark.parametrize(
    ("result", "shown"), [("Zürich", '"Zürich"'), (["東京", "a"], '["東京","a"]'), (float("inf"), "null")]
)
def test_results_are_shown_as_in_the_json_output(result: Any, shown: str) -> None:
    """Results are the JSON that `--json` prints: text is not escaped, and infinity is null."""
    console = Console(file=io.StringIO(), width=160)
    print_windows(STORE, [StoredWindow(0, 0, 1500, "open", {"n": result}, "k")], console)
    assert f" {shown} " in console.file.getvalue()  # type: ignore[attr-defined]


def test_times_beyond_the_calendar_are_shown_as_ms() -> None:
    """Bounds after the year 9999 are shown in ms, as `--from` accepts them, and control
    characters of keys are escaped.
    """
    console = Console(file=io.StringIO(), width=160)
    print_windows(STORE, [StoredWindow(0, -1, 10**15, "open", {"n": 4.0}, "\x1b[31m[/b]")], console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("1969-12-31T23:59:59.999", "1000000000000000", "\\x1b[31m[/b]"):
        assert text in output
    assert "\x1b" not in output


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_no_time_is_cut_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bounds and status are on one line with any number of results, and a long key continues on the next line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [f"aggregation_{i}" for i in range(6)]
    store = msgspec.structs.replace(STORE, aggregations=tuple(AggregationSchema.of(n, Count()) for n in names))
    key = "k" * 100
    print_windows(store, [StoredWindow(0, 0, 1500, "closed", dict.fromkeys(names, 123456.789), key)])
    output = capsys.readouterr().out
    assert "…" not in output
    assert output.count("k") >= len(key)
    row = next(line for line in output.splitlines() if "1970" in line)
    for text in ("1970-01-01T00:00:00.000", "1970-01-01T00:00:01.500", "closed", "123456.789"):
        assert text in row


Window = tuple[int, str, int, int]


def write_lake(root: Path, live: list[Window], closed: list[tuple[Window, int]]) -> None:
    """Write a snapshot that covers nothing of the changelog: open windows, and closed ones
    with their changelog offset.
    """
    body = msgspec.json.encode(PROGRESS)
    rows = [
        lake_tables.live(p, "s", key.encode(), start, end, -len(live) + i, {"n_n": 1})
        for i, (p, key, start, end) in enumerate(live)
    ]
    rows += [lake_tables.progress(p, 0, body, epoch=0, topic_id=None) for p in (0, 1)]
    lake_tables.write_state(root, "app", [STORE], rows)
    of_closed = [
        {"partition": p, "key": key, "window_start": start, "window_end": end, "n": 1}
        | {"changelog_offset": offset, "state": {"n_n": 1}, "topic_id": None}
        for (p, key, start, end), offset in closed
    ]
    lake_tables.write_closed(root, "app", STORE, of_closed)


async def write_tail(cluster: FakeCluster, changes: list[tuple[str, Window]]) -> None:
    """Write a changelog of two partitions with one commit each."""
    cluster.create_topic("app-changelog", 2)
    one = CODEC.pack([1])
    records = [
        ProducerRecord("app-changelog", encode_takeover(1, Takeover("app", "x", 0)), None, (), p) for p in (0, 1)
    ]
    for kind, (p, key, start, end) in changes:
        value = {
            "live": encode_live(0, 1, 1, start, end, one),
            "final": encode_final(0, 1, 1, start, end, end, one),
            "deleted": encode_deleted(0, 1, 1, start),
        }[kind]
        records.append(ProducerRecord("app-changelog", value, key.encode(), (), p))
    records += [ProducerRecord("app-changelog", encode_progress(1, 1, PROGRESS), None, (), p) for p in (0, 1)]
    async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
        assert await (await producer.send_many(records)).first_error() is None


async def fill(cluster: FakeCluster, root: Path) -> dict[str, set[Window]]:
    """Write windows to snapshot and tail, many with the same start, and return them by status."""
    chance = random.Random(7)
    starts = [chance.choice((0, 0, 50, 100, 150)) for _ in range(90)]
    ends = {(i % 2, f"k{i // 3:02}", start): start + chance.randrange(9) for i, start in enumerate(starts)}
    windows = [(*window, end) for window, end in sorted(ends.items())]
    chance.shuffle(windows)
    live, closed, in_tail = windows[:30], windows[30:60], windows[60:]
    of_lake = [(window, -1) for window in closed]
    # These were appended by a compaction that ended before its snapshot.
    of_lake += [((0, "torn", 0, end), 99) for end in range(40)]
    of_lake += [(window, 99) for window in in_tail[1::8]]
    write_lake(root, live, of_lake)
    changes = [("live", window) for window in in_tail[::2]] + [("final", window) for window in in_tail[1::2]]
    changes += [("deleted", window) for window in live[:5]] + [("final", window) for window in live[5:10]]
    grown = [(p, key, start, end + 20) for p, key, start, end in live[10:15]]
    changes += [("live", window) for window in grown]
    await write_tail(cluster, changes)
    return {
        "open": {*live[15:], *grown, *in_tail[::2]},
        "closed": {*closed, *live[5:10], *in_tail[1::2]},
    }


@pytest.mark.parametrize("status", ["open", "closed", "all"])
async def test_pages_have_each_window_once(status: Any, tmp_path: Path) -> None:
    """Pages of any size contain each window of snapshot and tail once, ordered by start."""
    async with FakeCluster() as cluster:
        there = await fill(cluster, tmp_path)
        wanted = set().union(*(windows for kind, windows in there.items() if status in ("all", kind)))
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        for rows_max in (7, len(wanted), 1_000):
            options = WindowQueryOptions(
                location=ChangelogLocation(kafka, "app", str(tmp_path), {}),
                store="s",
                keys=KeyRange.of(),
                time_range=(0, 1_000),
                status=status,
                rows_max=rows_max,
                timeout_ms=30_000,
                timeout_name="timeout_ms",
            )
            seen: list[StoredWindow] = []
            query = StoredWindowsQuery(options)
            while True:
                _, page = await query.run()
                seen += page
                assert len(page) <= rows_max
                if query.last is None:
                    break
                assert page
                query = StoredWindowsQuery(options, query.last)
            assert len(seen) == len(wanted)
            assert {(one.partition, one.key, one.start_ms, one.end_ms) for one in seen} == wanted
            assert [one.start_ms for one in seen] == sorted(one.start_ms for one in seen)
            assert status == "all" or {one.status for one in seen} == {status}


async def test_the_command_prints_a_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed continuation is a valid argument; with another query it ends with status 2."""
    async with FakeCluster() as cluster:
        there = await fill(cluster, tmp_path)
        flags = ["--application", "app", "--lake", str(tmp_path), "--rows-max", "30", "--json", "--key-to", "kz"]
        flags += ["--kafka.bootstrap-servers", cluster.bootstrap_servers]
        count, more = 0, list[str]()
        while True:
            assert await asyncio.to_thread(main, [*flags, *more]) == 0
            output = capsys.readouterr()
            count += len([json.loads(line) for line in output.out.splitlines()])
            if not output.err:
                break
            assert output.err.startswith("there are more: --continuation ")
            more = output.err.split()[-2:]
        assert count == sum(map(len, there.values()))
        assert await asyncio.to_thread(main, [*flags, *more, "--status", "open"]) == 2
        assert "belongs to another query" in capsys.readouterr().err


async def test_queries_with_times_beyond_the_calendar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lake and changelog accept bounds outside of the calendar: after all windows there is
    none, and before all windows there are all.
    """
    async with FakeCluster() as cluster:
        there = await fill(cluster, tmp_path)
        flags = ["--application", "app", "--lake", str(tmp_path), "--json"]
        flags += ["--kafka.bootstrap-servers", cluster.bootstrap_servers]
        for start, number in (("9999999999999999", 0), (str(-(2**63)), sum(map(len, there.values())))):
            assert await asyncio.to_thread(main, [*flags, f"--from={start}"]) == 0
            assert len(capsys.readouterr().out.splitlines()) == number


async def test_a_missing_lake_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a lake the changelog is read, with a note; if the changelog's beginning is
    deleted too, that is an error.
    """
    async with FakeCluster() as cluster:
        await fill(cluster, tmp_path / "lake")
        flags = ["--application", "app", "--json", "--kafka.bootstrap-servers", cluster.bootstrap_servers]
        assert await asyncio.to_thread(main, flags) == 0
        without = capsys.readouterr()
        assert without.out
        assert "lake: unset: " in without.err
        wrong = [*flags, "--status", "open", "--lake", str(tmp_path / "no")]
        assert await asyncio.to_thread(main, wrong) == 0
        output = capsys.readouterr()
        assert output.out == without.out
        assert f"lake: {tmp_path}/no/app has no tables: " in output.err
        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
            await admin.delete_records({TopicPartition("app-changelog", 0): 1})
        assert await asyncio.to_thread(main, wrong) == 1
        assert f"(lake is {tmp_path}/no: " in capsys.readouterr().err


async def test_a_log_that_lost_its_end_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the changelog ends before the offset that the snapshot covers, the lake alone does not answer."""
    async with FakeCluster() as cluster:
        await write_tail(cluster, [])
        body = msgspec.json.encode(PROGRESS)
        rows = [lake_tables.progress(p, covered, body, epoch=1, topic_id=None) for p, covered in ((0, 2), (1, 3))]
        lake_tables.write_state(tmp_path, "app", [STORE], rows)
        flags = ["--application", "app", "--lake", str(tmp_path), "--status", "open"]
        assert await asyncio.to_thread(main, [*flags, "--kafka.bootstrap-servers", cluster.bootstrap_servers]) == 1
    assert "app-changelog-1: the log ends at 2, but the snapshot covers it up to 3" in capsys.readouterr().err


async def test_a_missing_application_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The error for a missing application names its changelog and its setting; an unreachable
    broker is an error after the timeout.
    """
    async with FakeCluster() as cluster:
        flags = ["--application", "typo", "--kafka.bootstrap-servers", cluster.bootstrap_servers]
        assert await asyncio.to_thread(main, flags) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "typo-changelog" in line
        assert "set application" in line
    unreachable = [
        "--application",
        "app",
        "--status",
        "open",
        "--kafka.bootstrap-servers",
        "127.0.0.1:1",
        "--kafka-timeout-ms",
        "50",
    ]
    assert await asyncio.to_thread(main, unreachable) == 1
    assert "no broker reached" in capsys.readouterr().err
