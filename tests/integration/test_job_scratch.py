"""The scratch folder of a job that is stopped or killed; the job is a small script instead of a Spark job."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.spark.spark_session import remove_abandoned

JOB = """
import sys, time
from pathlib import Path
from penstock.services.spark.spark_session import scratch_folder
with scratch_folder(Path(sys.argv[1])) as work:
    (Path(work) / "blockmgr").mkdir()
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_job_removes_an_abandoned_folder(tmp_path: Path, how: int) -> None:
    """A job's scratch folder is in use until the job ends, by SIGTERM or SIGKILL, and then the next job removes it."""
    job = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == b"there\n"
        (work,) = tmp_path.iterdir()
        remove_abandoned(tmp_path)
        assert work.is_dir()
        job.send_signal(how)
        assert job.wait(30) == -how
    finally:
        job.kill()
        job.wait()
    assert work.is_dir()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
