"""The handler that stores notable sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.services.local.demo.handler import FILE_VARIABLE, count_notable_sessions, store
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import ConsumerRecord


def record(value: bytes | None) -> ConsumerRecord:
    return ConsumerRecord("banks", 0, 0, 0, b"k", value)


async def test_only_notable_sessions_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notable session is a line in the configured file, and handling it twice does not change the count."""
    path = tmp_path / "notable.jsonl"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    assert count_notable_sessions(path) == 0
    await store(record(b'{"key":"a","start":0,"end":9,"flights":3,"mean_delay":4.5}'))
    for _ in range(2):
        await store(record(b'{"key":"b","start":0,"end":9,"flights":3,"mean_delay":95.0}'))
    await store(record(b'{"key":"c","start":0,"end":9,"events":77}'))
    assert count_notable_sessions(path) == 2
    assert len(path.read_bytes().splitlines()) == 3


@pytest.mark.parametrize("value", [None, b"", b"[]", b"{", b"[" * 100_000])
async def test_an_invalid_session_is_an_error(value: bytes | None) -> None:
    """An invalid session is a DataError, so the runner writes a dead letter instead of retrying."""
    with pytest.raises(DataError, match="not a session"):
        await store(record(value))
