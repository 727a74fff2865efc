"""The partitions of column records equal those of Java's partitioner, and order is kept."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.clients.producer.partitioner_kernels import NO_PARTITION, partitions_of_keys, rows_by_partition
from penstock.shared.common.packed_bytes import PackedBytes
from tests.documents import ROOT

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "murmur2.jsonl").read_text().splitlines()]


def test_java_agrees() -> None:
    """Each recorded key goes to the partition that Java's partitioner chooses."""
    keys = PackedBytes.of([base64.b64decode(case["key"]) for case in CASES])
    assert partitions_of_keys(keys, 7).tolist() == [case["partition_of_7"] for case in CASES]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=30), st.integers(1, 2**31 - 1))
def test_keys_go_where_single_records_go(keys: list[bytes | None], count: int) -> None:
    """The kernel and the compiled murmurhash2 agree. Records without a key are marked."""
    expected = [NO_PARTITION if key is None else for_key(key, count) for key in keys]
    assert partitions_of_keys(PackedBytes.of(keys), count).tolist() == expected


@given(st.lists(st.integers(0, 6)))
def test_rows_keep_their_order(partitions: list[int]) -> None:
    """Each partition that occurs is listed once, with its rows in ascending order."""
    found = {number: rows.tolist() for number, rows in rows_by_partition(np.array(partitions, np.int64), 7)}
    assert found == {
        number: [row for row, of in enumerate(partitions) if of == number] for number in sorted(set(partitions))
    }


def test_the_functions_run_without_a_compiler() -> None:
    """With NUMBA_DISABLE_JIT=1 the functions return the same partitions and emit no overflow warning."""
    code = f"import {__name__} as these; these.test_java_agrees(); these.test_rows_keep_their_order()"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], cwd=ROOT, env=environment, check=True)
