"""State larger than memory: the memory of a process with many open sessions, with stores in memory and in RocksDB.

Each contestant runs in its own process. It runs one task, as a stream worker does, without a broker: a session count
and a mean, one record for each key, and a commit every 10,000 records. Then one key in ten, at random, gets a second
record and has to be looked up again. `held` is the growth of the process' private memory (anonymous pages and those
written to) from its start to the last commit. `on disk` is the size of its folder. RocksDB's share and the rows in
memory are limited, so this part does not grow with the sessions.

`restore` is the time a new task takes to continue from the disk, as after a crash. It opens a copy of the folder that
was taken while the first task runs, until the first session is available (not with `--data-mib`). In production the
changelog past its checkpoint would also be read; here there is none. `--default-limits` sets the limits of RocksDB and
of the rows in memory to a worker's defaults.

With `--data-mib` a kernel limit allows each process only that much more private memory than at its start. A process
that needs more ends with MemoryError, and is reported so.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.shared.common.errors import ProcessingFailed
from penstock.shared.common.records import INT64_MAX, Columns, Int64Array
from penstock.shared.streams.aggregations.aggregation import Count, Mean
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ignore_changes
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.state.local_restore import continue_from_local_state
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.restore import restore_progress
from penstock.shared.streams.task.stream_task import StreamTask

STORES = ("in_memory", "rocksDB")
BATCH = 10_000
AGAIN_SHARE = 0.1
GAP_MS = 30 * 60_000
START_MS = 1_700_000_000_000
ROCKSDB_BYTES, ROWS_BYTES = 8 * 1024 * 1024, 4 * 1024 * 1024
OUT_OF_MEMORY = "out of memory"


class Click(msgspec.Struct):
    """The fields of a record's value."""

    ms: int


class Filled:
    """A task whose store is filled, batch by batch."""

    def __init__(self, folder: Path | None, *, default_limits: bool = False) -> None:
        builder = StreamsBuilder()
        windows = builder.stream("clicks", value=Click).group_by_key().session_window(GAP_MS)
        windows.aggregate("visits", n=Count(), ms=Mean("ms")).on_close().to("visits")
        self.directory = None
        if folder is not None:
            limits = {"memory_bytes_max": ROCKSDB_BYTES, "cache_bytes_max": ROWS_BYTES}
            if default_limits:
                limits["memory_bytes_max"] = StreamsSettings().rocksdb_memory_max_bytes
                limits["cache_bytes_max"] = StreamsSettings().statestore_cache_max_bytes
            self.directory = StateDirectory(str(folder), "bench", **limits)
        local = None if self.directory is None else self.directory.state_of(0)
        self.task = StreamTask(builder.build(), 0, application="bench", local=local)
        self._offset = self._changelog = 0
        if local is not None and not local.db.is_new:
            reader = ChangelogReader(ignore_changes)
            schemas = self.task.topology.schemas()
            found = continue_from_local_state(reader, local, schemas, None, 0, INT64_MAX)
            assert found is not None, "the state on disk was not restored"
            assert reader.progress is not None
            restore_progress(self.task, reader.progress)
            self._changelog, self._offset = found.covered_offset, self.task.sources["clicks"]
        self.task.initialize(START_MS)

    def take(self, numbers: Int64Array) -> None:
        """Process a record of each of these keys, and commit."""
        count = len(numbers)
        keys: list[bytes | None] = [b"user-%09d" % n for n in numbers.tolist()]
        offsets = np.arange(self._offset, self._offset + count)
        times = np.full(count, START_MS)
        self._offset += count
        self.task.process(Columns("clicks", 0, keys, [b'{"ms":5}'] * count, times, offsets), START_MS)
        self._changelog += len(self.task.prepare_commit(START_MS).changelog)
        self.task.commit_succeeded(CommitPosition(None, self._changelog))

    def close(self) -> None:
        """Release the folder."""
        if self.task.local is not None:
            self.task.local.close()

    def held(self, key: int) -> list[Any]:
        """The states of one key's session."""
        store: Any = self.task.stores["visits"]
        (session,) = store.rows_of(f"user-{key:09d}")
        return list(session.states)


