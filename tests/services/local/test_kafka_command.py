"""The command `penstock kafka`: its flags."""

from __future__ import annotations

import pytest

from penstock.services.local.kafka_command import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "penstock kafka: argument --port: must be a port from 0 to 65535, got '99999'"),
        (["--port=-1"], "penstock kafka: argument --port: must be a port from 0 to 65535, got '-1'"),
        (["--prot", "1"], "penstock kafka: unrecognized arguments: --prot 1"),
    ],
)
def test_an_invalid_flag_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid flag ends with status 2 and one line."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"
