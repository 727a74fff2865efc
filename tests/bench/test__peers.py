"""The peers of the benchmark of sessions: available ones are run, and missing ones are reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import _peers
from bench._peers import absent, available, race
from bench._session_peers import PEERS, Stopwatch

NAME = "bytewax session count"


def test_importable_peers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A Python lists the peers that it can import. A missing interpreter has no peers and is reported."""
    assert set(available(sys.executable)) <= set(PEERS)
    assert available("/no/python") == []
    assert "/no/python cannot be run" in capsys.readouterr().err


def test_missing_peers_have_an_install_command() -> None:
    """Each missing peer has a line with the command that installs it."""
    (line,) = absent("/some/python", ["quix tumbling count"])
    assert "/some/python has no bytewax (pip install bytewax" in line
    assert absent("/some/python", list(PEERS)) == []


async def test_a_peer_that_fails_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer's figures are its last line. A peer that fails is reported with its last line of errors."""
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys\nif sys.argv[2] != 'good': sys.exit('no broker there')\nprint('noise')\nprint('{\"x\": 1}')\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(_peers, "SCRIPT", script)
    assert await race(sys.executable, ["good", NAME], "here:1", "clicks", 5) == {"good": {"x": 1}}
    assert f"{NAME}: not measured" in capsys.readouterr().err


def test_a_stopwatch_runs_from_the_first_record_to_the_last() -> None:
    """A rate requires that all records have arrived, and is an error otherwise."""
    watch = Stopwatch(2)
    watch.seen()
    with pytest.raises(SystemExit, match="1 of 2 records"):
        watch.figures()
    watch.seen()
    assert watch.figures(to_last_record=True)["records_per_second"] > watch.figures()["records_per_second"] > 0
