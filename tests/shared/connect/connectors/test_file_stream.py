"""The file sink writes immediately, and a file that cannot be written is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.connect import SinkRecord
from penstock.shared.connect.connectors.file_stream import FileStreamSinkTask
from penstock.shared.connect.errors import ConnectError
from tests.shared.connect.connectors.sink_context import Context


def record(value: object) -> SinkRecord:
    return SinkRecord("t", 0, None, None, None, value, kafka_offset=0)


async def test_put_writes_to_the_file_immediately(tmp_path: Path) -> None:
    """`put` appends records to the file immediately, without waiting for a commit."""
    (tmp_path / "out").write_text("before\n")
    task = FileStreamSinkTask()
    task.initialize(Context())
    await task.start({"file": str(tmp_path / "out")})
    await task.put([record("a"), record(True), record(None), record({"n": 1})])
    assert (tmp_path / "out").read_text() == "before\na\ntrue\nnull\n{'n': 1}\n"
    await task.stop()


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file that cannot be opened is an error with its path and the system's message."""
    task = FileStreamSinkTask()
    task.initialize(Context())
    with pytest.raises(ConnectError, match=r"no/out.*No such file"):
        await task.start({"file": str(tmp_path / "no" / "out")})
