"""The doctor's exit statuses and output, without a broker."""

from __future__ import annotations

import pytest

from penstock.services.local.doctor.main import main


def test_an_invalid_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid setting ends with status 2 before anything is checked."""
    assert main(["--kafka.bootstrap-server=x"]) == 2
    output = capsys.readouterr()
    assert "kafka.bootstrap-servers" in output.err
    assert output.out == ""


def test_an_unreachable_kafka_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """An unreachable Kafka ends with status 1 and is the last line, with its fix; the machine
    is checked nevertheless.
    """
    assert main(["--kafka.bootstrap-servers=127.0.0.1:1", "--kafka.request-timeout-ms=500"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("problem  Kafka at 127.0.0.1:1: BrokerNotAvailable")
    assert "fix it with: penstock kafka" in lines[-1]
    assert any(line.split()[1] == "Java:" for line in lines)
    assert any("disk of" in line for line in lines)


def test_missing_jars_are_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """Missing jars are warnings with the command that downloads them, since the first start does it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main(["--kafka.bootstrap-servers=127.0.0.1:1", "--kafka.request-timeout-ms=100"])
    lines = capsys.readouterr().out.splitlines()
    jars = [line for line in lines if "the first start downloads them" in line]
    assert [line.rpartition("fix it with: ")[2] for line in jars] == [
        "penstock jars kafka",
        "penstock jars spark",
    ]
