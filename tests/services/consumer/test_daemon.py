"""The handler daemon before it reaches Kafka: what it refuses, and what it says of its health."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.consumer.daemon import ConsumerDaemon
from services.consumer.settings import ConsumerServiceSettings
from shared.common.errors import ConfigError


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    name = f"handler_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("class Away(Exception): ...\nasync def handle(record): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return ["--topics", "clicks", "--group-id", "g", "--handler", f"{name}:handle"]


def test_an_exception_nobody_has_is_refused_at_start_up(arguments: list[str]) -> None:
    """By its name; one of the handler's own module is known by then."""
    ConsumerDaemon(ConsumerServiceSettings.load([*arguments, "--retry.retriable", "Away,OSError"], environ={}))
    with pytest.raises(ConfigError, match=r"retry\.retriable: no exception class 'Nonsense'"):
        ConsumerDaemon(ConsumerServiceSettings.load([*arguments, "--retry.retriable", "OSError,Nonsense"], environ={}))
    with pytest.raises(ConfigError, match=r"retry\.not_retriable: no exception class 'Nonsense'"):
        ConsumerDaemon(ConsumerServiceSettings.load([*arguments, "--retry.not-retriable", "Nonsense"], environ={}))
