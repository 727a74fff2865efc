"""Kernels are compiled ahead, so that no record waits for a compilation."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np

from penstock.shared.clients.protocol.column_batch_builder import ColumnBatchBuilder, EncodableColumns
from penstock.shared.clients.protocol.completed_fetch import CompletedFetch
from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Columns
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.compile_kernels import compile_kernels
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.shared.streams.batches_beside_records import Value, hopping, sessions, sliding, topology

ROOT = Path(__file__).parents[3]
RECORDS = 2_000
"""So many keys that arrays grow."""
NOW_MS = 1_000_000


def main() -> None:
    """Prints each kernel that is compiled again after all have been compiled."""
    compile_kernels()
    before = kinds_of_arguments()
    for windowed in (sessions(10, 5), hopping(20, 5, 5), sliding(10, 5)):
        use(topology(windowed, "on_close"))
        use(topology(windowed, "on_update"))
    builder = StreamsBuilder()
    builder.stream("in", value=Value).group_by_key().aggregate("totals", n=Count(), ms=Sum("ms")).to_stream().to("out")
    use(builder.build())
    print({name: kinds for name, kinds in kinds_of_arguments().items() if kinds != before.get(name)})


def kinds_of_arguments() -> dict[str, set[str]]:
    """For each kernel those that it is compiled for."""
    from numba.core.dispatcher import Dispatcher

    kernels = [one for one in gc.get_objects() if isinstance(one, Dispatcher)]
    return {f"{one.py_func.__module__}.{one.py_func.__name__}": set(map(str, one.signatures)) for one in kernels}


def use(built: Topology) -> None:
    """Lets a task process a fetched batch twice and commit, and another task restore it."""
    driver = TopologyTestDriver(built, now_ms=NOW_MS)
    columns = fetched()
    assert columns is not None
    for part in (columns[: RECORDS // 2], columns[RECORDS // 2 :]):
        driver.task.process(part, NOW_MS)
        driver.commit()
    driver.crash()
    driver.restore()


def fetched() -> Columns | None:
    """Records as they come from a broker; the last of them are late for any window."""
    keys = PackedBytes.of([b"key-%d" % (n % 1_000) for n in range(RECORDS)])
    values = PackedBytes.of([b'{"n":%d,"ms":%d.5}' % (n, n) for n in range(RECORDS)])
    headers = PackedHeaders.of([(("trace", b"%d" % n),) for n in range(RECORDS)]).blocks
    times = np.where(np.arange(RECORDS) < RECORDS - 50, np.arange(RECORDS), 0)
    builder = ColumnBatchBuilder(1_000_000, 1_000_000, transactional=False)
    builder.extend(EncodableColumns.of(keys, values, times, headers), np.arange(RECORDS), 0, RECORDS)
    return CompletedFetch("in", 0, 0, bytes(builder.build()), None, packed=True).read(None)


def test_no_kernel_is_compiled_after_all_were() -> None:
    """Fetched records, results, late records, entries and a restore meet no kernel that is not compiled for them."""
    command = [sys.executable, "-m", "tests.shared.streams.test_compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{}\n"


if __name__ == "__main__":
    main()
