"""The file connectors, without a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.connect import SinkRecord
from penstock.shared.connect.connectors.file_stream import FileStreamSinkTask
from penstock.shared.connect.errors import ConnectError
from tests.shared.connect.connectors.sink_context import Context


def record(value: object) -> SinkRecord:
    return SinkRecord("t", 0, None, None, None, value, kafka_offset=0)


async def test_what_was_put_stands_in_the_file_at_once(tmp_path: Path) -> None:
    """Whoever follows the file need not wait for the next commit; what was there before stays."""
    (tmp_path / "out").write_text("before\n")
    task = FileStreamSinkTask()
    task.initialize(Context())
    await task.start({"file": str(tmp_path / "out")})
    await task.put([record("a"), record(True), record(None), record({"n": 1})])
    assert (tmp_path / "out").read_text() == "before\na\ntrue\nnull\n{'n': 1}\n"
    await task.stop()


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With what the system says of it."""
    task = FileStreamSinkTask()
    task.initialize(Context())
    with pytest.raises(ConnectError, match=r"no/out.*No such file"):
        await task.start({"file": str(tmp_path / "no" / "out")})