def contest(store: str, sessions: int, data_mib: int | None, *, default_limits: bool = False) -> dict[str, float | str]:
    """One contestant's figures, or, if it ran out of memory, only that."""
    with tempfile.TemporaryDirectory() as folder:
        filled = Filled(Path(folder) if store == "rocksDB" else None, default_limits=default_limits)
        filled.take(np.arange(-BATCH, 0) + 10**8)  # make one-time allocations before the measurement
        before = private_kib()
        if data_mib is not None:
            limit = (private_kib("VmData") + data_mib * 1024) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            figures, twice = _fill(filled, sessions, before, Path(folder))
            if store == "rocksDB" and data_mib is None:  # there would be no memory for a second one
                figures["restore_seconds"] = _restored(Path(folder), sessions, twice)
            return figures
        except (MemoryError, ProcessingFailed) as e:
            if not isinstance(e, MemoryError) and not isinstance(e.__cause__, MemoryError):
                raise
            return {"failed": OUT_OF_MEMORY}


def _fill(filled: Filled, sessions: int, before: int, folder: Path) -> tuple[dict[str, float | str], int]:
    """The figures, and a session that took two records."""
    random = np.random.default_rng(1)
    started, cpu = time.monotonic(), time.process_time()
    for first in range(0, sessions, BATCH):
        filled.take(np.arange(first, min(first + BATCH, sessions)))
    filling = time.monotonic() - started
    again = random.choice(sessions, int(sessions * AGAIN_SHARE), replace=False)
    for first in range(0, len(again), BATCH):
        filled.take(again[first : first + BATCH])
    assert len(filled.task.stores["visits"]) == sessions + BATCH
    twice = int(again[0])
    assert (filled.held(twice)[0], filled.held(10**8 - 1)[0]) == (2, 1), "what was put away is not as it was"
    records = sessions + len(again)
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "held_mib": (private_kib() - before) / 1024,
        "resident_mib": private_kib("VmRSS") / 1024,
        "on_disk_mib": on_disk / 1024 / 1024,
        "sessions_per_second": sessions / filling,
        "cpu_us_per_record": (time.process_time() - cpu) / records * 1e6,
    }, twice


def _restored(folder: Path, sessions: int, twice: int) -> float:
    """The time a task takes to be restored after a crash, while the first task keeps its folder."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        started = time.monotonic()
        filled = Filled(Path(copy))
        states = filled.held(twice)
        seconds = time.monotonic() - started
        assert (states[0], len(filled.task.stores["visits"])) == (2, sessions + BATCH), "what was restored is not whole"
        filled.close()
    return seconds


def private_kib(of: str = "RssAnon") -> int:
    """This process' memory in KiB, as the kernel reports it."""
    found = re.search(rf"^{of}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def main() -> int:
    """Run both and print. The status is 1 if RocksDB's failed, or used more memory than the one in memory."""
    parser = argparse.ArgumentParser(prog="scripts/bench state", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1_000_000)
    parser.add_argument("--data-mib", type=int, help="limit of the growth of a process' private memory")
    parser.add_argument(
        "--default-limits", action="store_true", help="use a worker's default memory limits for RocksDB"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=STORES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(contest(given.one, given.sessions, given.data_mib, default_limits=given.default_limits)))
        return 0
    figures: dict[str, dict[str, Any]] = {}
    for store in STORES:
        command = [sys.executable, "-m", "bench.state", "--one", store, "--sessions", str(given.sessions)]
        command += [] if given.data_mib is None else ["--data-mib", str(given.data_mib)]
        command += ["--default-limits"] if given.default_limits else []
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = ended.stdout.splitlines()
        figures[store] = json.loads(lines[-1]) if ended.returncode == 0 and lines else {"failed": "ended early"}
    return report(given.sessions, figures, as_json=given.json)


def report(sessions: int, figures: dict[str, dict[str, Any]], *, as_json: bool) -> int:
    """Print the figures; return the exit status."""
    if as_json:
        print(json.dumps(figures))
    else:
        print(f"{sessions:,} open sessions with count and mean")
        for store, of in figures.items():
            if "failed" in of:
                print(f"{store:10} {of['failed']}")
                continue
            print(
                f"{store:10} {of['held_mib']:6.0f} MiB held {of['on_disk_mib']:6.0f} MiB on disk "
                f"{of['sessions_per_second']:9,.0f} sessions/s {of['cpu_us_per_record']:6.2f} µs CPU a record"
                + (f" {of['restore_seconds']:6.2f} s to restore" if "restore_seconds" in of else "")
            )
    on_disk, in_memory = figures["rocksDB"], figures["in_memory"]
    return int("failed" in on_disk or ("failed" not in in_memory and on_disk["held_mib"] > in_memory["held_mib"]))


if __name__ == "__main__":
    sys.exit(main())
