"""Replays of recorded runs of Kafka Streams."""

from __future__ import annotations

import copy
import gzip
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.shared.testing.oracle import (
    KINDS,
    Case,
    first_difference,
    main,
    read_cases,
    replay,
    replay_batches,
)

DATA = Path(__file__).parents[2] / "data"
RECORDED = [DATA / "kafka_streams.jsonl.gz", DATA / "kafka_streams_sliding.jsonl.gz"]
CASES = [case for path in RECORDED for case in read_cases(path)]
BATCH_SIZES = (7, 1_000)
ONE_OF_EACH = list({(case["kind"], case.get("emit"), case.get("aggregate")): case for case in CASES}.values())
"""A case of each kind, emission and aggregate."""


def name_of(case: Case) -> str:
    return f"{case['kind']}-{case['seed']}"


def write(path: Path, *cases: Case) -> Path:
    path.write_bytes(b"\n".join(map(msgspec.json.encode, cases)) + b"\n\n")
    return path


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_recorded_case(case: Case) -> None:
    """A recorded input has Kafka Streams's output."""
    assert replay(case) is None


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
def test_recorded_case_in_batches(case: Case) -> None:
    """In batches of any size the output is the same, reduced to the last of each commit."""
    assert [replay_batches(case, size) for size in BATCH_SIZES] == [None] * 2


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=map(name_of, ONE_OF_EACH))
def test_recorded_case_in_batches_of_one(case: Case) -> None:
    """In batches of one record, each commit has the recorded output."""
    assert replay_batches(case, 1) is None


WITHOUT_NUMBA = """
import importlib.util, sys
from importlib.machinery import PathFinder

class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "numba" else super().find_spec(name, path, target)

sys.meta_path[:] = [Others if finder is PathFinder else finder for finder in sys.meta_path]
assert importlib.util.find_spec("numba") is None

from penstock.shared.common.kernel_loading import IS_COMPILED
from penstock.shared.testing.oracle import main

status = main(sys.argv[1:]) or main(["--batch", "7", *sys.argv[1:]])
assert not IS_COMPILED and "numba" not in sys.modules
sys.exit(status)
"""
"""Runs the oracle as if numba were not installed, record by record and in batches."""


def test_without_numba(tmp_path: Path) -> None:
    """Without numba a case of each kind, emission and aggregate passes, record by record and in batches."""
    file = write(tmp_path / "cases.jsonl", *ONE_OF_EACH)
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", WITHOUT_NUMBA, str(file)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{len(ONE_OF_EACH)} passed, 0 failed\n" * 2


def test_the_recorded_cases_cover_all_kinds() -> None:
    """The recorded cases cover every kind, both emissions, every aggregate, dropped records, and merges of sessions."""
    assert {c["kind"] for c in CASES} == set(KINDS)
    for kind in set(KINDS) - {"punctuation"}:
        windows = [c for c in CASES if c["kind"] == kind]
        assert {c["emit"] for c in windows} == {"on_update", "on_window_close"}
        assert {c["aggregate"] for c in windows} == {"count", "sum", "max", "list"}
        assert any(c["dropped"] for c in windows)
        assert any(o["value"] is None for c in windows for o in c["output"]) == (kind == "session")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tampered_output_is_reported(kind: str) -> None:
    """A changed, a missing and an added output each make a case fail, with the position."""
    case = next(c for c in CASES if c["kind"] == kind and len(c["output"]) > 3)
    changed, missing, added = copy.deepcopy(case), copy.deepcopy(case), copy.deepcopy(case)
    changed["output"][2]["timestamp"] += 1
    del missing["output"][-1]
    added["output"].append(added["output"][-1])
    results = [replay(c) for c in (changed, missing, added)]
    assert None not in results
    assert "output " in str(results[0])
    number = len(case["output"])
    assert results[1:] == [f"{number} outputs, recorded {number - 1}", f"{number} outputs, recorded {number + 1}"]


def test_a_wrong_count_of_dropped_records_is_reported() -> None:
    """A case fails if another number of records was dropped than recorded."""
    case = copy.deepcopy(next(c for c in CASES if c["kind"] == "session"))
    case["dropped"] += 1
    assert replay(case) == f"dropped {case['dropped'] - 1}, recorded {case['dropped']}"


def test_first_difference() -> None:
    """The first difference of lists is that of an item, or of their lengths."""
    a, b = {"step": 0}, {"step": 1}
    assert first_difference([a, b], [a, b]) is None
    assert first_difference([a, b], [a, a]) == "output 1: {'step': 1}, recorded {'step': 0}"
    assert first_difference([a], [a, b]) == "1 outputs, recorded 2"


def test_main_ends_with_a_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If all cases of all files pass, the exit status is 0 and the last line has their number."""
    files = [write(tmp_path / f"{number}.jsonl", *CASES[: number + 1]) for number in range(2)]
    assert main([*map(str, files)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 passed, 0 failed"


def test_batches_are_compared_net_of_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--batch` a wrong value or a missing window is reported."""
    session = next(c for c in CASES if c["kind"] == "session" and len(c["output"]) > 3 and c["aggregate"] == "count")
    missing, wrong = copy.deepcopy(session), copy.deepcopy(session)
    del missing["output"][-1]
    wrong["output"][-1]["value"] = "99"
    assert main(["--batch", "7", str(write(tmp_path / "cases.jsonl", session, missing, wrong))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[2].split(" at ")[0] for line in lines[:-1]] == ["batch of 7"] * 2
    assert lines[-1] == "1 passed, 2 failed"


def test_main_reports_each_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed case is reported with file, line and seed, the rest still runs, and the exit status is 1."""
    good, bad = CASES[0], copy.deepcopy(CASES[1])
    bad["output"].pop()
    file = write(tmp_path / "cases.jsonl", good, bad, good)
    assert main([str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{file}:2: session, seed {bad['seed']}: ")
    assert lines[-1] == "2 passed, 1 failed"


def test_main_counts_skipped_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases of unknown kinds are counted as skipped, and without any other case the exit status is 1."""
    other = {"kind": "another", "seed": 1}
    assert main([str(write(tmp_path / "mixed.jsonl", CASES[0], other))]) == 0
    assert capsys.readouterr().out == "1 skipped\n1 passed, 0 failed\n"
    assert main([str(write(tmp_path / "other.jsonl", other))]) == 1
    assert capsys.readouterr().out == "1 skipped\n0 passed, 0 failed\n"


def test_plain_and_gzip_read_alike(tmp_path: Path) -> None:
    """A file of cases may be compressed."""
    plain = tmp_path / "cases.jsonl"
    plain.write_bytes(gzip.decompress(RECORDED[0].read_bytes()))
    assert list(read_cases(plain)) == list(read_cases(RECORDED[0]))


def test_main_with_state_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases pass with their state on disk, record by record and in batches."""
    cases = [next(case for case in CASES if case["kind"] == kind) for kind in ("session", "hopping", "sliding")]
    file = str(write(tmp_path / "cases.jsonl", *cases))
    assert [main(["--store", "rocksdb", file]), main(["--batch", "7", "--store", "rocksdb", file])] == [0, 0]
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["3 passed, 0 failed"] * 2


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_a_batch_has_at_least_one_record(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch size below 1 ends with status 2 and the value."""
    with pytest.raises(SystemExit, match="2"):
        main([f"--batch={size}", str(RECORDED[0])])
    assert size in capsys.readouterr().err
